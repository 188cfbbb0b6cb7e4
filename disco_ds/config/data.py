"""The `data` section of a recipe: where samples come from, and how they are read and augmented."""

import re
import string
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from disco_ds.config.settings import (
    Fraction,
    FunctionName,
    PositiveCount,
    PositiveFraction,
    ProperFraction,
    Settings,
    Tree,
)
from disco_ds.names import CUSTOM_CODE

DEFAULT_CACHE_GB = 200.0
"""Default size limit of the cache for remote shards, in units of 1e9 bytes."""

PIPE = "pipe:"
"""Prefix of a shell command that writes a shard to its standard output."""
SCHEMES = ("http://", "https://", "s3://", "gs://", "az://", "hf://")
"""Prefixes of the URLs that are downloaded."""

_MEMBER = r"[^\s{}\[\]!:|]+(\[[^{}\[\]|]+\])*"
FIELD = re.compile(rf"{_MEMBER}(\|{_MEMBER})*")
"""Matches the content of a template field: the extension of a sample's tar member, such as txt. For a JSON member, the
keys of an entry may follow in brackets. Several alternatives may be separated by `|`."""

Pixels = Literal["device", "host"]
"""Values of the setting image_staging, which selects where the images of a step are kept."""


class AugmentSettings(Settings):
    """Random augmentation of the training images, computed on the device.

    A value of 0 disables that kind of augmentation.
    """

    rotate_degrees: float = Field(0.0, ge=0, le=180)
    """Maximum rotation in degrees. The angle is uniform between -rotate_degrees and
    +rotate_degrees."""
    zoom: ProperFraction = 0.0
    """Maximum relative change of the image's size. The zoom factor is uniform between 1 - zoom and
    1 + zoom."""
    shift: ProperFraction = 0.0
    """Maximum translation along each axis, as a fraction of the image's side length."""
    color_scale: ProperFraction = 0.0
    """Maximum relative change of contrast. Each channel has its own factor, uniform between
    1 - color_scale and 1 + color_scale."""
    color_offset: ProperFraction = 0.0
    """Maximum change of brightness, for pixels in [0, 1]. Each channel has its own offset, uniform
    between -color_offset and +color_offset."""
    color_jitter: tuple[
        NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, Annotated[float, Field(ge=0, le=0.5)]
    ] = (0.0,) * 4
    """Strengths of the random changes of brightness, contrast, saturation and hue, as in
    torchvision's ColorJitter. The order of the four changes is random for each image. Brightness,
    contrast and saturation are each multiplied by a random factor, uniform between
    max(0, 1 - strength) and 1 + strength. The hue is rotated by at most the given fraction of the
    color circle."""
    color_jitter_prob: Fraction = 1.0
    """Fraction of images to which color_jitter is applied."""
    gray_scale_prob: Fraction = 0.0
    """Fraction of images that are converted to gray scale."""

    @property
    def is_random(self) -> bool:
        """Whether two views of an image can differ."""
        changes = (
            self.rotate_degrees,
            self.zoom,
            self.shift,
            self.color_scale,
            self.color_offset,
            self.color_jitter_prob * any(self.color_jitter),
        )
        return any(changes) or 0 < self.gray_scale_prob < 1


