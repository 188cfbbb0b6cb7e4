"""The `data` part of a recipe: where samples come from, how they are read and changed. See recipe.py for the rest.

The base class of all settings stands here, since recipe.py imports this file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Pixels = Literal["device", "host", "compressed"]
"""Where a step's images wait between GradAccum's two passes."""


class Settings(BaseModel):
    """Frozen, typed, without unknown keys; the docstring under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class AugmentSettings(Settings):
    """Random changes of the training images, applied on the device; all zero: none."""

    rotate_degrees: float = Field(0.0, ge=0, le=180)
    """Rotation, uniform in +- this many degrees."""
    zoom: float = Field(0.0, ge=0, lt=1)
    """Scale, uniform in 1 +- this."""
    shift: float = Field(0.0, ge=0, lt=1)
    """Translation per axis, uniform in +- this fraction of the side."""
    colour_scale: float = Field(0.0, ge=0, lt=1)
    """Gain per channel, uniform in 1 +- this."""
    colour_offset: float = Field(0.0, ge=0, lt=1)
    """Offset per channel, uniform in +- this, pixels in [0, 1]."""


class RemoteSettings(Settings):
    """Shards that are fetched, whole, before they are read."""

    http: bool = False
    """Allow shards at http:// and https://."""
    pipe: bool = False
    """Allow `pipe:COMMAND`: whoever wrote the recipe then runs COMMAND in a shell, as you."""
    cache: Path = Path("~/.cache/disco_ds")
    """Folder on a disk of each host, for all its processes. Fetched shards stay in disco_ds-UID in it, which only this
    user can open, until others need the room; nothing else is touched."""
    cache_gb: float = Field(100.0, gt=0)
    """Size of the cache in 1e9 bytes. A host reads about data.slots / hosts shards at a time, of every source."""
    tries: int = Field(5, gt=0)
    """Attempts to fetch one shard, with pauses of about 1, 2, 4, 8 s."""
    timeout_s: float = Field(60.0, gt=0)
    """A server silent for this long has failed; below data.timeout_s."""


def _check_captions(captions: dict[str, float]) -> dict[str, float]:
    if not captions or min(captions.values()) < 0 or sum(captions.values()) <= 0:
        raise ValueError(f"data.captions needs templates with weights >= 0 that do not sum to 0, got {captions}")
    return captions


Captions = Annotated[dict[str, float], AfterValidator(_check_captions)]


def _check_source(source: str) -> str:
    if source not in ("shards", "synthetic") and not re.fullmatch(r"[\w.]+:\w+", source):
        raise ValueError(f"data.source is {source!r}; expected shards, synthetic, or your own as package.module:Class")
    return source


SourceName = Annotated[str, AfterValidator(_check_source)]


class SourceSettings(Settings):
    """One of several sources."""

    source: SourceName = "shards"
    """What this source is, as data.source."""
    options: dict[str, Any] = Field({})
    """The options of this source, as data.options."""
    shards: str | None = None
    """The shards of this source, as data.shards."""
    manifest: Path | None = None
    """The manifest of this source, as data.manifest."""
    weight: float | None = Field(None, gt=0)
    """Share of this source in the samples, relative to the others'; None, for all or no source: as many as it has."""
    replacement: bool = False
    """Draw its samples independently, instead of each once per epoch."""
    image_key: str | None = None
    """Where this source has its images; None: data.image_key."""
    captions: Captions | None = None
    """Caption templates of this source; None: data.captions."""


class DataSettings(Settings):
    """Where samples come from, how they are read, decoded and changed."""

    source: SourceName = "shards"
    """`shards`: what data.shards or data.sources name; `synthetic`: random pixels and tokens, to try a model or a
    cluster without data; `package.module:Class`: a source of your own, found on PYTHONPATH."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of your own source."""
    shards: str | None = None
    """A folder of .tar shards; or by braces: /data/{00000..00099}.tar, https://host/{0..9}.tar, pipe:COMMAND {0..9};
    a .csv of image paths and captions; `bundled:emoji/train` names data of the package."""
    sources: tuple[SourceSettings, ...] | None = Field(None, min_length=1)
    """Instead of shards: several of them, mixed by weight."""
    manifest: Path | None = None
    """What `disco-ds index` wrote for the shards; None: manifest.json in their folder."""
    remote: RemoteSettings = RemoteSettings()
    num_samples: int = Field(1_000_000, gt=0)
    """Size of the synthetic source."""
    image_key: str = "jpg;jpeg;png;webp"
    """Member names (extensions) that may hold the image, tried in this order; of a csv, the column of image paths."""
    captions: Captions = {"{txt}": 1.0}
    """Caption templates and weights, e.g. {"{txt}": 0.5, "{json[keywords]}": 0.5}; fields are members or columns."""
    csv_separator: str | None = Field(None, min_length=1, max_length=1)
    """Separator of columns; None: a tab if the first line of the csv has one, else a comma."""
    slots: int | None = Field(None, gt=0)
    """Logical streams the data order is made of; a multiple of the ranks. None: 512, fewer for fewer shards."""
    window: int = Field(4096, gt=0)
    """Entries of a slot that are shuffled together."""
    workers: int | None = Field(None, ge=0)
    """Decoding processes per rank; None: one for each of the rank's cores but one; 0: decode in the trainer's
    process."""
    prefetch: int | None = Field(None, gt=0)
    """Micro-batches that are prepared ahead; None: a step's, at least 4, within an eighth of the host's memory."""
    timeout_s: float = Field(300.0, gt=0)
    """A worker silent for this long is an error."""
    max_broken: float = Field(0.01, ge=0, le=1)
    """Fraction of unreadable samples a worker tolerates (and 16 more) before the run stops."""
    max_pixels: int = Field(89_478_485, gt=0)
    """Larger images are taken for decompression bombs and skipped."""
    crop_scale: tuple[float, float] | None = (0.9, 1.0)
    """Random resized crop: area range of the crop; None: resize as in evaluation."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Aspect ratios of the crop."""
    augment: AugmentSettings = AugmentSettings()

    @model_validator(mode="after")
    def _complete(self) -> DataSettings:
        for number, part in enumerate(self.parts):
            where = f"data.sources.{number}" if self.parts is self.sources else "data"
            if part.source == "shards" and not part.shards:
                raise ValueError(
                    f"{where}.shards is missing: name a folder of .tar shards, or set {where}.source=synthetic"
                )
            if part.source == "shards" and part.options:
                raise ValueError(f"{where}.options are those of your own source, and {where}.source is shards")
        if self.sources and (self.shards or self.manifest):
            raise ValueError("data.sources takes the place of data.shards and data.manifest: set one or the other")
        if len({source.weight is None for source in self.sources or ()}) > 1:
            raise ValueError("data.sources: give every source a weight, or none")
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"data.crop_scale must be (low, high) with 0 < low <= high <= 1, got {self.crop_scale}")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError(f"data.crop_ratio must be (low, high) with 0 < low <= high, got {self.crop_ratio}")
        return self

    @property
    def parts(self) -> tuple[SourceSettings, ...]:
        """The sources, one or more."""
        if self.source == "shards" and self.sources:
            return self.sources
        own = {"source": self.source, "options": self.options, "shards": self.shards, "manifest": self.manifest}
        return (SourceSettings(**own),)

    def settings_of(self, part: SourceSettings) -> DataSettings:
        """The settings that a source is read by."""
        own = {"image_key": part.image_key, "captions": part.captions}
        return self.model_copy(update={key: value for key, value in own.items() if value is not None})
