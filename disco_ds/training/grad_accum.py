"""GradAccum (BASIC) around a contrastive loss: one loss on the features of all micro-batches, sent back through each.

Always cut at the features, as DisCo-CLIP's Algorithm 1 does: forwards without graph first, one loss on all features,
then each micro-batch forward again under its own RNG state, with the gradient that the loss left at its features. The
last forward keeps its graph, so one micro-batch costs one forward, by the same path. How a surrogate is sent back
(DeepSpeed, DDP, FSDP2) is the caller's: step.py for the trainer, own_loop.py for anybody's loop.
"""

# b samples of this rank = K micro-batches x m, D width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.profiler import record_function

from disco_ds.losses import Embeddings, LossOutput
from disco_ds.metrics.timers import Timer

Features = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""(first side [m, D], second side [m, D], scale [1], bias [1] or None)."""
Result = TypeVar("Result")


class Rng:
    """The states of the CPU's and the device's generators, from which dropout, patch dropout and drop path draw."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.device = get_accelerator().get_rng_state() if get_accelerator().device_name() != "cpu" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            get_accelerator().set_rng_state(self.device)


@dataclass(frozen=True)
class MicroFeatures:
    """The features of one micro-batch, and the RNG state that repeats its forward."""

    features: Any
    """Features; a side is None where it is locked and was asked for again."""
    index: Tensor | None
    """[m] sample ids."""
    rng: Rng


class Towers(Protocol):
    """Both towers on one micro-batch, first and again."""

    def __call__(self, batch: Any, keep_graph: bool) -> MicroFeatures: ...

    def again(self, batch: Any, first: MicroFeatures) -> MicroFeatures:
        """The trained towers' features once more, equal to the first, with graph."""


@dataclass(frozen=True)
class Accumulated:
    """One loss, and what its gradient was sent back with."""

    out: LossOutput
    embeddings: Embeddings
    """This rank's features of all micro-batches, as leaves that hold the gradient of the loss."""
    result: Any
    """Of `backward`."""


def accumulate(
    towers: Towers,
    loss: Callable[[Embeddings], LossOutput],
    micro_batches: Sequence[Any],
    backward: Callable[[Iterator[Tensor]], Any],
    agree: Callable[[Embeddings, LossOutput], None] = lambda embeddings, out: None,
    timer: Timer = record_function,
) -> Accumulated:
    """Send the full-batch gradient of these micro-batches (of all ranks) back once. Collective, as the loss is.

    Args:   micro_batches: K of equal size, the same K and size on every rank; backward: gets K surrogate losses, each
            built when it is asked for, and calls backward on each; agree: called with this rank's embeddings and the
            loss's output before that; raises on all ranks together or on none; timer: opened with its name around each
            phase.
    """
    last = len(micro_batches) - 1
    with timer("step/forward"):
        parts = [towers(batch, keep_graph=k == last) for k, batch in enumerate(micro_batches)]
    # Repeating a forward rewinds the generators. The next step has to draw on from here, whatever K is.
    after = Rng()
    leaves = _cut(parts)
    with timer("step/loss"):
        out = loss(leaves)
        out.loss.backward()  # ends at the leaves, with the full-batch gradient there
    # Nothing has been changed so far, so all ranks can still leave the step out together.
    agree(leaves, out)
    try:
        with timer("step/backward and update"):
            result = backward(_surrogates(towers, micro_batches, parts, leaves))
    finally:  # also where the batch is skipped for its gradient
        after.restore()
    return Accumulated(out, leaves, result)


def _cut(parts: Sequence[MicroFeatures]) -> Embeddings:
    """All micro-batches' features as leaves: the loss's backward stops here and never sees loss scaling.

    The last micro-batch has its graph, and so tells what is trained.
    """
    images, texts, scales, biases = zip(*(part.features for part in parts), strict=True)
    indices = [part.index for part in parts if part.index is not None]
    return Embeddings(
        torch.cat(images).detach().requires_grad_(images[-1].requires_grad),
        torch.cat(texts).detach().requires_grad_(texts[-1].requires_grad),
        scales[-1].detach().requires_grad_(scales[-1].requires_grad),
        None if biases[-1] is None else biases[-1].detach().requires_grad_(biases[-1].requires_grad),
        torch.cat(indices) if indices else None,
    )


def _surrogates(
    towers: Towers, batches: Sequence[Any], parts: list[MicroFeatures], leaves: Embeddings
) -> Iterator[Tensor]:
    """For each micro-batch, a scalar whose gradient at the parameters is this micro-batch's part of the loss gradient.

    The scalar is the inner product of the features and the gradient that the loss has left at them. Scale and bias are
    counted once, in the last micro-batch. The others have their terms times 0: ZeRO 3 would apply a stale gradient to
    a parameter that is not in the graph.
    """
    # The last micro-batch goes first, so that its backward frees its graph before the others make theirs.
    held = parts.pop()
    last = len(parts)
    m = len(leaves.image) // (last + 1)
    for k in (last, *range(last)):
        image, text, scale, bias = (held if k == last else towers.again(batches[k], parts[k])).features
        rows, once = slice(k * m, (k + 1) * m), float(k == last)
        terms = [
            _inner(image, leaves.image, rows),
            _inner(text, leaves.text, rows),
            _inner(scale, leaves.scale, slice(None), once),
            _inner(bias, leaves.bias, slice(None), once),
        ]
        yield torch.stack([term for term in terms if term is not None]).sum()


def _inner(value: Tensor | None, leaf: Tensor | None, rows: slice, weight: float = 1.0) -> Tensor | None:
    """weight x <value, leaf.grad[rows]>; None for what is not trained."""
    if value is None or leaf is None or not leaf.requires_grad:
        return None
    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return weight * (value * grad[rows]).sum()
