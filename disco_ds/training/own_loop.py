"""The full-batch gradient in anybody's loop: grad_accum.py for any two towers under DeepSpeed, DDP or FSDP2.

docs/own_loop.md shows its use. The trainer of this package has its own way in (step.py) to the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from disco_ds.config.ds_config import check_precision
from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, Loss, LossOutput
from disco_ds.losses.alike import check_alike, warn_of_unusual
from disco_ds.training.engine import backward_and_step
from disco_ds.training.grad_accum import Features, MicroFeatures, Rng, accumulate

Forward = Callable[[Any], tuple[Tensor, ...]]
REPEAT_TOLERANCE = 0.05
"""How far a feature of a repeated forward may be from the first; 16-bit kernels that add up in any order reach 0.01."""


def contrastive_step(
    model: Any,
    loss: Loss,
    batch: Any,
    forward: Forward,
    *,
    micro_batches: int = 1,
    scale: float | None = None,
    index: Tensor | None = None,
    backward: Callable[[Tensor], None] = torch.Tensor.backward,
) -> LossOutput:
    """Give the parameters the gradient of the global batch, whatever the number of ranks and micro-batches. Collective.

    Under a DeepSpeed engine the update is done too, for ZeRO needs engine.step() after each micro-batch. Everywhere
    else the gradients are left in the parameters, averaged over ranks, for the loop's own clipping and optimizer.

    Args:    model: a DeepSpeed engine, DistributedDataParallel, a module of FSDP2's fully_shard, or a plain module of
             one process; batch: this rank's samples, a tree of tensors [b, ...] (dicts, lists, tuples; what is no
             tensor goes into every part); forward: the part of a micro-batch -> (features of one side [m, D], of the
             other [m, D]), then the learned scale and bias, if there are any; it calls `model`, and draws no random
             numbers but torch's; micro_batches: K, divides b; scale: of the logits, exp(logit_scale), where
             forward gives none;
             index [b]: sample ids, for FastCLIP; backward: what is called on each surrogate, such as
             `lambda x: scaler.scale(x).backward()`; not under DeepSpeed.
    Returns: the loss's output; `metrics["loss"]`, the mean over the global batch, is the figure to log.
    Raises:  ValueError on every rank alike for batches that do not fit together or do not divide into K; for K other
             than the engine's gradient_accumulation_steps, a step inside a step, a forward without a scale, or one that
             is another the second time; FloatingPointError from DeepSpeed engines, see backward_and_step.
    """
    first_time = not getattr(model, "_contrastive_steps", 0)
    if getattr(model, "_in_contrastive_step", False):
        raise ValueError(
            "contrastive_step inside a contrastive_step of the same model: the loss takes all rows at once"
        )
    backend = _Engine(model) if isinstance(model, DeepSpeedEngine) else _Plain(model, backward)
    backend.check(micro_batches)
    parts = _split_alike(
        batch, micro_batches, model.device if isinstance(model, DeepSpeedEngine) else comm.local_device()
    )
    indices = [None] * micro_batches if index is None else list(index.chunk(micro_batches))
    towers = _Towers(forward, backend, micro_batches, scale, model if first_time else None)
    model._in_contrastive_step = True

    def agree(embeddings: Embeddings, out: LossOutput) -> None:
        if first_time:
            warn_of_unusual(embeddings.image, embeddings.text, embeddings.scale)

    def checked(embeddings: Embeddings) -> LossOutput:
        check_alike(embeddings.image, embeddings.text, getattr(loss, "group", None), model._contrastive_steps)
        return loss(embeddings)

    try:
        model._contrastive_steps = getattr(model, "_contrastive_steps", 0) + 1
        done = accumulate(towers, checked, list(zip(parts, indices, strict=True)), backend.run, agree)
    finally:
        model._in_contrastive_step = False
    if done.result:  # else a loss scaler has skipped the update, and the state of the loss stays too
        loss.commit()
    return done.out


def _split_alike(batch: Any, count: int, device: torch.device) -> list[Any]:
    """As split, but all ranks raise where one does: alone it would leave them waiting. Collective if count > 1."""
    problem, parts = None, []
    try:
        parts = split(batch, count)
    except ValueError as error:
        problem = error
    failed = torch.tensor([float(problem is not None)], device=device)
    if count > 1 and comm.all_reduce_max(failed).item():
        raise problem or ValueError(f"the batch of another rank does not divide into {count} micro-batches")
    if problem is not None:
        raise problem
    return parts


def split(batch: Any, count: int) -> list[Any]:
    """A tree of tensors as `count` trees, cut along the first dimension. Raises: ValueError if it does not divide."""
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or len(batch) % count:
            raise ValueError(f"a batch of shape {tuple(batch.shape)} does not divide into {count} micro-batches")
        return list(batch.chunk(count))
    if isinstance(batch, Mapping):
        cut = {key: split(value, count) for key, value in batch.items()}
        return [{key: values[k] for key, values in cut.items()} for k in range(count)]
    if isinstance(batch, list | tuple):
        rows = [split(value, count) for value in batch]
        make = getattr(type(batch), "_make", type(batch))  # of a namedtuple
        return [make(row[k] for row in rows) for k in range(count)]
    return [batch] * count


class _Towers:
    """A person's forward on one micro-batch, first and again."""

    def __init__(self, forward: Forward, backend: Any, num_micro_batches: int, scale: float | None, suspect: Any):
        self.forward, self.backend, self.scale, self.suspect = forward, backend, scale, suspect
        self.K = num_micro_batches
        self.buffers = {} if suspect is None else {n: b.clone() for n, b in suspect.named_buffers()}

    def __call__(self, batch: Any, keep_graph: bool) -> MicroFeatures:
        rng = Rng()
        with torch.set_grad_enabled(keep_graph), self.backend.synchronised(last=self.K == 1):
            features = self._features(batch[0])
        if self.K > 1:
            self._refuse_change()
        return MicroFeatures(features if keep_graph else tuple(_detach(x) for x in features), batch[1], rng)

    def again(self, batch: Any, first: MicroFeatures) -> MicroFeatures:
        first.rng.restore()
        features = self._features(batch[0])
        if self.suspect is not None:
            self._refuse_other(features, first.features)
        return MicroFeatures(features, batch[1], first.rng)

    def _features(self, batch: Any) -> Features:
        found = self.forward(batch)
        if not 2 <= len(found) <= 4:
            raise ValueError(f"forward returned {len(found)} values; expected two sides, then the scale and the bias")
        image, text = found[:2]
        if len(found) == 2 and self.scale is None:
            raise ValueError(
                "forward returned no scale, and contrastive_step got none: return exp(logit_scale) as its third value, "
                "or pass scale=, such as 20.0"
            )
        scale = found[2].reshape(1) if len(found) > 2 else torch.tensor([self.scale], device=image.device)
        return image, text, scale.float(), found[3].reshape(1).float() if len(found) > 3 else None

    def _refuse_other(self, again: Features, first: Features) -> None:
        """Raises: ValueError on every rank alike for features that a repeated forward does not repeat. Collective."""
        apart = [(again[0].detach() - first[0]).abs().max(), (again[1].detach() - first[1]).abs().max()]
        worst = comm.all_reduce_max(torch.stack(apart).max().float()).item()
        if not worst <= REPEAT_TOLERANCE:
            raise ValueError(
                f"forward gave other features for a micro-batch the second time ({worst:.2f} apart): it draws random "
                "numbers that are not torch's, or depends on what it has seen before"
            )

    def _refuse_change(self) -> None:
        """Raises: ValueError for a module that notes what it sees: with GradAccum it would see everything twice."""
        for name, buffer in self.suspect.named_buffers() if self.suspect is not None else ():
            if name in self.buffers and not torch.equal(buffer, self.buffers[name]):
                raise ValueError(
                    f"{name} changes in forward, as a BatchNorm's statistics do: with several micro-batches it would "
                    "be updated twice a step, and the gradient would depend on how the batch is cut; call .eval() on "
                    "that layer, or use one micro-batch"
                )


