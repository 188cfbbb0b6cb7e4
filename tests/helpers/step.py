"""A training step without a run, made of the parts that the trainer's step uses (training/step.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from disco_ds.losses import Embeddings, LossOutput
from disco_ds.training.engine import (
    NOT_FINITE,
    Engine,
    EngineTowers,
    Prepare,
    backward_and_step,
    clamp_scale,
)
from disco_ds.training.grad_accum import Snapshot, forward_all, loss_at_features, surrogates


@dataclass(frozen=True)
class Output:
    """The results of a step."""

    metrics: dict[str, Tensor]
    scale: Tensor
    """[1], the logit scale that the loss was computed with."""
    grad_norm: Tensor | None
    """Norm of the whole gradient before clipping; None if a loss scaler skipped the step."""


def train_step(
    engine: Engine,
    loss: Callable[[Embeddings], LossOutput],
    micro_batches: Sequence[Any],
    prepare: Prepare,
    max_scale: float,
) -> Output:
    """Update the parameters once. Collective: every rank must call this.

    Args:
        engine: The engine.
        loss: The loss of the global batch.
        micro_batches: This rank's K micro-batches, where K is the engine's gradient_accumulation_steps.
        prepare: Turns a micro-batch into the inputs of the towers.
        max_scale: Upper bound of exp(logit_scale) after the update.

    Raises:
        FloatingPointError: On every rank, if the gradient is not finite, except if fp16's loss scaler skips the step.
            The parameters are not updated.
    """
    towers = EngineTowers(engine, prepare)
    features = forward_all(towers, micro_batches, len(micro_batches))
    after = Snapshot(engine.module)
    out, leaves = loss_at_features(loss, features)
    update = backward_and_step(engine, surrogates(towers, micro_batches, features, leaves))
    if update.result == "not finite":
        raise FloatingPointError(f"step {engine.global_steps}: {NOT_FINITE}")
    after.restore()
    clamp_scale(engine, max_scale, leaves.scale.detach())
    norm = update.norm if update.result == "applied" else None
    return Output(out.metrics, leaves.scale.detach(), norm)
