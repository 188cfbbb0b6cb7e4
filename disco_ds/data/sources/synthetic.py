"""Random pixels and tokens, a function of the sample's id: to try a model or a cluster without data."""

from __future__ import annotations

import torch
from torch import Tensor

from disco_ds.config.data import DataSettings
from disco_ds.data.order.counter_rng import keyed_bits
from disco_ds.data.order.slots import divide
from disco_ds.data.sources.base import Decode, SampleForm, Source

_CELLS = 8
"""An image is a grid of this many cells per side, each of one color."""


class SyntheticSource(Source):
    def __init__(self, num_samples: int) -> None:
        self.sizes = divide(num_samples)
        self.fingerprint = f"synthetic-{num_samples}"

    def open_samples(
        self, settings: DataSettings, form: SampleForm, seed: int, num_slots: int
    ) -> SyntheticSamples:
        return SyntheticSamples(form, seed)


class SyntheticSamples:
    """Samples that are generated in the model's form: there are no bytes to decode."""

    def __init__(self, form: SampleForm, seed: int) -> None:
        self._form = form
        self._seed = seed

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor]:
        height, width = self._form.image.size
        num_cells, num_tokens = 3 * _CELLS * _CELLS, self._form.context_length
        # The epoch is not part of the key: a sample has one image and one caption.
        bits = keyed_bits(
            self._seed, torch.tensor([0]), torch.tensor([index]), num_cells + num_tokens
        )[0]
        cells = (bits[:num_cells] & 255).to(torch.uint8).view(3, _CELLS, _CELLS)
        rows, columns = (
            torch.arange(height) * _CELLS // height,
            torch.arange(width) * _CELLS // width,
        )
        text = (bits[num_cells:] & 0xFFFF_FFFF) % (self._form.vocab_size - 2)
        # Start and end tokens as open_clip's tokenizer sets them: its text towers pool at the largest token.
        text[0], text[-1] = self._form.vocab_size - 2, self._form.vocab_size - 1
        # Columns first: whole rows are then copied at once.
        return lambda: cells.index_select(2, columns).index_select(1, rows), text

    def name(self, shard: int, entry: int) -> str:
        return f"synthetic {shard}/{entry}"

    def close(self) -> None:
        """Nothing is open."""
