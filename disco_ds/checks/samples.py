"""Check every row of a csv file, and a few hundred decoded samples of each source in the form that the model gets."""

import math
import random
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disco_ds.checks.report import Line, Status
from disco_ds.config import Config, DataSettings, make_schedule
from disco_ds.data import BrokenSample, InputSpec, Source, Table, augment, count_epoch, load_sources
from disco_ds.data.captions import pick_caption
from disco_ds.data.errors import DroppedSample, LostSample, breaks_sample, name_broken
from disco_ds.data.samples import Sample, SampleKey, prepare
from disco_ds.data.sources.selection import Selection
from disco_ds.data.stored import find_stored
from disco_ds.eval.model import read_input_spec
from disco_ds.models.clip import build_model, build_tokenizer

_NUM_READ = 400
"""About the number of samples of each source that are decoded. If 1% of all samples are broken, they include one with
98% probability."""
_NUM_SHARDS, _NUM_REMOTE = 16, 3
"""Maximum number of shards that are opened: of local ones, and of those that have to be fetched."""
_NUM_ROWS = 1_000_000
"""Maximum number of rows of a csv file that are checked."""
NUM_SHOWN = 24
"""Number of samples that are shown in the picture."""
_MIN_SAMPLES = 8
"""The doctor does not warn about captions and colors if it has read fewer samples than this."""
_MANY_FULL = 0.2
"""The doctor warns if at least this fraction of the captions has the maximum number of tokens.

Most of these captions were probably cut.
"""
_MANY_PLAIN = 0.05
"""The doctor warns if at least this fraction of the images has only one color."""


@dataclass
class Findings:
    """Counts and faults that the checks found in the samples of one source."""

    num_read: int
    """Number of samples that were read and decoded."""
    broken: list[str]
    """Names of the broken samples, with the reasons."""
    num_dropped: int
    """Number of samples that the settings exclude."""
    damaged: dict[int, str]
    """Damaged shard -> its name and what is lost."""
    samples: list[Sample]
    """The samples that are neither broken nor dropped, with `caption` (empty if the source generates tokens instead of
    text) and `num_tokens` (without padding)."""


def check_samples(config: Config, picture: Path | None = None) -> Iterator[Line]:
    """Check samples of each source, and describe them.

    Args:
        config: The recipe.
        picture: Path of a PNG to write, with some of the samples after augmentation. None: draw nothing.

    Raises:
        ValueError: If the data cannot be opened, or the model or its tokenizer cannot be built.
    """
    # Load the model's weights if they are local files, to see whether they fit.
    paths = [x for x in (config.model.pretrained, config.model.pretrained_image) if x]
    pretrained = bool(paths) and all(path.exists() for path in paths)
    model = build_model(config.model, pretrained=pretrained)
    spec = read_input_spec(model, build_tokenizer(config.model, model))
    sources = load_sources(config.data)
    if config.teacher:
        stages = [stage.data for stage in config.stage_configs]
        spec = replace(spec, stored=find_stored(stages, config.teacher, sources))
    samples: list[Sample] = []
    first_id, num_kept = 0, 0.0
    for part, source in zip(config.data.per_source, sources, strict=True):
        if isinstance(source, Table):
            yield check_rows(source, part)
        findings = read_samples(source, part, spec, SampleKey(config.seed, 0, first_id))
        yield describe(part, findings)
        samples += findings.samples
        first_id += source.num_samples
        num_kept += source.num_samples * (1 - findings.num_dropped / max(findings.num_read, 1))
    if num_kept and any(part.filter for part in config.data.per_source):
        length = make_schedule(config.with_samples(count_epoch(config.data, sources))).num_samples
        found = f"keeps about {num_kept / first_id:.1%} of the samples: the run makes {length / num_kept:,.1f} passes"
        yield Line("ok", "data.filter", f"{found} over them")
    if picture:
        pairs = []
        for sample in samples[:: math.ceil(len(samples) / NUM_SHOWN) or 1]:  # evenly spaced
            key = torch.tensor([sample["view_key"]])
            image = augment(sample["image"][None], key, config.data.augment)[0]
            tokens = f"{sample['num_tokens']} of {len(sample['text'])} tokens"
            pairs.append((image, sample["caption"], tokens))
        draw_pairs(pairs, picture)
        yield Line("ok", "picture", f"{len(pairs)} samples: {picture}")


