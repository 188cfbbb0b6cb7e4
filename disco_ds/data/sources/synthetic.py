"""A source of random images and tokens, for testing a model or a cluster without data.

A sample depends only on its id and the seed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.config.data import DataSettings
from disco_ds.data.order.counter_rng import keyed_int
from disco_ds.data.order.slots import divide
from disco_ds.data.sources.base import Decode, SampleForm, Samples, Source

_CELLS = 8
"""An image is a grid with this many cells per side, each filled with one color."""


class SyntheticSource(Source):
    """A source of randomly generated samples."""

    def __init__(self, num_samples: int) -> None:
        self.sizes = divide(num_samples)
        self.fingerprint = f"synthetic-{num_samples}"

    def open_samples(
        self, settings: DataSettings, form: SampleForm, seed: int, num_slots: int
    ) -> SyntheticSamples:
        """Return the samples as images and tokens for the model."""
        return SyntheticSamples(self, settings, form, seed, num_slots)


class SyntheticSamples(Samples):
    """Samples that are generated directly as images and tokens, so nothing is decoded."""

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor, int]:
        """Generate a sample. Returns what Samples.read returns; no two samples share a group."""
        form = self.form
        # The epoch is not part of the key, so a sample has the same image and caption in every epoch.
        random = torch.Generator().manual_seed(keyed_int(self.seed, index))
        cells = torch.randint(256, (1, 3, _CELLS, _CELLS), dtype=torch.uint8, generator=random)
        text = torch.randint(form.vocab_size - 2, (form.context_length,), generator=random)
        # Use the start and end tokens of open_clip's tokenizer. Text towers pool at the largest token, the end token.
        text[0] = form.vocab_size - 2
        text[-1] = form.vocab_size - 1
        return lambda: F.interpolate(cells, form.image.size, mode="nearest")[0], text, index
