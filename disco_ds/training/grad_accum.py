"""GradAccum (BASIC) around a contrastive loss: one loss on the features of all micro-batches.

As in DisCo-CLIP's Algorithm 1, the graph is always cut at the features. First every micro-batch is
forwarded without a graph, then one loss is computed on all features, then each micro-batch is
forwarded again under its first RNG state and the gradient that the loss left at its features is sent
back through it. The last forward keeps its graph, so a single micro-batch costs a single forward, by
the same code. The caller decides how a surrogate loss is sent back (DeepSpeed, DDP, FSDP2): step.py
does so for the trainer, own_loop.py for custom training loops.
"""

# b samples of this rank = K micro-batches x m, D width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.profiler import record_function

from disco_ds.losses import Embeddings, LossOutput
from disco_ds.metrics.timers import Timer

Features = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""(first side [m, D], second side [m, D], scale [1], bias [1] or None)."""


class Rng:
    """The states of the random generators of the CPU and one device, which dropout, patch dropout and drop path use.

    Args:
        device: The device; None: the current one of this process.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._cpu_state = torch.get_rng_state()
        self._device_state = None
        if get_accelerator().device_name() != "cpu":
            self._device_state = get_accelerator().get_rng_state(self._index)

    @property
    def _index(self) -> int | None:
        return None if self.device is None else self.device.index

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._cpu_state)
        if self._device_state is not None:
            get_accelerator().set_rng_state(self._device_state, self._index)


@dataclass(frozen=True)
class MicroFeatures:
    """The features of one micro-batch, and the RNG state that repeats its forward."""

    features: Any
    """Features; the features of a locked tower are None in `Towers.again`."""
    index: Tensor | None
    """[m] sample ids."""
    rng: Rng


class Towers(Protocol):
    """Both towers, run on one micro-batch."""

    def __call__(self, batch: Any, keep_graph: bool) -> MicroFeatures:
        """Compute the features, with a graph or without."""

    def again(self, batch: Any, first: MicroFeatures) -> MicroFeatures:
        """Compute the features of the trained towers again, with a graph; they equal the first ones."""


@dataclass(frozen=True)
class Accumulated:
    """What `accumulate` returns."""

    out: LossOutput
    embeddings: Embeddings
    """This rank's features of all micro-batches, as leaves that hold the gradient of the loss."""
    result: Any
    """What `backward` returned."""


def accumulate(
    towers: Towers,
    loss: Callable[[Embeddings], LossOutput],
    micro_batches: Sequence[Any],
    backward: Callable[[Iterator[Tensor]], Any],
    agree: Callable[[Embeddings, LossOutput], None] = lambda embeddings, out: None,
    timer: Timer = record_function,
) -> Accumulated:
    """Send the full-batch gradient of these micro-batches (of all ranks) back once. Collective, as the loss is.

    Args:
        towers: Run on each micro-batch, twice on all but the last one.
        loss: Called once, with the features of all micro-batches.
        micro_batches: K of equal size, with the same K and size on every rank.
        backward: Gets K surrogate losses, each built when it is requested, and calls backward on each.
        agree: Called with this rank's embeddings and the output of the loss before `backward`. It
            must raise on all ranks or on none.
        timer: Opened around each phase, with the name of the phase.
    """
    last = len(micro_batches) - 1
    with timer("step/forward"):
        parts = [towers(batch, keep_graph=k == last) for k, batch in enumerate(micro_batches)]
    # Repeating a forward rewinds the generators. The next step must continue from here, whatever K is.
    after = Rng(parts[-1].rng.device)
    leaves = _join_leaves(parts)
    with timer("step/loss"):
        out = loss(leaves)
        out.loss.backward()  # ends at the leaves, with the full-batch gradient there
    # Nothing has been changed yet, so all ranks can still abandon the step together.
    agree(leaves, out)
    try:
        with timer("step/backward and update"):
            result = backward(_surrogates(towers, micro_batches, parts, leaves))
    finally:  # also if the batch is skipped because of its gradient
        after.restore()
    return Accumulated(out, leaves, result)


def _join_leaves(parts: Sequence[MicroFeatures]) -> Embeddings:
    """Join the features of all micro-batches as leaves, where the backward of the loss stops.

    So the loss never sees loss scaling. The last micro-batch has a graph, which shows what is trained.
    """
    images, texts, scales, biases = zip(*(part.features for part in parts), strict=True)
    indices = [part.index for part in parts if part.index is not None]

    def leaf(value: Tensor, last: Tensor) -> Tensor:
        return value.detach().requires_grad_(last.requires_grad)

    return Embeddings(
        image=leaf(torch.cat(images), images[-1]),
        text=leaf(torch.cat(texts), texts[-1]),
        scale=leaf(scales[-1], scales[-1]),
        bias=None if biases[-1] is None else leaf(biases[-1], biases[-1]),
        index=torch.cat(indices) if indices else None,
    )


def _surrogates(
    towers: Towers, batches: Sequence[Any], parts: list[MicroFeatures], leaves: Embeddings
) -> Iterator[Tensor]:
    """Yield a scalar for each micro-batch whose gradient is this micro-batch's part of the loss gradient.

    The scalar is the inner product of the features and the gradient that the loss left at them. Scale
    and bias are counted once, in the last micro-batch. The others have their terms times 0, because
    ZeRO 3 would apply a stale gradient to a parameter that is not in the graph.
    """
    # The last micro-batch goes first, so that its backward frees its graph before the others build theirs.
    with_graph = parts.pop()
    last = len(parts)
    m = len(leaves.image) // (last + 1)
    for k in (last, *range(last)):
        part = with_graph if k == last else towers.again(batches[k], parts[k])
        image, text, scale, bias = part.features
        rows = slice(k * m, (k + 1) * m)
        once = float(k == last)
        terms = [
            _inner_product(image, leaves.image, rows),
            _inner_product(text, leaves.text, rows),
            _inner_product(scale, leaves.scale, slice(None), once),
            _inner_product(bias, leaves.bias, slice(None), once),
        ]
        yield torch.stack([term for term in terms if term is not None]).sum()


def _inner_product(
    value: Tensor | None, leaf: Tensor | None, rows: slice, weight: float = 1.0
) -> Tensor | None:
    """Return weight x <value, leaf.grad[rows]>, or None if the value is not trained."""
    if value is None or leaf is None or not leaf.requires_grad:
        return None
    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return weight * (value * grad[rows]).sum()
