"""One optimizer step of the trainer: grad_accum.py through a DeepSpeed engine, where a locked tower runs once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from disco_ds.losses import Embeddings, LossOutput
from disco_ds.metrics.timers import Timer
from disco_ds.metrics.trouble import SAMPLE
from disco_ds.models.clip import Features, trained_sides
from disco_ds.training.engine import Engine, backward_and_step, clamp_scale
from disco_ds.training.grad_accum import MicroFeatures, Rng, accumulate

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
    features: tuple[Tensor, ...]
    """Both sides' first rows of this rank, at most SAMPLE."""
    bias: Tensor | None = None
    """[1], the bias the loss was computed with; None: the model has none."""


def train_step(
    engine: Engine,
    loss: Callable[[Embeddings], LossOutput],
    micro_batches: Sequence[Any],
    prepare: Prepare,
    max_scale: float,
    agree: Callable[[Embeddings, LossOutput], None] = lambda embeddings, out: None,
    set_rates: Callable[[Tensor], None] = lambda scale: None,
    timer: Timer = record_function,
) -> StepOutput:
    """Apply the full-batch gradient of these micro-batches (of all ranks) once. Collective: every rank must call.

    Args:   micro_batches: K of equal size, the same K and size on every rank, K = gradient_accumulation_steps;
            agree: called with this rank's embeddings and the loss's output before anything is changed; raises on all
            ranks or on none; set_rates: called with the scale [1] before the update, to set its learning rates, because
            that of the temperature may depend on the scale; timer: a context manager that is opened around each phase.
    Raises: what `agree` raises, FloatingPointError or SpikeError (see backward_and_step), with model and optimizer
            unchanged.
    """

    def agree_and_set_rates(embeddings: Embeddings, out: LossOutput) -> None:
        agree(embeddings, out)
        set_rates(embeddings.scale)

    update = partial(backward_and_step, engine)
    done = accumulate(Forward(engine, prepare), loss, micro_batches, update, agree_and_set_rates, timer)
    clamp_scale(engine, max_scale)
    # A copy, so that the features of the whole batch are free before the next step.
    features = tuple(side.detach()[:SAMPLE].clone() for side in (done.embeddings.image, done.embeddings.text))
    return StepOutput(done.out.metrics, done.embeddings.scale.detach(), done.result, features, done.embeddings.bias)


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

    def _towers(self, image: Tensor, text: Tensor, trained: bool) -> Any:
        chosen = {"image": image, "text": text}
        chosen = {name: value for name, value in chosen.items() if self.trains[name] == trained}
        return self.engine(**chosen) if chosen else (None, None, None, None)


def _merge(trained: Features, locked: Features) -> Features:
    image, text, scale, bias = trained
    return locked[0] if image is None else image, locked[1] if text is None else text, scale, bias
