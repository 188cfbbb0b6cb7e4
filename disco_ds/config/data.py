"""The `data` section of a recipe: where samples come from, how they are read and augmented."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from disco_ds.config.settings import MAX_SECONDS, Settings
from disco_ds.config.templates import check_template
from disco_ds.names import CUSTOM_CODE

MAX_JITTER = 1.5
"""Pauses between attempts are random, from 2 - MAX_JITTER to MAX_JITTER times their mean."""

LEAST_CACHE_GB = 100.0
"""Default size of the cache of remote shards, in 1e9 bytes, if its disk has room and the slots need no more."""

Pixels = Literal["device", "host", "compressed"]
"""Where the images of a step wait between the two passes of GradAccum."""


class AugmentSettings(Settings):
    """Random augmentation of the training images, computed on the device. 0 disables each kind."""

    rotate_degrees: float = Field(0.0, ge=0, le=180)
    """Maximum rotation in degrees. The angle is uniform between -rotate_degrees and
    +rotate_degrees."""
    zoom: float = Field(0.0, ge=0, lt=1)
    """Maximum relative change of size. The factor is uniform between 1 - zoom and 1 + zoom."""
    shift: float = Field(0.0, ge=0, lt=1)
    """Maximum translation along each axis, as a fraction of the image's side."""
    color_scale: float = Field(0.0, ge=0, lt=1)
    """Maximum relative change of contrast. Each channel has its own factor, uniform between
    1 - color_scale and 1 + color_scale."""
    color_offset: float = Field(0.0, ge=0, lt=1)
    """Maximum change of brightness, for pixels in [0, 1]. Each channel has its own offset, uniform
    between -color_offset and +color_offset."""
    color_jitter: tuple[
        NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, Annotated[float, Field(ge=0, le=0.5)]
    ] = (0.0,) * 4
    """Brightness, contrast, saturation and hue as in torchvision's ColorJitter, in a random order
    for each image. The first three are factors, uniform in [max(0, 1 - value), 1 + value]; the hue
    turns by at most this fraction of the color circle."""
    color_jitter_prob: float = Field(1.0, ge=0, le=1)
    """Fraction of images to which color_jitter is applied."""
    gray_scale_prob: float = Field(0.0, ge=0, le=1)
    """Fraction of images that are converted to gray scale."""
    re_prob: float = Field(0.0, ge=0, le=1)
    """Fraction of images in which random boxes are replaced by noise, with the sizes of timm's
    RandomErasing."""
    re_count: int = Field(1, ge=1, le=8)
    """Maximum number of erased boxes in an image. The number is uniform from 1, and the boxes
    together have the area of one."""


class RemoteSettings(Settings):
    """How remote shards are fetched. A shard is fetched as a whole before it is read."""

    http: bool = False
    """Allow shards at http:// and https:// URLs."""
    pipe: bool = False
    """Allow shards as `pipe:COMMAND`. The recipe's author can then run any command in a shell with
    your rights."""
    cache: Path = Path("~/.cache/disco_ds")
    """Folder on a local disk of each host, shared by all ranks of the host. Fetched shards are kept
    in its sub-folder `disco_ds-UID`, which only your user can read, until other shards need the
    space. No other files are touched."""
    cache_gb: PositiveFloat | None = None
    """Size limit of the cache, in 1e9 bytes. At most 90% of the free disk space is used. Null: room
    for the shards that the slots of this host read at a time and fetch ahead, and at least 100. A
    run that reads more shards at a time than the cache can contain is refused at the start."""
    prefetch_shards: int = Field(1, ge=0, le=1000)
    """Shards that each slot fetches before they are needed, as far as the cache has room for them.
    A slot that shuffles several shards together fetches at least that many. 0: a shard is fetched
    when its first sample is read."""
    tries: int = Field(5, gt=0, le=100)
    """Attempts to fetch a shard. Pauses of about 1, 2, 4 and 8 s separate them, none longer than
    timeout_s. An attempt continues where the previous one stopped if the server supports that. A
    shard fetched ahead of its use has one attempt more."""
    timeout_s: float = Field(60.0, gt=0, le=MAX_SECONDS)
    """Seconds without data from the server or the command after which an attempt fails. It must be
    below data.worker_timeout_s, and all attempts together must take less than the top-level timeout_s."""

    def pause_s(self, number: int) -> float:
        """Return the mean pause before attempt `number`, if the first attempt has number 0."""
        return min(2.0 ** (number - 1), self.timeout_s / MAX_JITTER)

    @property
    def longest_s(self) -> float:
        """Seconds after which fetching a shard has failed for good."""
        pauses = sum(MAX_JITTER * self.pause_s(number) for number in range(1, self.tries))
        return (self.tries + (self.prefetch_shards > 0)) * self.timeout_s + pauses


