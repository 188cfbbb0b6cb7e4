"""One optimizer step of the trainer: GradAccum (grad_accum.py) with a DeepSpeed engine.

A locked tower is not trained, so it runs only once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from disco_ds.distributed.deepspeed_quirks import forget_trace
from disco_ds.losses import Embeddings, LossOutput
from disco_ds.metrics.anomalies import SAMPLE
from disco_ds.metrics.timers import Timer
from disco_ds.models.clip import Texts, trained_sides
from disco_ds.models.fast import is_compiled
from disco_ds.training.engine import Engine, backward_and_step, clamp_scale
from disco_ds.training.grad_accum import Buffers, MicroFeatures, Rng, accumulate

Prepare = Callable[[Any], tuple[Any, ...]]
"""Maps a micro-batch to tensors on the device: (image [m, 3, H, W], text [m, L] or Texts, index [m]).

For a model with two views, the second view of each image takes the place of the text. A fourth tensor, group_id [m],
is optional. Repeated calls with the same micro-batch return the same values."""


@dataclass(frozen=True)
class StepOutput:
    """What train_step returns."""

    metrics: dict[str, Tensor]
    """LossOutput.metrics. Each value is 0-d and the same on every rank."""
    scale: Tensor
    """[1], the logit scale that the loss was computed with."""
    grad_norm: Tensor | None
    """Norm of the whole gradient before clipping; None if a loss scaler skipped the step."""
    features: tuple[Tensor, ...]
    """This rank's image features and text features, each cut to the first SAMPLE rows."""
    bias: Tensor | None = None
    """[1], the logit bias that the loss was computed with; None if the model has no bias."""


def train_step(
    engine: Engine,
    loss: Callable[[Embeddings], LossOutput],
    micro_batches: Sequence[Any],
    prepare: Prepare,
    max_scale: float,
    agree: Callable[[Embeddings, LossOutput], None] = lambda embeddings, out: None,
    refuses_norm: Callable[[int, Tensor], bool] | None = None,
    timer: Timer = record_function,
) -> StepOutput:
    """Update the parameters once, using the gradient of the global batch. Collective: every rank must call this.

    Args:
        engine: The engine.
        loss: The loss of the global batch.
        micro_batches: This rank's K micro-batches, where K is the engine's
            gradient_accumulation_steps. K and the size of a micro-batch are the same on every rank.
        prepare: Turns a micro-batch into the inputs of the towers.
        max_scale: Upper bound of exp(logit_scale) after the update; see clamp_scale.
        agree: Called with this rank's embeddings and the output of the loss, before any parameter
            or optimizer state changes. It must raise on all ranks or on none. It may set the
            learning rates.
        refuses_norm: Passed to backward_and_step as `refuses`.
        timer: Called with the name of each phase; returns a context manager that is open during the phase.

    Raises:
        FloatingPointError, SpikeError: See backward_and_step. After these errors, and after any error
            that `agree` raises, the model and the optimizer are unchanged.
    """
    before = Buffers(engine.module)

    def update(surrogates: Iterator[Tensor]) -> Tensor | None:
        # BatchNorm must count each micro-batch once, so undo the counts of the second forward and of checkpointing.
        counted = Buffers(engine.module)
        norm = backward_and_step(engine, surrogates, refuses=refuses_norm)
        (before if norm is None else counted).restore()
        return norm

    towers = Forward(engine, prepare)
    try:
        done = accumulate(towers, loss, micro_batches, update, agree, timer)
    except Exception:
        before.restore()
        forget_trace(engine)
        raise
    clamp_scale(engine, max_scale, done.embeddings.scale.detach())
    sides = done.embeddings.image, done.embeddings.text
    return StepOutput(
        metrics=done.out.metrics,
        scale=done.embeddings.scale.detach(),
        grad_norm=done.result,
        # Clone the rows, so that the features of the whole batch can be freed before the next step.
        features=tuple(side.detach()[:SAMPLE].clone() for side in sides),
        bias=done.embeddings.bias,
    )


class Forward:
    """Runs the towers on a micro-batch, and later runs the trained towers again to compute their gradient."""

    def __init__(self, engine: Engine, prepare: Prepare):
        self.engine = engine
        self.prepare = prepare
        self.trained = trained_sides(engine.module)
        self.compiled = is_compiled(engine.module)

    def __call__(self, batch: Any, keep_graph: bool) -> MicroFeatures:
        """Compute the features of a micro-batch."""
        image, text, index, *group_id = self.prepare(batch)
        # The loss needs the ids after all micro-batches, but the loader may reuse a micro-batch's buffers earlier.
        ids = [x.clone() for x in (index, *group_id)]
        with torch.no_grad():
            locked_image, locked_text, *_ = self._run_towers(image, text, trained=False)
        rng = Rng()  # taken after the locked tower has run, because `again` does not run that tower
        # torch.compile builds separate graphs with and without gradients, which may draw different random numbers. So a
        # compiled tower runs both forwards with gradients.
        with torch.set_grad_enabled(keep_graph or self.compiled):
            image, text, scale, bias = self._run_towers(image, text, trained=True)
        image = locked_image if image is None else image
        text = locked_text if text is None else text
        index, *group_id = ids
        return MicroFeatures((image, text, scale, bias), index, rng, *group_id)

    def again(self, batch: Any, first: MicroFeatures) -> MicroFeatures:
        """Recompute the features of the trained towers, now with a graph. They equal the features in `first`."""
        image, text, index, *_ = self.prepare(batch)
        first.rng.restore()
        return MicroFeatures(self._run_towers(image, text, trained=True), index, first.rng)

    def _run_towers(self, image: Tensor, text: Tensor | Texts, trained: bool) -> Any:
        """Run either the trained or the locked towers. The features of a tower that does not run are None."""
        inputs: dict[str, Any] = {}
        if self.trained["image"] == trained:
            inputs["image"] = image
        if self.trained["text"] == trained:
            inputs |= text._asdict() if isinstance(text, Texts) else {"text": text}
        return self.engine(**inputs) if inputs else (None, None, None, None)
