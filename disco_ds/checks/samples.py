"""Check samples in the form that the model gets: every row of a csv file, and a few hundred decoded images."""

from __future__ import annotations

import os
import textwrap
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from disco_ds.checks.report import Line, Status
from disco_ds.config import Config, DataSettings
from disco_ds.config.data import is_remote
from disco_ds.data import (
    BrokenSample,
    Source,
    augment,
    load_sources,
)
from disco_ds.data.captions import pick_caption
from disco_ds.data.errors import DroppedSample, LostSample, breaks_sample, name_broken
from disco_ds.data.samples import SampleKey, find_prepare
from disco_ds.data.sources.files import Table
from disco_ds.data.sources.selection import Selection
from disco_ds.data.stored import StoredEmbeddings, find_stored
from disco_ds.distributed import comm
from disco_ds.eval.model import read_input_spec
from disco_ds.metrics.anomalies import EQUAL_TEXTS, MAX_EQUAL_TEXTS, share_of_equal_texts
from disco_ds.models.clip import build_model, build_tokenizer

_NUM_READ = 400
"""Number of samples of each source that are decoded. If 1% of all samples are broken, they include one with 98%
probability."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_NUM_SHARDS, _NUM_REMOTE = 16, 3
"""Maximum number of shards that are opened: of local ones, and of those that have to be fetched."""
_NUM_ROWS = 1_000_000
"""Maximum number of rows of a csv file that are checked."""
_NUM_FILTERED = 10_000
"""Number of samples of each source to which data.filter is applied."""
NUM_SHOWN = 24
"""Number of samples that are shown in the picture, and whose captions are encoded."""
_MIN_SAMPLES = 8
"""The doctor does not warn about captions and colors if it has read fewer samples than this."""
_MANY_FULL = 0.2
"""The doctor warns if at least this fraction of the captions has the maximum number of tokens.