def check_rows(table: Table, data: DataSettings) -> Line:
    """Check the rows of a csv file: whether the image exists and is not empty, and whether there is a caption."""
    selection = Selection(data.replace(transforms=None))
    rows = range(0, table.num_samples, math.ceil(table.num_samples / _NUM_ROWS))
    broken = []
    with closing(table.open()) as reader:
        for row in rows:
            try:
                with breaks_sample(OSError):
                    values = reader.read_row(row)
                    members = {name: value.encode() for name, value in values.items()}
                    selection.apply(members, str)
                    path = table.find(values[table.image])
                    if not (path.is_file() and path.stat().st_size):
                        raise BrokenSample(f"{path} is missing or empty")
                    pick_caption(data.captions, members, 0.0)
            except DroppedSample:
                pass
            except BrokenSample as error:
                broken.append(f"{table.path.name}/line {table.lines[row]}: {error}")
    found = f"{len(rows):,} checked, {len(broken)} broken"
    if not broken:
        return Line("ok", "rows", found)
    status: Status = "fail" if len(broken) > data.max_broken * len(rows) else "warn"
    return Line(status, "rows", f"{found}; the last: {broken[-1]}", "correct the csv file")


def read_samples(source: Source, data: DataSettings, spec: InputSpec, first: SampleKey) -> Findings:
    """Read and decode samples of a source that are spread over it at random.

    Args:
        source: The source.
        data: The data settings as they apply to this source.
        spec: The form in which the model gets the samples.
        first: Key of the source's first sample.

    Raises:
        DataError: If a field of data.filter occurs in none of the samples.
    """
    captions: list[str] = []

    def tokenize(texts: list[str]) -> Tensor:
        captions[:] = texts
        return spec.tokenize(texts)

    selection = Selection(data)
    noting = replace(spec, tokenize=tokenize)
    padding = spec.tokenize([""])[0, -1]
    first_ids = list(accumulate(source.sizes, initial=first.sample_id))
    num = len(source.sizes)
    if not isinstance(source, Table):  # the shards of a csv file need not be opened
        num = min(_NUM_REMOTE if source.open_fetcher() else _NUM_SHARDS, num)
    shards = [i * len(source.sizes) // num for i in range(num)]  # evenly spaced
    generator = random.Random(1)
    positions: list[tuple[int, int]] = []
    opened: Any = source.open(1, data.window)
    with closing(opened) as reader:
        count = reader.count if data.index == "none" else source.sizes.__getitem__
        for shard in shards:
            size = count(shard)
            entries = generator.sample(range(size), min(size, math.ceil(_NUM_READ / num)))
            positions += [(shard, entry) for entry in sorted(entries)]
        findings = Findings(len(positions), [], 0, {}, [])
        for shard, entry in positions:
            key = first._replace(sample_id=first_ids[shard] + entry)
            try:
                sample = prepare(selection.read(reader, shard, entry), key, data, noting)
            except LostSample as error:
                findings.damaged[shard] = name_broken(reader.name, shard, entry, error)
            except DroppedSample:
                findings.num_dropped += 1
            except BrokenSample as error:
                findings.broken.append(name_broken(reader.name, shard, entry, error))
            else:
                num_tokens = int((sample["text"] != padding).sum())
                noted = {"caption": "".join(captions), "num_tokens": num_tokens}
                findings.samples.append(sample | noted)
    selection.check_fields()
    return findings


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
        # JSON may contain halves of surrogate pairs, which cannot be drawn.
        text = caption.encode(errors="replace").decode()
        words = textwrap.wrap(text, 26, max_lines=3, placeholder=" ...")
        axis.set_title("\n".join([*words, note]), fontsize=8, parse_math=False)
    figure.savefig(path, dpi=80)


def describe(data: DataSettings, findings: Findings) -> Line:
    """Summarize what was found in one source.

    Args:
        data: The data settings as they apply to this source.
        findings: What was found.
    """
    num, broken = findings.num_read, findings.broken
    if not num:
        remedy = "are they tar files?"
        return Line("fail", "samples", "the shards contain no complete sample", remedy)
    found = f"{num} read, {len(broken)} broken"
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
        found += f"; the last: {broken[-1]}"
        # Only a few samples are read, so one or two more than data.max_broken allows may be broken by chance. If more
        # than half are broken, the check always fails.
        many = len(broken) > 2 + data.max_broken * num or 2 * len(broken) > num
        status = "fail" if many else "warn"
    doubts = []
    samples = findings.samples
    n = len(samples)
    if captions := Counter(sample["caption"] for sample in samples if sample["caption"]):
        counts = [sample["num_tokens"] for sample in samples]
        full = sum(sample["num_tokens"] == len(sample["text"]) for sample in samples) / n
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
    images = [sample["image"] for sample in samples]
    plain = sum(bool((x == x[:, :1, :1]).all()) for x in images) / max(n, 1)
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
