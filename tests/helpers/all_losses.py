"""The InfoNCE losses with options for small tests, and a function that evaluates a loss on all ranks."""

from typing import Any

import pytest
import torch

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, build_loss
from helpers.oracle import Answer, answer, features

TILE = {"tile": (64, 64)}  # small, so that a matrix has several tiles, some of them partial


LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("clip", {}),
    ("disco", {}),
    ("disco_fused", TILE),
    ("inf_cl", TILE),
]


TILED = [(name, options) for name, options in LOSSES if options is TILE]


def evaluate(
    name: str,
    options: dict[str, Any],
    image: torch.Tensor,
    text: torch.Tensor,
    scale: float,
    upstream: float = 1.0,
) -> Answer:
    """Compute a loss on this rank's rows, and average over ranks as an engine would. Collective.

    Args:
        name: Name of the loss.
        options: Its options.
        image: [B, D], the rows of all ranks.
        text: [B, D], the rows of all ranks.
        scale: The logit scale.
        upstream: The loss is multiplied by this factor before backward, and the gradients are divided by it.

    Returns:
        The loss and its gradients for the whole batch, equal on all ranks.
    """
    N, n = comm.size(), comm.rank()
    b = len(image) // N
    I, T = (x[n * b : (n + 1) * b].detach().clone().requires_grad_() for x in (image, text))  # noqa: E741
    s = torch.tensor([scale], dtype=image.dtype, requires_grad=True)
    out = build_loss(name, **options)(Embeddings(I, T, s))
    (upstream * out.loss).backward()
    mine = answer(out.loss.item(), I, T, s)
    loss, ds = (
        comm.all_reduce_sum(torch.tensor([mine.loss, mine.ds], dtype=torch.float64)) / N
    ).tolist()
    assert out.metrics["loss"].item() == pytest.approx(loss, rel=1e-5)
    dI, dT = (comm.gather(grad) / (N * upstream) for grad in (mine.dI, mine.dT))
    return Answer(loss, dI, dT, ds / upstream)


def accuracy_of_copies(name: str, **options: Any) -> float:
    """Return the sum of both accuracies for a batch in which every rank has 40 copies of the same pair. Collective."""
    image, text = (x.expand(40, -1) for x in features(1, 200, torch.float32, "random"))
    loss = build_loss(name, **options)
    loss.set_num_samples(40 * comm.size(), 1)
    index = torch.arange(40) + 40 * comm.rank()
    out = loss(Embeddings(image, text, torch.tensor([90.0]), -torch.ones(1), index))
    return out.metrics["i2t_accuracy"].item() + out.metrics["t2i_accuracy"].item()