def _detach(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


class _Engine:
    """DeepSpeed: every micro-batch is a backward and a step, of which the last updates."""

    def __init__(self, engine: DeepSpeedEngine):
        self.engine = engine

    def check(self, micro_batches: int) -> None:
        steps = self.engine.gradient_accumulation_steps()
        if steps != micro_batches:
            raise ValueError(
                f"micro_batches is {micro_batches}, the engine's gradient_accumulation_steps {steps}: ZeRO would "
                "reduce too early or too late; set both to one number"
            )
        if self.engine.micro_steps % steps:
            raise ValueError(
                f"the engine is in the middle of a step ({self.engine.micro_steps % steps} of {steps} micro-batches): "
                "its gradients of micro-batches before would be mixed with this step's"
            )
        check_precision(self.engine._config._param_dict)

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def run(self, surrogates: Iterator[Tensor]) -> bool:
        """Return True if the update was applied."""
        return backward_and_step(self.engine, surrogates) is not None


class _Plain:
    """DDP, FSDP2 or neither: gradients are summed up, and averaged over ranks with the last micro-batch."""

    def __init__(self, model: Any, backward: Callable[[Tensor], None]):
        self.model, self.backward, self.K = model, backward, 1

    def check(self, micro_batches: int) -> None:
        self.K = micro_batches

    @contextmanager
    def synchronised(self, last: bool) -> Iterator[None]:
        """Whether a forward and its backward reduce gradients over ranks."""
        if hasattr(self.model, "set_requires_gradient_sync"):  # FSDP2
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
        with nullcontext() if last or not hasattr(self.model, "no_sync") else self.model.no_sync():  # DDP
            yield

    def run(self, surrogates: Iterator[Tensor]) -> bool:
        """Return True: the update is the loop's own."""
        for k in range(self.K):
            with self.synchronised(last=k == self.K - 1):
                self.backward(next(surrogates))
        return True
