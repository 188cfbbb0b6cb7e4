"""Check a few samples in the form that the model gets: whether they can be read, and what they look like."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from disco_ds.config import Config, DataSettings
from disco_ds.data import (
    BrokenSample,
    Source,
    augment,
    load_sources,
)
from disco_ds.data.errors import DroppedSample, LostSample, breaks_sample, name_broken
from disco_ds.data.samples import SampleKey, find_prepare
from disco_ds.data.sources.selection import Selection
from disco_ds.data.stored import StoredEmbeddings, find_stored
from disco_ds.distributed import comm
from disco_ds.doctor import Line, Status
from disco_ds.eval.model import read_input_spec
from disco_ds.metrics.anomalies import EQUAL_TEXTS, MAX_EQUAL_TEXTS, share_of_equal_texts
from disco_ds.models.clip import build_model, build_tokenizer

_NUM_READ = 32
"""Number of samples read from each of three shards: the first, the middle and the last."""
_NUM_FILTERED = 10_000
"""Number of samples of each source to which data.filter is applied."""
_NUM_SHOWN = 24
"""Number of samples that are shown in the picture, and whose captions are encoded."""
_MIN_SAMPLES = 8
"""The doctor does not warn about captions if it has read fewer samples than this."""
_MANY_FULL = 0.2
"""The doctor warns if at least this fraction of the captions has the maximum number of tokens.

Most of these captions were probably cut.
"""


class Sample(NamedTuple):
    """A sample as the model gets it."""

    image: Tensor
    """[3, H, W] uint8, before data.augment."""
    text: Tensor
    """[context length] int64, tokens."""
    caption: str
    """The caption as text. It is empty if the source generates tokens instead of text."""
    num_tokens: int
    """Number of tokens without padding."""
    id: int
    view_key: int
    """Key of the random numbers of the augmentation."""


def check_samples(config: Config, picture: Path | None = None) -> Iterator[Line]:
    """Read a few samples of each source, describe them, and check that the model can tell their captions apart.

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
        line, read = inputs.read(source, part, first_id)
        yield line
        samples += read
        first_id += source.num_samples
    num = min(_NUM_SHOWN, len(samples))
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
    found = (
        f"keeps {', '.join(map('{:.1%}'.format, kept))} of the first {_NUM_FILTERED:,} samples: the run makes about "
        f"{num_samples / max(num_kept, 1):,.1f} passes over the samples that it keeps"
    )
    yield Line("ok" if num_kept else "fail", "data.filter", found, "no sample passes the filter")