def _check_captions(captions: dict[str, float]) -> dict[str, float]:
    weights = captions.values()
    if min(weights, default=-1) < 0 or not 0 < sum(weights) < float("inf"):
        raise ValueError(f"the weights must be at least 0, with a sum above 0, got {captions}")
    for template in captions:
        check_template(template)
    return captions


def _check_order(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"expected [low, high] with low <= high, got {list(bounds)}")
    return bounds


Captions = Annotated[dict[str, float], AfterValidator(_check_captions)]
Fraction = Annotated[float, Field(gt=0, le=1)]
SourceName = Annotated[str, Field(pattern=rf"^(shards|synthetic|{CUSTOM_CODE})$")]


class SourceSettings(Settings):
    """One of several sources."""

    source: SourceName = "shards"
    """Where samples of this source come from: `shards`, `synthetic` or `package.module:Class`, as for
    data.source."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of this source, as data.options."""
    shards: str | None = None
    """Shards of this source, as data.shards."""
    manifest: Path | None = None
    """Manifest of this source, as data.manifest."""
    weight: PositiveFloat | None = None
    """Share of this source in the samples, relative to the weights of the other sources. Set it for
    every source or for none. Null: the number of samples in the source."""
    replacement: bool = False
    """Draw samples of this source independently, with replacement. False: each sample is used once
    per epoch."""
    image_key: str | None = None
    """Members that may contain the image in this source. Null: data.image_key."""
    captions: Captions | None = None
    """Caption templates of this source. Null: data.captions."""