Most of these captions were probably cut.
"""
_MANY_PLAIN = 0.05
"""The doctor warns if at least this fraction of the images has only one color."""


class Sample(NamedTuple):
    """A sample as the model gets it."""

    image: Tensor
    """[3, H, W] uint8, before data.augment."""
    text: Tensor
    """[context length] int64, tokens."""
    view_key: int
    """Key of the random numbers of the augmentation."""
    caption: str
    """The caption as text. It is empty if the source generates tokens instead of text."""
    num_tokens: int
    """Number of tokens without padding."""
    id: int


@dataclass
class Findings:
    """Counts and faults that the checks found in the samples of one source."""

    num_rows: int = 0
    """Number of rows of a csv file that were checked. 0 for other sources."""
    broken_rows: dict[tuple[int, int], str] = field(default_factory=dict)
    """(shard, entry) of each row that is broken -> its name and the reason."""
    num_read: int = 0
    """Number of samples that were read and decoded."""
    broken: dict[tuple[int, int], str] = field(default_factory=dict)
    """(shard, entry) of each of these samples that is broken -> its name and the reason."""
    num_dropped: int = 0
    """Number of these samples that the settings exclude."""
    damaged: dict[int, str] = field(default_factory=dict)
    """Damaged shard -> its name and what is lost."""
    captions: Counter[str] = field(default_factory=Counter)
    """How often each caption occurs: in all rows of a csv file, otherwise in the samples that were read."""
    samples: list[Sample] = field(default_factory=list)
    """The samples that are neither broken nor dropped."""


def check_samples(config: Config, picture: Path | None = None) -> Iterator[Line]:
    """Check samples of each source, describe them, and check that the model can tell their captions apart.

    Args:
        config: The recipe.
        picture: Path of a PNG to write, with some of the samples. None: draw nothing.

    Raises:
        ValueError: If the data cannot be opened, or the model or its tokenizer cannot be built.
    """
    inputs = Inputs.build(config)
    parts = config.data.per_source
    sources = load_sources(config.data)
    if config.teacher:
        stages = [stage.data for stage in config.stage_configs]
        inputs = replace(inputs, stored=find_stored(stages, config.teacher, sources))
    samples: list[Sample] = []
    first_id = 0
    for part, source in zip(parts, sources, strict=True):
        findings = Findings()
        if isinstance(source, Table):
            check_rows(source, part, findings)
        inputs.read(source, part, first_id, findings)
        yield describe(part, findings)
        samples += findings.samples
        first_id += source.num_samples
    num = min(NUM_SHOWN, len(samples))
    shown = [samples[i * len(samples) // num] for i in range(num)]  # evenly spaced
    yield from inputs.check_texts(shown)
    if picture:
        inputs.draw(shown, picture)
        yield Line("ok", "picture", f"{num} samples: {picture}")


def check_filter(config: Config, sources: Sequence[Source], num_samples: int) -> Iterator[Line]:
    """Apply data.filter to the first samples of each source, and estimate how often the run uses each kept sample.

    Args:
        config: The recipe.
        sources: The sources that load_sources returned.
        num_samples: Length of the run in samples.

    Raises:
        DataError: If a field of the filter occurs in none of the first samples.
    """
    settings = config.data.per_source
    if not any(each.filter for each in settings):
        return
    kept = [find_kept(source, each) for source, each in zip(sources, settings, strict=True)]
    num_kept = sum(share * source.num_samples for share, source in zip(kept, sources, strict=True))
    found = f"keeps {', '.join(map('{:.1%}'.format, kept))} of the first {_NUM_FILTERED:,} samples"
    if num_kept:  # otherwise, the samples are not counted, or none is kept
        found += f": the run makes about {num_samples / num_kept:,.1f} passes over the samples that it keeps"
    yield Line("ok" if any(kept) else "fail", "data.filter", found, "no sample passes the filter")


def find_kept(source: Source, settings: DataSettings) -> float:
    """Return the fraction of the first _NUM_FILTERED samples of a source that pass data.uids and data.filter."""
    if not (settings.filter or settings.uids):
        return 1.0
    selection = Selection.load(settings.model_copy(update={"transforms": None}))
    reader: Any = source.open(1, settings.window)
    sizes: Iterable[tuple[int, int]] = enumerate(source.sizes)
    if settings.index == "none":
        sizes = ((shard, reader.count(shard)) for shard, _ in sizes)
    entries = ((shard, entry) for shard, size in sizes for entry in range(size))
    num_seen = num_kept = 0
    for shard, entry in islice(entries, _NUM_FILTERED):
        num_seen += 1
        with suppress(BrokenSample), breaks_sample(OSError):
            selection.apply(reader.read(shard, entry), str)
            num_kept += 1
    reader.close()
    selection.check_fields()
    return num_kept / max(num_seen, 1)


def check_rows(table: Table, settings: DataSettings, findings: Findings) -> None:
    """Check all rows of a csv file: whether the image exists and is not empty, and whether there is a caption."""
    selection = Selection.load(settings.model_copy(update={"transforms": None}))
    entries = [(shard, entry) for shard, size in enumerate(table.sizes) for entry in range(size)]
    with closing(table.open(1, 1)) as reader:
        for row in range(0, len(entries), -(-len(entries) // _NUM_ROWS)):
            findings.num_rows += 1
            try:
                with breaks_sample(OSError):
                    values = reader.read_row(row)
                    members = {name: value.encode() for name, value in values.items()}
                    selection.apply(members, str)
                    path = table.find(values[table.image])
                    if not os.path.getsize(path):
                        raise BrokenSample(f"{path} is empty")
                    findings.captions[pick_caption(settings.captions, members, 0.0)] += 1
            except DroppedSample:
                pass
            except (BrokenSample, OSError) as error:
                reason = error if isinstance(error, BrokenSample) else BrokenSample(str(error))
                findings.broken_rows[entries[row]] = name_broken(reader.name, *entries[row], reason)


def choose_samples(sizes: Sequence[int], shards: Sequence[int]) -> list[tuple[int, int]]:
    """Choose up to _NUM_READ samples that are spread over some shards.

    Args:
        sizes: Number of samples of each of these shards.
        shards: The numbers of the shards.

    Returns:
        (shard, entry) of each chosen sample.
    """
    ends = list(accumulate(sizes, initial=0))
    num = min(_NUM_READ, ends[-1])
    chosen = []
    for i in range(num):
        # One sample of each of `num` equal parts, but not always the same one: faults may be periodic.
        start, stop = i * ends[-1] // num, (i + 1) * ends[-1] // num
        position = start + int(i * _GOLDEN_RATIO % 1 * (stop - start))
        k = bisect_right(ends, position) - 1
        chosen.append((shards[k], position - ends[k]))
    return chosen


@dataclass(frozen=True)
class Inputs:
    """The recipe's model and tokenizer.

    The methods read and check samples in the form that this model gets, and show them in a picture.
    """

    config: Config
    model: Any
    tokenizer: Any
    stored: StoredEmbeddings | None = None
    """Tar members with the stored embeddings of a sample; None if the recipe does not use stored embeddings."""

    @classmethod
    def build(cls, config: Config) -> Inputs:
        """Build the model, with its weights if they are local files.

        Raises:
            ValueError: If the model settings are invalid, or the weights or the tokenizer cannot be loaded.
        """
        paths = [x for x in (config.model.pretrained, config.model.pretrained_image) if x]
        pretrained = bool(paths) and all(path.exists() for path in paths)
        model = build_model(config.model, pretrained=pretrained)
        return cls(config, model, build_tokenizer(config.model, model))

    def read(self, source: Source, data: DataSettings, first_id: int, findings: Findings) -> None:
        """Read and decode samples of a source.

        Args:
            source: The source.
            data: The data settings as they apply to this source.
            first_id: Id of the source's first sample.
            findings: This function adds what it finds.
        """
        captions: list[str] = []

        def tokenize(texts: list[str]) -> Tensor:
            captions[:] = texts
            return self.tokenizer(texts)

        spec = replace(read_input_spec(self.model, tokenize), stored=self.stored)
        prepare, selection = find_prepare(source), Selection.load(data)
        padding = self.tokenizer([""])[0, -1]
        first_ids = list(accumulate(source.sizes, initial=first_id))
        # Opening a shard takes time, unlike the rows of a csv file.
        most = _NUM_REMOTE if is_remote(str(data.shards)) else _NUM_SHARDS
        num = len(source.sizes) if isinstance(source, Table) else min(most, len(source.sizes))
        shards = [i * (len(source.sizes) - 1) // max(num - 1, 1) for i in range(num)]
        opened: Any = source.open(1, data.window)
        with closing(opened) as reader:
            count = reader.count if data.index == "none" else source.sizes.__getitem__
            for shard, entry in choose_samples([count(shard) for shard in shards], shards):
                findings.num_read += 1
                index = first_ids[shard] + entry
                try:
                    with breaks_sample(OSError):
                        members = selection.read(reader, shard, entry)
                        sample = prepare(members, SampleKey(self.config.seed, 0, index), data, spec)
                except DroppedSample:
                    findings.num_dropped += 1
                except LostSample as error:
                    findings.damaged[shard] = name_broken(reader.name, shard, entry, error)
                except BrokenSample as error:
                    name = name_broken(reader.name, shard, entry, error)
                    findings.broken[shard, entry] = name
                else:
                    caption = captions[0] if captions else ""
                    text = sample["text"]
                    num_tokens = int((text != padding).sum())
                    arrays = sample["image"], text, sample["view_key"]
                    findings.samples.append(Sample(*arrays, caption, num_tokens, index))
        if not findings.num_rows:
            findings.captions.update(each.caption for each in findings.samples if each.caption)

    @torch.no_grad()
    def check_texts(self, samples: list[Sample]) -> Iterator[Line]:
        """Check that captions with different tokens have different, finite features."""
        if len(samples) < 2 or self.config.model.two_views:
            return
        tokens = torch.stack([sample.text for sample in samples]).to(comm.local_device())
        features = self.model.to(comm.local_device()).eval()(text=tokens)[1]
        equal = share_of_equal_texts(tokens, features).item()
        if not features.isfinite().all():
            yield Line("fail", "features", "the features of the text tower are not finite")
        elif equal > MAX_EQUAL_TEXTS:
            yield Line("fail", "features", f"{equal:.0%} {EQUAL_TEXTS}")

    def augment(self, sample: Sample) -> Tensor:
        """Return a sample's image as training's first epoch augments it, [3, H, W]."""
        key = torch.tensor([sample.view_key])
        return augment(sample.image[None], key, self.config.data.augment)[0]

    def draw(self, samples: list[Sample], path: Path) -> None:
        """Write a picture of samples after augmentation, each with its caption and number of tokens."""
        pairs = []
        for sample in samples:
            tokens = f"{sample.num_tokens} of {len(sample.text)} tokens"
            pairs.append((self.augment(sample), sample.caption, tokens))
        draw_pairs(pairs, path)


def draw_pairs(pairs: Iterable[tuple[Tensor, str, str]], path: Path) -> None:
    """Write a picture of up to 24 pairs.

    Args:
        pairs: An image [3, H, W], its caption and a note for each pair.
        path: Path of the PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9.5), layout="constrained")
    for number, (image, caption, note) in enumerate(pairs):
        axis = figure.add_subplot(4, 6, number + 1)
        axis.set_axis_off()
        axis.imshow(image.permute(1, 2, 0))
        words = textwrap.wrap(caption, 26, max_lines=3, placeholder=" ...")
        axis.set_title("\n".join([*words, note]), fontsize=8, parse_math=False)
    figure.savefig(path, dpi=80)