class RemoteSettings(Settings):
    """How remote shards are fetched. A whole shard is fetched before its first sample is read."""

    pipe: bool = False
    """Allow shards of the form `pipe:COMMAND`. Such a shard is the output of a shell command, so
    the author of the recipe can run any command with your permissions."""
    cache: Path = Path("~/.cache/disco_ds")
    """Folder on a local disk of each host, shared by all ranks of that host. Fetched shards are
    kept in the sub-folder `disco_ds-UID`, which only your user can read, until other shards need
    the space. No other files in the folder are touched."""
    cache_gb: PositiveFloat | None = None
    """Size limit of the cache on each host, in units of 1e9 bytes. The cache never uses more than
    90% of the disk space that is free or already used by the cache. Null: 200. If the shards that the host's slots
    (see data.slots) read and prefetch at the same time do not fit into the cache, the run refuses to start."""
    prefetch_shards: int = Field(1, ge=0, le=1000)
    """Number of shards that each slot (see data.slots) fetches from each source before they are needed, as long as
    the cache has room. Shards that a slot shuffles together are fetched together, even if there are more
    of them than this number. 0: a shard is fetched when its first sample is read."""
    tries: int = Field(5, exclude=True)
    """Number of attempts to fetch a shard."""
    timeout_s: float = Field(60.0, exclude=True)
    """An attempt to fetch a shard fails if the server or the `pipe:` command sends no data for this many seconds.
    Config derives this value from the top-level timeout_s."""


def is_remote(text: str) -> bool:
    """Return whether a location is a URL or a `pipe:` command."""
    return text.startswith((*SCHEMES, PIPE))


def check_template(template: str) -> str:
    """Return a template unchanged, unless it is invalid.

    Raises:
        ValueError: If the template is malformed, or if it has no field.
    """
    parts = string.Formatter().parse(template)
    fields = [part[1:] for part in parts if part[1] is not None]
    for name, spec, conversion in fields:
        if spec or conversion or not FIELD.fullmatch(name or ""):
            raise ValueError(
                f"template {template!r} has {{{name}}}; expected {{member}}, {{json[key]}} or {{member|member}}"
            )
    if not fields:
        raise ValueError(
            f"template {template!r} has no field such as {{txt}}; every sample would get the same text"
        )
    return template


def _check_captions(captions: dict[str, float]) -> dict[str, float]:
    weights = captions.values()
    if min(weights, default=-1) < 0 or not 0 < sum(weights) < float("inf"):
        raise ValueError(f"every weight must be at least 0 and their sum above 0, got {captions}")
    for template in captions:
        check_template(template)
    return captions


def _check_group_by(group_by: str) -> str:
    return group_by if group_by in ("caption", "image") else check_template(group_by)


def _check_order(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"expected [low, high] with low <= high, got {list(bounds)}")
    return bounds


def _check_filter(rules: dict[str, Tree]) -> dict[str, Tree]:
    for key, rule in rules.items():
        numbers = [rule[bound] for bound in ("min", "max") if bound in rule]
        if (
            not rule
            or rule.keys() - {"min", "max", "in"}
            or not all(type(number) in (int, float) and number == number for number in numbers)
            or not isinstance(rule.get("in", []), list)
        ):
            raise ValueError(
                f"the rule for {key} must have numbers as `min` or `max`, or a list as `in`, got {rule}"
            )
    return rules


Captions = Annotated[dict[str, float], AfterValidator(_check_captions)]
GroupBy = Annotated[str, AfterValidator(_check_group_by)]
Filter = Annotated[dict[str, Tree], AfterValidator(_check_filter)]
CropScale = Annotated[tuple[PositiveFraction, PositiveFraction], AfterValidator(_check_order)]
SourceName = Annotated[str, Field(pattern=rf"^(shards|synthetic|{CUSTOM_CODE})$")]