def find_kept(source: Source, settings: DataSettings) -> float:
    """Return the fraction of the first _NUM_FILTERED samples of a source that pass data.uids and data.filter."""
    if not (settings.filter or settings.uids):
        return 1.0
    selection = Selection.load(settings.model_copy(update={"transforms": None}))
    reader = source.open(1, settings.window)
    entries = ((shard, entry) for shard, size in enumerate(source.sizes) for entry in range(size))
    places = list(islice(entries, _NUM_FILTERED))
    num_kept = 0
    for shard, entry in places:
        with suppress(BrokenSample), breaks_sample(OSError):
            selection.apply(reader.read(shard, entry), str)
            num_kept += 1
    reader.close()
    selection.check_fields()
    return num_kept / max(len(places), 1)


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

    def read(self, source: Source, data: DataSettings, first_id: int) -> tuple[Line, list[Sample]]:
        """Read a few samples of a source, from its first, middle and last shard.

        Args:
            source: The source.
            data: The data settings as they apply to this source.
            first_id: Id of the source's first sample.

        Returns:
            The result of the check, and the samples that could be read.
        """
        captions: list[str] = []

        def tokenize(texts: list[str]) -> Tensor:
            captions[:] = texts
            return self.tokenizer(texts)

        spec = replace(read_input_spec(self.model, tokenize), stored=self.stored)
        prepare, selection = find_prepare(source), Selection.load(data)
        opened: Any = source.open(1, data.window)
        with closing(opened) as reader:
            last = len(source.sizes) - 1
            padding = self.tokenizer([""])[0, -1]
            broken, dropped, samples = [], 0, []
            chosen: set[tuple[int, int]] = set()
            damaged: dict[int, str] = {}
            for shard in (0, last // 2, last):
                size = reader.count(shard) if data.index == "none" else source.sizes[shard]
                # The samples are spread evenly over the shard.
                chosen.update((shard, i * size // _NUM_READ) for i in range(_NUM_READ) if size)
            for shard, entry in sorted(chosen):
                index = first_id + sum(source.sizes[:shard]) + entry
                try:
                    with breaks_sample(OSError):
                        members = selection.read(reader, shard, entry)
                        sample = prepare(members, SampleKey(self.config.seed, 0, index), data, spec)
                except DroppedSample:
                    dropped += 1
                except LostSample as error:
                    damaged[shard] = name_broken(reader.name, shard, entry, error)
                except BrokenSample as error:
                    broken.append(name_broken(reader.name, shard, entry, error))
                else:
                    caption = captions[0] if captions else ""
                    text = sample["text"]
                    num_tokens = int((text != padding).sum())
                    view_key = sample["view_key"]
                    samples.append(
                        Sample(sample["image"], text, caption, num_tokens, index, view_key)
                    )
        line = _describe(data, len(chosen), broken, dropped, samples)
        if damaged:
            found = "; ".join([line.found, *damaged.values()])
            remedy = "`disco-ds index SHARDS --check --full` lists all damaged shards"
            line = Line("fail" if line.status == "fail" else "warn", line.check, found, remedy)
        return line, samples

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

    def draw(self, samples: list[Sample], path: Path) -> None:
        """Write a picture of samples after augmentation, each with its caption and number of tokens."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 9.5), layout="constrained")
        for number, sample in enumerate(samples):
            view_key = torch.tensor([sample.view_key])
            image = augment(sample.image[None], view_key, self.config.data.augment)[0]
            axis = figure.add_subplot(4, 6, number + 1)
            axis.set_axis_off()
            axis.imshow(image.permute(1, 2, 0))
            words = textwrap.wrap(sample.caption, 26, max_lines=3, placeholder=" ...")
            words.append(f"{sample.num_tokens} of {len(sample.text)} tokens")
            axis.set_title("\n".join(words), fontsize=8, parse_math=False)
        figure.savefig(path, dpi=80)


def _describe(
    data: DataSettings, num: int, broken: list[str], dropped: int, samples: list[Sample]
) -> Line:
    """Summarize what was read from one source.

    Args:
        data: The data settings as they apply to this source.
        num: Number of samples that were tried.
        broken: Name of each broken sample, with the reason.
        dropped: Number of samples that the settings exclude.
        samples: Samples that are neither broken nor dropped.
    """
    found = f"{num} read, {len(broken)} broken"
    if dropped:
        found += f", {dropped} dropped by data.filter, data.uids or data.transforms"
    status: Status = "ok"
    if not num:
        return Line(
            "fail", "samples", "the shards contain no complete sample", "are they tar files?"
        )
    if dropped == num:
        return Line("warn", "samples", found, "check data.filter, data.uids and data.transforms")
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
    captions = Counter(sample.caption for sample in samples if sample.caption)
    if captions:
        n = len(samples)
        counts = [sample.num_tokens for sample in samples]
        full = sum(sample.num_tokens == len(sample.text) for sample in samples) / n
        (text, most), *_ = captions.most_common(1)
        found += (
            f"; captions {min(counts)} to {max(counts)} tokens (mean {sum(counts) / n:.1f}), {full:.0%} fill the "
            f"context, {len(captions) / n:.0%} of them different"
        )
        if most >= n / 2:
            found += f"; {most / n:.0%} of them are {textwrap.shorten(text, 60)!r}"
        if status == "ok" and n >= _MIN_SAMPLES and (most >= n / 2 or full >= _MANY_FULL):
            remedy = (
                "look at them with --picture FILE; see data.captions and text_cfg.context_length"
            )
            status = "warn"
    return Line(status, "samples", found, remedy)
