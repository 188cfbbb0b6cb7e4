"""The `data` part of a recipe: where samples come from, how they are read and augmented; recipe.py has the rest.

The base class of all settings is in this file because recipe.py imports it.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from disco_ds.config.secrets import refuse_secret
from disco_ds.config.templates import check_template
from disco_ds.names import CUSTOM_CODE

MAX_SECONDS = 1e7
"""The longest timeout that a setting may have, four months: longer ones overflow the clocks of some libraries."""

MAX_JITTER = 1.5
"""Pauses between attempts are random, from 2 - MAX_JITTER to MAX_JITTER times their mean."""

LEAST_CACHE_GB = 100.0
"""Default size of the cache of remote shards where its disk has room and the slots need no more, in 1e9 bytes."""

Pixels = Literal["device", "host", "compressed"]
"""Where a step's images wait between GradAccum's two passes."""


class Settings(BaseModel):
    """Frozen, typed, without unknown keys; the docstring under a field is its help text."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plain_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would take, and no person means: true as a number, more than 64 bits, zero bytes; and
        secrets."""
        if (
            isinstance(value, bool)
            and cls.model_fields[info.field_name or ""].annotation is not bool
        ):
            raise ValueError(f"{str(value).lower()} is no value of it")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("the number has more than 64 bits")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("it has a zero byte, which no file name or command may have")
        for text in value.values() if isinstance(value, dict) else [value]:
            if isinstance(text, str):
                refuse_secret(text)
        return value


NotNegative = Annotated[float, Field(ge=0)]


class AugmentSettings(Settings):
    """Random augmentation of the training images, applied on the device. Zero switches each kind off."""

    rotate_degrees: float = Field(0.0, ge=0, le=180)
    """Maximum rotation in degrees; the angle is uniform in +-rotate_degrees."""
    zoom: float = Field(0.0, ge=0, lt=1)
    """Maximum relative change of size; the factor is uniform in 1 +- zoom."""
    shift: float = Field(0.0, ge=0, lt=1)
    """Maximum translation along each axis, as a fraction of the side; uniform in +-shift."""
    color_scale: float = Field(0.0, ge=0, lt=1)
    """Maximum relative change of contrast; each channel's factor is uniform in 1 +- color_scale."""
    color_offset: float = Field(0.0, ge=0, lt=1)
    """Maximum change of brightness, with pixels in [0, 1]; each channel's offset is uniform in +-color_offset."""
    color_jitter: tuple[
        NotNegative, NotNegative, NotNegative, Annotated[float, Field(ge=0, le=0.5)]
    ] = (0.0,) * 4
    """Brightness, contrast, saturation and hue of torchvision's ColorJitter: the first three factors are uniform in
    [max(0, 1 - value), 1 + value], hue turns by +-value of the color circle; in a random order for each image."""
    color_jitter_prob: float = Field(1.0, ge=0, le=1)
    """Fraction of the images whose colors color_jitter changes."""
    gray_scale_prob: float = Field(0.0, ge=0, le=1)
    """Fraction of the images that are turned to gray scale."""
    re_prob: float = Field(0.0, ge=0, le=1)
    """Fraction of the images in which boxes are erased, that is filled with noise; sizes as timm's RandomErasing."""
    re_count: int = Field(1, ge=1, le=8)
    """Largest number of erased boxes in an image; their number is uniform from 1, and they share one box's area."""