class SampleSettings(Settings):
    """The location of the samples of one source, and the rules that select them."""

    source: SourceName = "shards"
    """Kind of source. `shards`: webdataset's .tar shards, or a csv, named by data.shards or
    data.sources. `synthetic`: random pixels and tokens, for trying out a model or a cluster without data.
    `package.module:Class`: a custom source, which must be importable through PYTHONPATH."""
    options: dict[str, Any] = {}
    """Keyword arguments for a custom source."""
    shards: str | None = None
    """Location of the samples: a folder of .tar shards; a list of shards in brace notation, such as
    /data/{00000..00099}.tar, s3://bucket/{0..9}.tar (also gs://, az://, hf:// and https://) or
    pipe:COMMAND {0..9}; a pattern such as /data/*/*.tar; a .txt file with one shard per line; a .csv
    or .tsv file of image paths and captions; or `bundled:emoji/train`, a small data set in this package."""
    manifest: Path | None = None
    """Path of the manifest that `disco-ds index` wrote for the shards. Null: manifest.json in the
    folder of the shards."""
    uids: Path | None = None
    """File with the uids of the samples to use; samples with other uids are dropped. The file has the format of
    DataComp's subsets: .npy with pairs of uint64.
    A sample without a field `uid` in its json member counts as broken. An epoch has as many samples as the file
    has uids."""
    transforms: FunctionName | None = None
    """`package.module:function`, which returns a list of webdataset's per-sample stages, such as
    [wds.select(f), wds.map(g), wds.rename(jpg="image")]. The data workers apply them to one sample
    at a time, so the data order does not change. A sample is a dictionary with `__key__` and, for
    each extension, the bytes of that member. A stage may replace bytes with text, parsed JSON or a
    PIL image. A sample that a stage drops counts in `dropped_samples`."""


class SourceSettings(SampleSettings):
    """Settings of one source in data.sources.

    If image_key, captions, uids, filter or transforms is null, the source uses the value in `data`.
    """

    weight: PositiveFloat | None = None
    """Weight of this source in the mixture. Its share of the training samples is its weight divided
    by the sum of the weights of all sources. Set a weight for every source or for none. Null: the
    number of samples in the source."""
    image_key: str | None = None
    """Names of the tar members that may contain an image of this source. Null: data.image_key."""
    captions: Captions | None = None
    """Caption templates of this source. Null: data.captions."""
    filter: Filter | None = None
    """Rules for the samples of this source. Null: data.filter."""


