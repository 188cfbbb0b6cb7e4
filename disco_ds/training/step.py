"""One optimizer step: the features of every micro-batch, one loss on all of them, gradients back through the towers.

The graph is always cut at the embeddings, as in DisCo-CLIP's Algorithm 1. With several micro-batches this is BASIC's
GradAccum: forwards without graphs, one loss, then each micro-batch's forward again under its own RNG state. The last
micro-batch keeps the graph of its first forward, so that a single micro-batch costs one forward, on the same path.
"""

# b samples of this rank = K micro-batches x m, D width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.profiler import record_function

from disco_ds.losses import Embeddings, LossOutput
from disco_ds.metrics.timers import Timer
from disco_ds.models.clip import Features, trained_sides
from disco_ds.training.engine import Engine, backward_and_step, clamp_scale

Prepare = Callable[[Any], tuple[Tensor, Tensor, Tensor]]
"""Micro-batch -> (image [m, 3, H, W], text [m, L] or second views, index [m]) on the device; equal at each call."""


@dataclass(frozen=True)
class StepOutput:
    metrics: dict[str, Tensor]
    """LossOutput.metrics: 0-d each, the same on every rank."""
    scale: Tensor
    """[1], the scale the loss was computed with."""
    grad_norm: Tensor | None
    """Norm of the whole gradient before clipping; None if a loss scaler skipped the step."""


class Rng:
    """The states of the CPU's and the device's generators, from which dropout, patch dropout and drop path draw."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.device = get_accelerator().get_rng_state() if get_accelerator().device_name() != "cpu" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            get_accelerator().set_rng_state(self.device)


def train_step(
    engine: Engine,
    loss: Callable[[Embeddings], LossOutput],
    micro_batches: Sequence[Any],
    prepare: Prepare,
    max_scale: float,
    agree: Callable[[Embeddings, Tensor], None] = lambda embeddings, loss: None,
    set_rates: Callable[[Tensor], None] = lambda scale: None,
    timer: Timer = record_function,
) -> StepOutput:
    """Apply the full-batch gradient of these micro-batches (of all ranks) once. Collective: every rank must call.

    Args:   micro_batches: K of equal size, the same K and size on every rank, K = gradient_accumulation_steps;
            agree: called with this rank's embeddings and loss before anything is changed; raises on all ranks or on
            none; set_rates: called with the scale [1] before the update, to set its learning rates, because that of
            the temperature may depend on the scale; timer: a context manager that is opened around each phase.
    Raises: what `agree` raises, or FloatingPointError (see backward_and_step), with model and optimizer unchanged.
    """
    forward = Forward(engine, prepare)
    last = len(micro_batches) - 1
    with timer("step/forward"):
        parts = [forward(batch, keep_graph=k == last) for k, batch in enumerate(micro_batches)]
    # Repeating a forward rewinds the generators. The next step has to draw on from here, whatever K is.
    after = Rng()
    leaves = _cut(parts, trains=forward.trains)
    with timer("step/loss"):
        out = loss(leaves)
        out.loss.backward()  # ends at the leaves, with the full-batch gradient there
    agree(leaves, out.loss)
    set_rates(leaves.scale)
    with timer("step/backward and update"):
        norm = backward_and_step(engine, _surrogates(forward, micro_batches, parts, leaves))
    after.restore()
    clamp_scale(engine, max_scale)
    return StepOutput(out.metrics, leaves.scale.detach(), norm)


@dataclass(frozen=True)
class MicroFeatures:
    """The features of one micro-batch, and the RNG state that repeats its forward."""

    features: Features
    index: Tensor
    rng: Rng


class Forward:
    """Runs the towers on a micro-batch, and again for its gradient. Towers that are not trained run only once."""

    def __init__(self, engine: Engine, prepare: Prepare):
        self.engine, self.prepare = engine, prepare
        self.trains = trained_sides(engine.module)

    def __call__(self, batch: Any, keep_graph: bool) -> MicroFeatures:
        image, text, index = self.prepare(batch)
        with torch.no_grad():
            locked = self._towers(image, text, trained=False)
        rng = Rng()  # after the locked tower, because `again` does not repeat its draws
        with torch.set_grad_enabled(keep_graph):
            features = self._towers(image, text, trained=True)
        return MicroFeatures(_merge(features, locked), index, rng)

    def again(self, batch: Any, first: MicroFeatures) -> MicroFeatures:
        """Compute the trained towers' features once more, with a graph; they equal the first ones."""
        image, text, index = self.prepare(batch)
        first.rng.restore()
        return MicroFeatures(self._towers(image, text, trained=True), index, first.rng)

    def _towers(self, image: Tensor, text: Tensor, trained: bool) -> Features:
        chosen = {"image": image, "text": text}
        chosen = {name: value for name, value in chosen.items() if self.trains[name] == trained}
        return self.engine(**chosen) if chosen else (None, None, None, None)


def _merge(trained: Features, locked: Features) -> Features:
    image, text, scale, bias = trained
    return locked[0] if image is None else image, locked[1] if text is None else text, scale, bias


def _cut(parts: Sequence[MicroFeatures], trains: dict[str, bool]) -> Embeddings:
    """All micro-batches' features as leaves: the loss's backward stops here and never sees loss scaling."""
    # Scale and bias are the same in every micro-batch. Those of the last one have the graph that is kept.
    images, texts, scales, biases = zip(*(part.features for part in parts), strict=True)
    return Embeddings(
        torch.cat(images).detach().requires_grad_(trains["image"]),
        torch.cat(texts).detach().requires_grad_(trains["text"]),
        scales[-1].detach().requires_grad_(scales[-1].requires_grad),
        None if biases[-1] is None else biases[-1].detach().requires_grad_(biases[-1].requires_grad),
        torch.cat([part.index for part in parts]),
    )


def _surrogates(
    forward: Forward, batches: Sequence[Any], parts: list[MicroFeatures], leaves: Embeddings
) -> Iterator[Tensor]:
    """For each micro-batch, a scalar whose gradient at the parameters is this micro-batch's part of the loss gradient.

    The scalar is the inner product of the features and the gradient that the loss has left at them. Scale and bias are
    counted once, in the last micro-batch. The others have their terms times 0: ZeRO 3 would apply a stale gradient to
    a parameter that is not in the graph.
    """
    m = len(parts[-1].index)
    # The last micro-batch goes first, so that its backward frees its graph before the others make theirs.
    held = parts.pop()
    last = len(parts)
    for k in (last, *range(last)):
        image, text, scale, bias = (held if k == last else forward.again(batches[k], parts[k])).features
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
