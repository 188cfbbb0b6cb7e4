"""The number of tokens per text, for planning with text towers that skip padding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

from disco_ds.config import Config, DataSettings
from disco_ds.data import InputSpec, Source
from disco_ds.data.errors import BrokenSample, breaks_sample
from disco_ds.data.samples import SampleKey, SyntheticSource, prepare
from disco_ds.data.sources.selection import Selection
from disco_ds.eval.model import read_input_spec
from disco_ds.models.clip import build_tokenizer, read_text_size
from disco_ds.models.fast import find_counter, packs
from disco_ds.models.fast.attention import MAX_ROWS
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.towers import build_fake_model

NUM_CAPTIONS = 1000
"""Number of captions that are read, evenly spaced over at most NUM_SHARDS shards."""
NUM_SHARDS = 10


def read_text_tokens(
    config: Config, assumed: Assumptions, sources: Sequence[Source]
) -> Assumptions:
    """Fill in the mean number of tokens of a text from the recipe's shards, if they are on this machine.

    Args:
        config: The recipe.
        assumed: The assumptions to complete. They are returned unchanged if they already have the number or if the
            shards cannot be read. If a GPU would compute the padding of the texts, the number is removed.
        sources: The sources of the recipe; empty if they cannot be loaded.
    """
    if assumed.text_tokens is not None:
        packed = is_packed(config, build_fake_model(config))
        return assumed if packed else replace(assumed, text_tokens=None)
    if not sources or config.data.source == "synthetic":
        return assumed
    if any("://" in str(part.shards) for part in config.data.parts):
        return assumed
    lengths: list[int] = []
    with suppress(ValueError, OSError):
        model = build_fake_model(config)
        count = find_counter(model)
        if count is None or not is_packed(config, model):
            return assumed
        spec = read_input_spec(model, build_tokenizer(config.model, model))
        for settings, source in zip(config.data.per_source, sources, strict=True):
            if not isinstance(source, SyntheticSource):
                num = NUM_CAPTIONS // len(sources)
                lengths += _read(source, settings, spec, count, num)
    if not lengths:
        return assumed
    return replace(
        assumed,
        text_tokens=fmean(lengths),
        text_deviation=pstdev(lengths),
        num_captions=len(lengths),
    )


def is_packed(config: Config, model: Any) -> bool:
    """Return whether the text tower skips the padding of every text on a GPU.

    Trimming a micro-batch to its longest text does not count, because among many texts one is usually long.
    """
    is_short = read_text_size(model)[0] <= MAX_ROWS
    is_exact = config.precision == "fp32"
    packed = packs(getattr(model, "text", model)) and not model.two_views
    return packed and is_short and not is_exact


def _read(
    source: Source, settings: DataSettings, spec: InputSpec, count: Any, num: int
) -> list[int]:
    """Read up to `num` captions of a source, and return the number of tokens of each."""
    lengths = []
    last = len(source.sizes) - 1
    shards = sorted({i * last // (NUM_SHARDS - 1) for i in range(NUM_SHARDS)})
    share = -(-num // len(shards))
    selection = Selection.load(settings)
    with closing(source.open(1, settings.window)) as reader:
        for shard in shards:
            size = source.sizes[shard]
            for entry in sorted({i * size // share for i in range(share)} if size else ()):
                with suppress(BrokenSample), breaks_sample(OSError):
                    members = selection.read(reader, shard, entry)
                    sample = prepare(members, SampleKey(0, 0, entry), settings, spec)
                    lengths.append(int(count(sample["text"][None])[0]))
    return lengths