class RemoteSettings(Settings):
    """How remote shards are fetched. Each is fetched whole before it is read."""

    http: bool = False
    """Allow shards at http:// and https:// URLs."""
    pipe: bool = False
    """Allow `pipe:COMMAND`. Whoever wrote the recipe can then run any COMMAND in a shell with your rights."""
    cache: Path = Path("~/.cache/disco_ds")
    """Folder on a local disk of each host, shared by all its processes. Fetched shards are kept in its sub-folder
    disco_ds-UID, which only this user can open, until others need the space; no other file is touched."""
    cache_gb: float | None = Field(None, gt=0)
    """Size limit of the cache in 1e9 bytes, at most 90% of what is free on its disk. None: room for the shards that the
    slots of this host read at a time and fetch ahead, and at least 100. A run whose slots read more at a time than the
    cache can hold is refused at the start."""
    ahead: int = Field(1, ge=0, le=1000)
    """Shards that the workers fetch for every slot before they are needed, at least as many as the slot shuffles
    together, where the cache has room for more than those in use. 0: each is fetched when its first sample is read."""
    tries: int = Field(5, gt=0, le=100)
    """Attempts to fetch a shard, with pauses of about 1, 2, 4, 8 s between them, none longer than timeout_s. Each goes
    on where the one before it has failed, if the server can. What is fetched ahead has one attempt before these."""
    timeout_s: float = Field(60.0, gt=0, le=MAX_SECONDS)
    """Seconds without data from the server or the command after which an attempt fails; keep it below data.timeout_s,
    and all attempts together below timeout_s."""

    def pause_s(self, number: int) -> float:
        """The mean pause before attempt number 1, 2, ..., after attempt 0 has failed."""
        return min(2.0 ** (number - 1), self.timeout_s / MAX_JITTER)

    @property
    def longest_s(self) -> float:
        """Seconds after which a shard that cannot be fetched is given up."""
        pauses = sum(MAX_JITTER * self.pause_s(number) for number in range(1, self.tries))
        return (self.tries + (self.ahead > 0)) * self.timeout_s + pauses


def _check_captions(captions: dict[str, float]) -> dict[str, float]:
    if not captions or min(captions.values()) < 0 or sum(captions.values()) <= 0:
        raise ValueError(
            f"data.captions needs templates with weights >= 0 that do not sum to 0, got {captions}"
        )
    if not math.isfinite(sum(captions.values())):
        raise ValueError(f"data.captions needs finite weights, got {captions}")
    for template in captions:
        check_template("data.captions", template)
    return captions


Captions = Annotated[dict[str, float], AfterValidator(_check_captions)]


def _check_source(source: str) -> str:
    if source not in ("shards", "synthetic") and not re.fullmatch(CUSTOM_CODE, source):
        raise ValueError(
            f"data.source is {source!r}; expected shards, synthetic, or your own as package.module:Class"
        )
    return source


SourceName = Annotated[str, AfterValidator(_check_source)]


class SourceSettings(Settings):
    """One of several sources."""

    source: SourceName = "shards"
    """Kind of this source, as data.source."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of this source, as data.options."""
    shards: str | None = None
    """Shards of this source, as data.shards."""
    manifest: Path | None = None
    """Manifest of this source, as data.manifest."""
    weight: float | None = Field(None, gt=0)
    """Share of this source in the samples, relative to the other weights. Set it for every source or for none; None:
    the number of samples in the source."""
    replacement: bool = False
    """Draw the samples of this source independently, with replacement, instead of each once per epoch."""
    image_key: str | None = None
    """Members that may hold the image in this source; None: data.image_key."""
    captions: Captions | None = None
    """Caption templates of this source; None: data.captions."""


