"""GradAccum, tested without an engine: gradients, random numbers and precision."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from disco_ds.losses import Embeddings, LossOutput, build_loss
from disco_ds.training.grad_accum import (
    MicroFeatures,
    Rng,
    Snapshot,
    forward_all,
    loss_at_features,
    surrogates,
)


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
        return MicroFeatures((image, text, torch.ones(1), None), rng)

    def again(self, batch: Tensor, first: MicroFeatures) -> Any:
        first.rng.restore()
        return self(batch, keep_graph=True).features


def loss(embeddings: Embeddings) -> LossOutput:
    logits = embeddings.image @ embeddings.text.T
    return LossOutput(F.cross_entropy(logits, torch.arange(len(logits))), {})


@pytest.mark.parametrize("num", [1, 4])
def test_repeated_forwards_backpropagate_what_the_first_ones_drew(num: int) -> None:
    """With dropout, a step has the same gradient as one graph of all micro-batches with the same random numbers."""
    batches = torch.randn(8, 8).chunk(num)
    torch.manual_seed(0)
    towers = Dropped()
    parameters = [*towers.image.parameters(), *towers.text.parameters()]
    torch.manual_seed(1)
    features = forward_all(towers, batches, num)
    _, leaves = loss_at_features(loss, features)
    for surrogate in surrogates(towers, batches, features, leaves):
        surrogate.backward()
    found = [p.grad for p in parameters]
    torch.manual_seed(1)
    parts = [towers(batch, keep_graph=True).features for batch in batches]
    image, text = (torch.cat(side) for side in list(zip(*parts, strict=True))[:2])
    expected = torch.autograd.grad(loss(Embeddings(image, text, torch.ones(1))).loss, parameters)
    torch.testing.assert_close(found, list(expected))


def test_snapshot_restores_buffers_and_random_numbers() -> None:
    model = nn.BatchNorm1d(4)
    before, drawn = Snapshot(model), torch.randn(3)
    model(torch.randn(8, 4))
    assert model.running_mean is not None
    assert model.running_mean.any()
    before.restore()
    assert not model.running_mean.any()
    assert torch.equal(torch.randn(3), drawn)


def test_snapshot_leaves_out_expanded_buffers() -> None:
    model = nn.Module()
    model.register_buffer("ids", torch.zeros(1, dtype=torch.int64).expand(3))
    Snapshot(model).restore()


def test_forward_that_uses_a_buffer_that_it_changes_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), spectral_norm(nn.Linear(4, 4)))
    before = Snapshot(model)
    model[0](torch.randn(8, 4))
    before.warn_of_changed_buffers(model)
    assert not caplog.text
    model(torch.randn(8, 4))
    before.warn_of_changed_buffers(model)
    assert "changes the buffer 1.parametrizations.weight.0._u" in caplog.text


def test_gradient_at_fp16_features_is_not_rounded() -> None:
    """Without a loss scale, the gradient of most pairs of a large batch is too small for fp16."""
    rows = F.normalize(torch.randn(2, 512, 16, generator=torch.Generator().manual_seed(0)), dim=2)
    image, text = rows.half()
    part = MicroFeatures((image.requires_grad_(), text, torch.tensor([5.0]), None), Rng())
    _, leaves = loss_at_features(build_loss("clip"), [part])
    exact = image.detach().double().requires_grad_()
    build_loss("clip")(Embeddings(exact, text.double(), torch.tensor([5.0]))).loss.backward()
    assert leaves.image.grad is not None
    error = (leaves.image.grad.double() - exact.grad).norm() / exact.grad.norm()  # type: ignore[union-attr]
    assert error < 1e-6


def test_surrogate_of_fp16_features_is_summed_in_fp32() -> None:
    """The inner product of the features and their gradient exceeds what fp16 can represent."""
    image = torch.full((4, 8), 64.0, dtype=torch.float16, requires_grad=True)

    class Half:
        def __call__(self, batch: Tensor, keep_graph: bool) -> MicroFeatures:
            return MicroFeatures((image * 1, image * 1, torch.ones(1), None), Rng())

        def again(self, batch: Tensor, first: MicroFeatures) -> Any:
            raise AssertionError("a single micro-batch keeps its graph")

    def large(embeddings: Embeddings) -> LossOutput:
        return LossOutput((64 * embeddings.image.float()).sum() + 0 * embeddings.text.sum(), {})

    features = forward_all(Half(), [image], 1)
    _, leaves = loss_at_features(large, features)
    (surrogate,) = surrogates(Half(), [image], features, leaves)
    assert surrogate.item() == 64 * 64 * 4 * 8