class DataSettings(Settings):
    """Where samples come from, and how they are read, decoded and augmented."""

    source: SourceName = "shards"
    """Where samples come from. `shards`: the files of data.shards or data.sources; `synthetic`: random
    pixels and tokens, to try a model or a cluster without data; `package.module:Class`: a custom
    source, importable through PYTHONPATH."""
    shards: str | None = None
    """A folder of .tar shards; shards listed by braces, such as /data/{00000..00099}.tar,
    https://host/{0..9}.tar or pipe:COMMAND {0..9}; a .csv of image paths and captions; or
    `bundled:emoji/train`, which is part of this package."""
    sources: tuple[SourceSettings, ...] | None = None
    """Several sources, mixed by weight, instead of data.shards."""
    manifest: Path | None = None
    """Manifest that `disco-ds index` wrote for the shards. Null: manifest.json in their folder."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of a custom source."""
    remote: RemoteSettings = RemoteSettings()
    num_samples: int = Field(1_000_000, gt=0, le=10**11)
    """Number of samples of the synthetic source."""
    image_key: str = "jpg;jpeg;png;webp"
    """Member names (extensions) that may contain the image, tried in this order. For a csv: the
    column of image paths."""
    captions: Captions = Field({"{txt}": 1.0})
    """Caption templates and their weights, such as {"{txt}": 0.5, "{json[keywords]}": 0.5}. A field
    in braces is a member, an entry of a JSON member (of a list: {json[captions][0]}), or a column
    of a csv. Each time a sample is used, one template is drawn by weight."""
    csv_separator: str | None = Field(None, min_length=1, max_length=1)
    """Column separator of a csv. Null: a tab if the first line contains one, otherwise a comma."""
    slots: int | None = Field(None, gt=0, le=2**20)
    """Number of logical streams that make up the data order. It must be a multiple of the number of
    ranks, and a resumed run keeps its number; choose one with many divisors if the number of ranks
    may change. Null: 512, or fewer if there are fewer shards or if the shards are remote and large
    (all slots together read at most 128e9 bytes of remote shards at a time)."""
    window: int = Field(4096, gt=0)
    """Number of consecutive samples of a slot that are shuffled together. Raise it if neighboring
    samples are similar. A source with replacement draws from at least one shard's samples."""
    workers: int | None = Field(None, ge=0, le=1024)
    """Decoding processes per rank. Null: one fewer than the rank's share of the cores; 0: decode in
    the training process. Raise it if `time/data_wait_s` is a large part of a step."""
    prefetch: int | None = Field(None, gt=0, le=2**24)
    """Number of micro-batches prepared ahead. Null: those of one step and at least 4, within an
    eighth of the host's memory. Lower it if the host runs out of memory."""
    worker_timeout_s: float = Field(300.0, gt=0, le=MAX_SECONDS)
    """The run stops if a data worker makes no progress for this many seconds. It must be below the
    top-level timeout_s."""
    retry_s: float = Field(60.0, ge=0, le=MAX_SECONDS)
    """Seconds for which an unreadable shard or csv is tried again before all ranks save a
    checkpoint and stop; at most half of data.worker_timeout_s. Raise it if the file system has outages.
    Fetching remote shards has data.remote.tries instead."""
    max_broken: float = Field(0.01, ge=0, le=1)
    """Fraction of unreadable samples that are skipped before the run stops. Each worker tolerates
    this fraction of its samples, and 16 samples more."""
    max_pixels: int = Field(89_478_485, gt=0)
    """Images with more pixels than this are skipped as possible decompression bombs."""
    crop_scale: Annotated[tuple[Fraction, Fraction], AfterValidator(_check_order)] | None = (
        0.9,
        1.0,
    )
    """Range of the random resized crop's area, as a fraction of the image's area. Null: no random
    crop; images are resized as in evaluation."""
    crop_ratio: Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_check_order)] = (
        0.75,
        4 / 3,
    )
    """Range of the random resized crop's aspect ratio (width / height)."""
    augment: AugmentSettings = AugmentSettings()

    @model_validator(mode="after")
    def _check_sources(self) -> DataSettings:
        for number, part in enumerate(self.parts):
            where = f"data.sources.{number}" if self.parts is self.sources else "data"
            if part.source == "shards" and not part.shards:
                raise ValueError(
                    f"{where}.shards is missing: set it to a folder of .tar shards, or set "
                    f"{where}.source=synthetic"
                )
            if part.source == "shards" and part.options:
                raise ValueError(
                    f"{where}.options are for a custom source, but {where}.source is shards; "
                    "remove them"
                )
        if self.sources and (self.shards or self.manifest):
            raise ValueError(
                "data.sources replaces data.shards and data.manifest: set only one of them"
            )
        if len({source.weight is None for source in self.sources or ()}) > 1:
            raise ValueError("data.sources: set a weight for every source or for none")
        return self

    @property
    def parts(self) -> tuple[SourceSettings, ...]:
        """The sources, at least one."""
        if self.source == "shards" and self.sources:
            return self.sources
        return (
            SourceSettings(
                source=self.source,
                options=self.options,
                shards=self.shards,
                manifest=self.manifest,
            ),
        )

    def settings_of(self, part: SourceSettings) -> DataSettings:
        """Return the settings that apply to one source."""
        changes = {
            "image_key": part.image_key or self.image_key,
            "captions": part.captions or self.captions,
        }
        return self.model_copy(update=changes)