class DataSettings(Settings):
    """Settings of the data: the sources, and how their samples are read, decoded and augmented."""

    source: SourceName = "shards"
    """`shards`: what data.shards or data.sources name; `synthetic`: random pixels and tokens, to try a model or a
    cluster without data; `package.module:Class`: a source of your own, found on PYTHONPATH."""
    shards: str | None = None
    """A folder of .tar shards; shards listed by braces, as in /data/{00000..00099}.tar, https://host/{0..9}.tar or
    pipe:COMMAND {0..9}; a .csv of image paths and captions; or `bundled:emoji/train`, data of the package."""
    sources: tuple[SourceSettings, ...] | None = Field(None, min_length=1)
    """Several sources, mixed by weight, in place of data.shards."""
    manifest: Path | None = None
    """Manifest that `disco-ds index` wrote for the shards; None: manifest.json in their folder."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of your own source."""
    remote: RemoteSettings = RemoteSettings()
    num_samples: int = Field(1_000_000, gt=0, le=10**11)
    """Number of samples of the synthetic source."""
    image_key: str = "jpg;jpeg;png;webp"
    """Member names (extensions) that may hold the image, tried in this order; for a csv, the column of image paths."""
    captions: Captions = {"{txt}": 1.0}
    """Caption templates and their weights, e.g. {"{txt}": 0.5, "{json[keywords]}": 0.5}; a field in braces is a member,
    an entry of a JSON member (of a list: {json[captions][0]}), or a column of a csv."""
    csv_separator: str | None = Field(None, min_length=1, max_length=1)
    """Separator of a csv's columns; None: a tab if its first line has one, else a comma."""
    slots: int | None = Field(None, gt=0, le=2**20)
    """Number of logical streams that make up the data order, a multiple of the number of ranks. None: 512, or fewer for
    fewer shards and for large remote shards: all slots together read at most 128e9 bytes of them at a time. A resumed
    run keeps its number."""
    window: int = Field(4096, gt=0)
    """Number of consecutive entries of a slot that are shuffled together. Where a source is drawn with replacement, a
    slot draws from as many, or from as many as a shard has if those are more."""
    workers: int | None = Field(None, ge=0, le=1024)
    """Decoding processes per rank. None: one for each of the rank's cores but one; 0: decode in the trainer's
    process."""
    prefetch: int | None = Field(None, gt=0, le=2**24)
    """Number of micro-batches prepared ahead. None: those of one step, at least 4, within an eighth of the host's
    memory."""
    timeout_s: float = Field(300.0, gt=0, le=MAX_SECONDS)
    """Seconds without a sign from a worker after which the run stops with an error."""
    patience_s: float = Field(60.0, ge=0, le=MAX_SECONDS)
    """Seconds for which a shard or csv that cannot be read is tried again, at most half of data.timeout_s, before all
    ranks save and stop. The fetching of remote shards has data.remote.tries."""
    max_broken: float = Field(0.01, ge=0, le=1)
    """Fraction of unreadable samples that a worker tolerates, and 16 more, before the run stops."""
    max_pixels: int = Field(89_478_485, gt=0)
    """Images with more pixels are skipped as possible decompression bombs."""
    crop_scale: tuple[float, float] | None = (0.9, 1.0)
    """Area of the random resized crop, as a range of fractions of the image's; None: resize as in evaluation."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Range of the crop's aspect ratio."""
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
                raise ValueError(
                    f"{where}.options are those of your own source, and {where}.source is shards"
                )
        if self.sources and (self.shards or self.manifest):
            raise ValueError(
                "data.sources takes the place of data.shards and data.manifest: set one or the other"
            )
        if len({source.weight is None for source in self.sources or ()}) > 1:
            raise ValueError("data.sources: give every source a weight, or none")
        if not any(part.strip() for part in self.image_key.split(";")):
            raise ValueError(f"data.image_key {self.image_key!r} names no member")
        if self.csv_separator in ('"', "\n", "\r"):
            raise ValueError(
                f"data.csv_separator {self.csv_separator!r} has a meaning of its own in a csv"
            )
        if (self.remote.http or self.remote.pipe) and self.remote.timeout_s >= self.timeout_s:
            raise ValueError(
                f"data.remote.timeout_s ({self.remote.timeout_s:g}) must be below data.timeout_s ({self.timeout_s:g})"
            )
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(
                f"data.crop_scale must be (low, high) with 0 < low <= high <= 1, got {self.crop_scale}"
            )
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError(
                f"data.crop_ratio must be (low, high) with 0 < low <= high, got {self.crop_ratio}"
            )
        return self

    @property
    def parts(self) -> tuple[SourceSettings, ...]:
        """The sources, one or more."""
        if self.source == "shards" and self.sources:
            return self.sources
        own = {
            "source": self.source,
            "options": self.options,
            "shards": self.shards,
            "manifest": self.manifest,
        }
        return (SourceSettings(**own),)

    def settings_of(self, part: SourceSettings) -> DataSettings:
        """The settings that apply to one source."""
        own = {"image_key": part.image_key, "captions": part.captions}
        return self.model_copy(
            update={key: value for key, value in own.items() if value is not None}
        )