def describe(data: DataSettings, findings: Findings) -> Line:
    """Summarize what was found in one source.

    Args:
        data: The data settings as they apply to this source.
        findings: What was found.
    """
    num, num_rows = findings.num_read, findings.num_rows
    if not num:
        remedy = "are they tar files?"
        return Line("fail", "samples", "the shards contain no complete sample", remedy)
    broken = findings.broken_rows | findings.broken
    found = f"{num_rows:,} rows checked and " if num_rows else ""
    found += f"{num} read, {len(broken)} broken"
    if findings.num_dropped:
        found += f", {findings.num_dropped} dropped by data.filter, data.uids or data.transforms"
    if findings.num_dropped == num:
        remedy = "check data.filter, data.uids and data.transforms"
        return Line("warn", "samples", found, remedy)
    status: Status = "ok"
    remedy = (
        "see data.image_key and data.captions; a run stops once the fraction of broken samples exceeds "
        f"data.max_broken={data.max_broken:g}"
    )
    if broken:
        found += f"; the last: {broken[max(broken)]}"
        # Only a few samples are read, so one or two more than data.max_broken allows may be broken by chance. If more
        # than half are broken, the check always fails. The rows of a csv file are all checked.
        num_broken = len(findings.broken)
        many = num_broken > 2 + data.max_broken * num or 2 * num_broken > num
        many |= len(findings.broken_rows) > data.max_broken * num_rows
        status = "fail" if many else "warn"
    doubts = []
    samples, captions = findings.samples, findings.captions
    n = len(samples)
    if captions and n:
        counts = [sample.num_tokens for sample in samples]
        full = sum(sample.num_tokens == len(sample.text) for sample in samples) / n
        (text, most), *_ = captions.most_common(1)
        share = most / captions.total()
        found += (
            f"; captions {min(counts)} to {max(counts)} tokens (mean {sum(counts) / n:.1f}), {full:.0%} fill the "
            f"context, {len(captions):,} of {captions.total():,} are different"
        )
        if share >= 0.5:
            found += f"; {share:.0%} of them are {textwrap.shorten(text, 60)!r}"
        if share >= 0.5 or full >= _MANY_FULL:
            doubts.append("data.captions and text_cfg.context_length")
    plain = sum(bool((x.image == x.image[:, :1, :1]).all()) for x in samples) / max(n, 1)
    if plain >= _MANY_PLAIN:
        found += f"; {plain:.0%} of the images have only one color"
        doubts.append("data.image_key")
    if status == "ok" and n >= _MIN_SAMPLES and doubts:
        status = "warn"
        remedy = f"look at them with --picture FILE; see {' and '.join(doubts)}"
    if findings.damaged:
        status = "fail" if status == "fail" else "warn"
        found = "; ".join([found, *findings.damaged.values()])
        remedy = "`disco-ds index SHARDS --check --full` lists all damaged shards"
    return Line(status, "samples", found, remedy)
