"""The random draws around a step: those of the next one are the same, whatever has become of this one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.losses import Embeddings, LossOutput
from disco_ds.training.grad_accum import MicroFeatures, Rng, accumulate


class Dropped:
    """Two towers of one layer each, with dropout."""

    def __init__(self) -> None:
        self.image, self.text = nn.Linear(8, 4), nn.Linear(8, 4)

    def __call__(self, batch: Tensor, keep_graph: bool) -> MicroFeatures:
        rng = Rng()
        with torch.set_grad_enabled(keep_graph):
            image, text = (
                F.dropout(F.normalize(side(batch)), 0.5) for side in (self.image, self.text)
            )
        return MicroFeatures((image, text, torch.ones(1), None), None, rng)

    def again(self, batch: Tensor, first: MicroFeatures) -> MicroFeatures:
        first.rng.restore()
        return self(batch, keep_graph=True)


def loss(embeddings: Embeddings) -> LossOutput:
    logits = embeddings.image @ embeddings.text.T
    return LossOutput(F.cross_entropy(logits, torch.arange(len(logits))), {})


def backward(surrogates: Iterator[Tensor]) -> None:
    for surrogate in surrogates:
        surrogate.backward()


def skip(surrogates: Iterator[Tensor]) -> None:
    backward(surrogates)
    raise FloatingPointError("the gradient is not finite")


@pytest.mark.parametrize("num", [1, 4])
def test_a_batch_skipped_for_its_gradient_leaves_the_generators_as_an_applied_one(num: int) -> None:
    batches = torch.randn(8, 8).chunk(num)
    states = []
    for send in (backward, skip):
        torch.manual_seed(0)
        try:
            accumulate(Dropped(), loss, batches, send)
        except FloatingPointError:
            assert send is skip
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_surrogate_of_fp16_features_is_summed_in_fp32() -> None:
    """The inner product of the features and their gradient exceeds what fp16 can represent."""
    image = torch.full((4, 8), 64.0, dtype=torch.float16, requires_grad=True)

    class Half:
        def __call__(self, batch: Tensor, keep_graph: bool) -> MicroFeatures:
            return MicroFeatures((image * 1, image * 1, torch.ones(1), None), None, Rng())

        again = __call__

    def large(embeddings: Embeddings) -> LossOutput:
        return LossOutput((64 * embeddings.image.float()).sum() + 0 * embeddings.text.sum(), {})

    values = []

    def keep(surrogates: Iterator[Tensor]) -> None:
        values.extend(surrogate.item() for surrogate in surrogates)

    accumulate(Half(), large, [image], keep)
    assert values == [64 * 64 * 4 * 8]