class DataSettings(SampleSettings):
    """Where samples come from, and how they are read, decoded and augmented."""

    sources: tuple[SourceSettings, ...] | None = None
    """List of several sources that are mixed by weight. It replaces data.shards."""
    index: Literal["manifest", "none"] = "manifest"
    """`manifest`: tar shards must have been counted by `disco-ds index`. `none`: train on tar shards that
    have not been counted. Every slot (see data.slots) reads whole shards in random order and shuffles samples only
    within a shard, so the samples of a shard are used close together. The length of the run cannot be
    set in epochs, and losses that keep state for each sample cannot be used."""
    remote: RemoteSettings = RemoteSettings()
    num_samples: int = Field(1_000_000, gt=0, le=10**11)
    """Number of samples of the synthetic source."""
    image_key: str = "jpg;jpeg;png;webp"
    """Names (extensions) of the tar members that may contain a sample's image, separated by
    semicolons and tried in this order. For a csv: the name of the column of image paths."""
    captions: Captions = Field({"{txt}": 1.0})
    """Caption templates and their weights, such as {"{txt}": 0.5, "{json[keywords]}": 0.5}. A field
    in braces names a tar member, an entry of a JSON member, or a column of a csv.
    {json[captions][0]} is the first item of a list, and {json[captions][*]} is a random item.
    {json[recaption]|txt} falls back to txt if the sample has no recaption. Each time a sample is
    used, one template is drawn at random according to the weights."""
    group_by: GroupBy | None = None
    """Property that determines a sample's group. Samples with equal values of the property form a
    group. `caption`: the caption that is used, which may be drawn at random (see data.captions).
    `image`: the bytes of the image file. A template such as "{json[label]}": the text that it
    produces; a sample without the field counts as broken. loss.options.same_group decides how the
    loss treats samples of the same group. Null: there are no groups."""
    filter: Filter = {}
    """Rules for fields of the json member (or for columns of a csv), such as {similarity: {min:
    0.3}, LANGUAGE: {in: [en]}}. A sample that breaks a rule, or lacks the field, is dropped, and the
    next sample of the slot (see data.slots) takes its place. Dropped samples count in `dropped_samples`, not as broken.
    An epoch includes them, so a run makes more passes over the samples that are kept; `disco-ds doctor` reports the
    number of passes."""
    slots: int | None = Field(None, gt=0, le=2**20)
    """Number of slots. A slot is a logical stream of samples, and all slots together make up the
    data order. The number must be a multiple of the number of ranks, and it stays the same when a
    run is resumed. Choose a number with many divisors if the number of ranks may change. Null: 512,
    or fewer if there are fewer shards or if all slots together would read more than 128e9 bytes of
    remote shards at a time."""
    window: PositiveCount = 4096
    """Number of consecutive samples in a slot (see data.slots) that are shuffled together. Raise it if neighboring
    samples are similar."""
    workers: int | None = Field(None, ge=0, le=1024)
    """Number of worker processes per rank, which read and decode samples. Null: one fewer than the
    number of CPU cores per rank. 0: the training process decodes the samples. Raise the number if
    `time/data_wait_s` is a large part of the time of a step."""
    prefetch: int | None = Field(None, gt=0, le=10_000)
    """Number of micro-batches that each rank prepares ahead. Null: the number of micro-batches in
    one step, but at least 4, and at most as many as fit into an eighth of the rank's share of host
    memory. Lower the number if the host runs out of memory."""
    worker_timeout_s: float = Field(300.0, exclude=True)
    """The run stops if a data worker makes no progress for this many seconds. Config derives this value from
    the top-level timeout_s."""
    max_broken: Fraction = 0.01
    """Fraction of samples that may be broken, for example because the image cannot be decoded. Broken
    samples are skipped. The run stops if a worker finds more broken samples than 16 plus this
    fraction of the samples that it has read. If a shard is damaged, the samples after the damage are lost. The run
    stops if a worker finds more damaged shards than 3 plus this fraction of the shards that it has read."""
    max_pixels: PositiveCount = 89_478_485
    """Images with more pixels than this are skipped as possible decompression bombs."""
    crop_scale: CropScale | None = (0.9, 1.0)
    """Smallest and largest area of the random resized crop, as fractions of the image's area. Null:
    no random crop. Images are then resized as in evaluation."""
    crop_ratio: Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_check_order)] = (
        0.75,
        4 / 3,
    )
    """Smallest and largest aspect ratio (width / height) of the random resized crop."""
    augment: AugmentSettings = AugmentSettings()

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        for number, part in enumerate(self.per_source):
            where = "data" if part is self else f"data.sources.{number}"
            if part.source == "shards" and not part.shards:
                raise ValueError(
                    f"{where}.shards is missing: set it to a folder of .tar shards, or set "
                    f"{where}.source=synthetic"
                )
        if self.sources and (self.shards or self.manifest):
            raise ValueError(
                "data.sources replaces data.shards and data.manifest: remove data.sources or the other two"
            )
        if self.index == "none":
            shards = self.shards or ""
            if self.source != "shards" or self.sources or self.manifest:
                raise ValueError(
                    "data.index=none works with data.shards only: remove data.sources and data.manifest, and set "
                    "data.source=shards"
                )
            if shards.startswith(PIPE) or shards.endswith((".csv", ".tsv")):
                raise ValueError(
                    "data.index=none works with tar shards in a folder or at URLs only"
                )
        if len({source.weight is None for source in self.sources or ()}) > 1:
            raise ValueError("data.sources: set a weight for every source or for none")
        return self

    @property
    def per_source(self) -> list[Self]:
        """The settings of each source. What it sets, such as its captions, replaces that of `data`.

        If data.sources is not set, these settings are those of the only source.
        """
        if self.source != "shards" or not self.sources:
            return [self]
        return [
            self.replace(sources=None, **source.model_dump(exclude={"weight"}, exclude_none=True))
            for source in self.sources
        ]

    @property
    def retry_s(self) -> float:
        """Number of seconds for which a failed read of a shard or csv is retried."""
        return self.worker_timeout_s / 5
