"""GradAccum, from the BASIC paper: one contrastive loss on the features of all micro-batches.

As in DisCo-CLIP's Algorithm 1, the autograd graph is always cut at the features:

1. Run the forward of every micro-batch without a graph.
2. Compute one loss on all features, and the gradient of the loss with respect to the features.
3. Run the forward of each micro-batch again with the same random numbers, and backpropagate the
   micro-batch's rows of the gradient.

The last micro-batch is an exception: it keeps its graph in step 1 and needs no second forward, so a
batch with only one micro-batch needs only one forward. For step 3, `accumulate` passes one surrogate loss
per micro-batch to its argument `backward`, which the caller provides: step.py for the trainer, with
DeepSpeed, and custom_loop.py for custom training loops, with DeepSpeed, DDP or FSDP2.
"""

# Symbols in shapes: b = K x m samples on this rank, in K micro-batches of m samples; D is the feature width.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.profiler import record_function

from disco_ds.losses import Embeddings, LossOutput
from disco_ds.losses.kernels import full_dtype
from disco_ds.metrics.timers import Timer

Features = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""(features of the first side [m, D], features of the second side [m, D], scale [1], bias [1] or None)."""


class Rng:
    """The random states of the CPU and one device, copied when this object is created.

    Dropout, patch dropout and drop path draw their random numbers from these generators.

    Args:
        device: The device; None means this process's current device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._index = None if device is None else device.index
        self._cpu_state = torch.get_rng_state()
        self._device_state = None
        if get_accelerator().device_name() != "cpu":
            self._device_state = get_accelerator().get_rng_state(self._index)

    def restore(self) -> None:
        """Set the generators back to the copied states."""
        torch.set_rng_state(self._cpu_state)
        if self._device_state is not None:
            get_accelerator().set_rng_state(self._device_state, self._index)


class Buffers:
    """Copies of a model's buffers, such as BatchNorm's running statistics, made when this object is created."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._copies = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers back to the copied values."""
        for buffer, value in zip(self._buffers, self._copies, strict=True):
            buffer.copy_(value)


@dataclass(frozen=True)
class MicroFeatures:
    """The features of one micro-batch, and the random state from before the forward that computed them."""

    features: Any
    """A tuple, see Features. In the result of `Towers.again`, the features of a locked tower may be None."""
    index: Tensor | None
    """[m] sample ids."""
    rng: Rng
    group_id: Tensor | None = None
    """[m] group ids, see Embeddings."""

    def detach(self) -> MicroFeatures:
        """Return the same features without their autograd graph."""
        features = tuple(None if x is None else x.detach() for x in self.features)
        return replace(self, features=features)


class Towers(Protocol):
    """Runs both towers on one micro-batch."""

    def __call__(self, batch: Any, keep_graph: bool) -> MicroFeatures:
        """Compute the features of a micro-batch. An autograd graph is needed only if `keep_graph` is True."""

    def again(self, batch: Any, first: MicroFeatures) -> MicroFeatures:
        """Recompute the features of the trained towers, now with a graph. They equal the features in `first`."""


@dataclass(frozen=True)
class Accumulated:
    """What `accumulate` returns."""

    out: LossOutput
    embeddings: Embeddings
    """This rank's features of all micro-batches, as leaf tensors. Their .grad is the gradient of the loss."""
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
    """Compute the loss of the global batch and backpropagate it through all micro-batches. Collective if the loss is.

    Args:
        towers: Called on each micro-batch; `towers.again` is called on each one except the last.
        loss: Called once, with the features of all micro-batches.
        micro_batches: This rank's K micro-batches; K and their size are the same on every rank.
        backward: Takes an iterator over K surrogate losses, and backpropagates each one before it
            requests the next.
        agree: Called before `backward`, with this rank's embeddings and the output of the loss. It
            may raise an error to skip the step, but then it must raise on all ranks.
        timer: Called with the name of each phase; returns a context manager that surrounds the phase.
    """
    last = len(micro_batches) - 1
    with timer("step/forward"):
        # The towers may build a graph even if keep_graph is False. Detaching the features frees it.
        parts = [towers(micro_batches[k], keep_graph=False).detach() for k in range(last)]
        parts.append(towers(micro_batches[last], keep_graph=True))
    # The repeated forwards rewind the generators. The next step must continue from the current state.
    after = Rng(parts[-1].rng.device)
    leaves = _join_leaves(parts)
    with timer("step/loss"):
        out = loss(leaves)
        out.loss.backward()  # stops at the leaf tensors, which then have the gradient of the global batch
    # Some losses keep the features that they have gathered in the graph. Free them before the backward of the towers.
    out = replace(out, loss=out.loss.detach())
    # Nothing has been updated yet, so all ranks can still skip the step together.
    agree(leaves, out)
    try:
        with timer("step/backward and update"):
            result = backward(_surrogates(towers, micro_batches, parts, leaves))
    finally:  # also if `backward` raises, for example to skip the batch
        after.restore()
    return Accumulated(out, leaves, result)


def _join_leaves(parts: Sequence[MicroFeatures]) -> Embeddings:
    """Concatenate the image features and text features of all micro-batches; the scale and bias are the last ones.

    All are leaf tensors, at which the backward of the loss stops. Only the last micro-batch has a graph, so a leaf
    requires a gradient if the tensor of the last micro-batch does.
    """
    images, texts, scales, biases = zip(*(part.features for part in parts), strict=True)

    def leaf(value: Tensor, last: Tensor) -> Tensor:
        return value.detach().requires_grad_(last.requires_grad)

    def join(ids: list[Tensor | None]) -> Tensor | None:
        found = [x for x in ids if x is not None]
        return torch.cat(found) if found else None

    return Embeddings(
        image=leaf(torch.cat(images), images[-1]),
        text=leaf(torch.cat(texts), texts[-1]),
        scale=leaf(scales[-1], scales[-1]),
        bias=None if biases[-1] is None else leaf(biases[-1], biases[-1]),
        index=join([part.index for part in parts]),
        group_id=join([part.group_id for part in parts]),
    )


def _surrogates(
    towers: Towers, batches: Sequence[Any], parts: list[MicroFeatures], leaves: Embeddings
) -> Iterator[Tensor]:
    """Yield a surrogate loss for each micro-batch: the inner product of its features and their gradient.

    Its backward adds this micro-batch's contribution to the gradient of every parameter. The terms of
    scale and bias must count only once per batch, so their weight is 1 in the last micro-batch and 0 in
    the others. The others cannot simply omit these terms, because ZeRO 3 would apply a stale gradient
    to a parameter that is not in the graph.
    """
    # The last micro-batch comes first, so that its graph is freed before the next graph is built.
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
    """Return weight x <value, leaf.grad[rows]> (inner product), or None if the value is not trained."""
    if value is None or leaf is None or not leaf.requires_grad:
        return None
    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    # In fp16, the sum could exceed 65,504.
    dtype = full_dtype(value)
    return weight * (value.to(dtype) * grad[rows].to(dtype)).sum()
