"""contrastive_step: compute the gradient of the global batch in a custom loop, under DeepSpeed, DDP or FSDP2.

docs/custom_loop.md shows how to use it. The algorithm is in grad_accum.py. The trainer in this package
uses the same algorithm through step.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from disco_ds.config.ds_config import check_gradient
from disco_ds.distributed import comm
from disco_ds.distributed.deepspeed_quirks import widen_bucket
from disco_ds.losses import Embeddings, Loss, LossOutput, Teacher
from disco_ds.losses.drop_in import check_alike, warn_of_unusual
from disco_ds.training.engine import NOT_FINITE, backward_and_step
from disco_ds.training.grad_accum import (
    Features,
    MicroFeatures,
    Rng,
    Snapshot,
    forward_all,
    loss_at_features,
    surrogates,
)
from disco_ds.training.micro_batches import DIVIDES, split

ForwardFunction = Callable[[Any], tuple[Tensor, ...]]
REPEAT_TOLERANCE = 0.05
"""Maximum of |again - first| / |first|. With 16-bit kernels, values of 0.01 occur.

The forward of a micro-batch runs twice. `first` is a feature row from the first run, and `again` is the same row from
the second.
"""
EXPECTED = (
    "expected a tuple: the features of both sides, then the scale and the bias, if there are any"
)


def contrastive_step(
    model: Any,
    loss: Loss,
    batch: Any,
    forward: ForwardFunction,
    *,
    micro_batches: int = 1,
    scale: float | None = None,
    index: Tensor | None = None,
    group_id: Tensor | None = None,
    teacher: Sequence[Teacher] = (),
    backward: Callable[[Tensor], None] = torch.Tensor.backward,
) -> LossOutput:
    """Compute the gradient of the global batch for any number of ranks and micro-batches. Collective.

    Under a DeepSpeed engine, this function also updates the parameters, because ZeRO needs an
    engine.step() after each micro-batch. Otherwise, it leaves the gradients, averaged over ranks, in the
    .grad of the parameters. The loop must then clip them, if needed, and step its optimizer.

    Args:
        model: A DeepSpeed engine, a DistributedDataParallel module, a module to which FSDP2's
            fully_shard was applied, or a plain module in a run with one process.
        loss: The loss of the global batch.
        batch: This rank's b samples: a tensor [b, ...], or a mapping, dataclass, tuple or list of such tensors, which
            may be nested. In a micro-batch, mappings are dicts. With micro_batches=1, the batch is not split and
            may be anything.
        forward: Calls `model` on one micro-batch, a part of `batch`. It returns the features of both
            sides, [b / K, width] each, then the learned scale and bias, if there are any. All random numbers
            that it uses must come from torch's generators.
        micro_batches: K, the number of micro-batches; b must be a multiple of K.
        scale: The factor that multiplies the similarities, exp(logit_scale). Required if `forward` does not
            return a scale, and ignored otherwise.
        index: [b], the sample ids. The FastCLIP losses require them.
        group_id: [b] int64, equal for samples of the same group. Losses with the option `same_group` use it.
        teacher: Features of teachers for this rank's b samples, computed without a graph. A loss with the option
            teacher_weight learns from them.
        backward: Called on the surrogate loss of each micro-batch, for example
            `lambda x: scaler.scale(x).backward()`. Not used under DeepSpeed.

    Returns:
        The output of the loss. The value to log is `metrics["loss"]`, the mean over the global batch.

    Raises:
        ValueError: On every rank, in any of these cases: the features have different shapes on different
            ranks; b is not a multiple of K; K is not the engine's gradient_accumulation_steps; the scale
            or the bias differs between ranks; neither `forward` nor `scale` provides a scale; a repeated `forward`
            returns different features.
        FloatingPointError: On every rank, if the gradient is not finite under a DeepSpeed engine. Nothing is updated.
            It is not raised if a loss scaler has skipped the step and can still lower its scale.
    """
    backend: _Engine | _Plain
    if isinstance(model, DeepSpeedEngine):
        backend = _Engine(model, micro_batches)
    else:
        has_state = type(loss).commit is not Loss.commit
        backend = _Plain(model, micro_batches, backward, reports_skips=has_state)
    if micro_batches > 1:
        refuse_batch_statistics(model)
    device = None if micro_batches == 1 else find_device(model)
    parts, num_samples = _split_on_all_ranks(
        {"batch": batch, "index": index, "group_id": group_id}, micro_batches, device
    )
    group = getattr(loss, "group", None)
    mode = (micro_batches, model.training)
    checked = _checked.setdefault(model, set())
    due = mode not in checked
    towers = _Towers(forward, backend, micro_batches, scale, device, is_checked=due)

    def check_and_compute_loss(embeddings: Embeddings) -> LossOutput:
        check_alike(
            embeddings.image,
            embeddings.text,
            embeddings.scale,
            embeddings.bias,
            embeddings.group_id,
            group,
            teacher,
        )
        if num_samples is not None and len(embeddings.image) != num_samples:
            raise ValueError(
                f"forward returned {len(embeddings.image)} rows for {micro_batches} micro-batches of "
                f"{num_samples // micro_batches} samples; each call must return one row per sample "
                f"of its micro-batch. How a batch is divided: {DIVIDES}"
            )
        out = loss(replace(embeddings, teacher=teacher))
        if due:
            warn_of_unusual(embeddings.image, embeddings.text, embeddings.scale)
            warn_of_unaveraged(model)
        return out

    before = Snapshot(model, device)
    try:
        features = forward_all(towers, parts, micro_batches)
        after = Snapshot(model, device)
        if due and micro_batches > 1:
            before.warn_of_changed_buffers(model)
        out, leaves = loss_at_features(check_and_compute_loss, features)
        is_updated = backend.run(surrogates(towers, parts, features, leaves))
    except FloatingPointError:  # nothing may be updated, including BatchNorm's statistics
        before.restore()
        raise
    (after if is_updated else before).restore()
    checked.add(mode)
    # If a loss scaler skips the update, the state of the loss must not change either.
    if is_updated:
        loss.commit()
    return out


_checked: WeakKeyDictionary[Any, set[tuple[int, bool]]] = WeakKeyDictionary()
"""Maps a model to the modes (number of micro-batches, model.training) in which it has completed a step.

Some checks are expensive, so they run only until the first step of each mode has succeeded.
"""


def find_device(model: torch.nn.Module) -> torch.device:
    """Return the accelerator that the parameters are on, or this process's device if they are all on the CPU."""
    found = (p.device for p in model.parameters() if p.device.type != "cpu")
    return next(found, comm.local_device())


def refuse_batch_statistics(model: torch.nn.Module) -> None:
    """Refuse normalization layers that update running statistics. A second forward would update them again.

    Raises:
        ValueError: If there is such a layer.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, _NormBase) and layer.training and layer.track_running_stats:
            raise ValueError(
                f"{name} is a {type(layer).__name__}. With several micro-batches, its statistics would be "
                "updated twice per step, and the gradient would depend on how the batch is split. Call .eval() on that "
                "layer, or use one micro-batch."
            )


def warn_of_unaveraged(model: Any) -> None:
    """On rank 0, warn if neither DeepSpeed nor DDP nor FSDP2 averages the gradients of the model over ranks."""
    averages = hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync")
    if not averages and comm.size() > 1 and comm.rank() == 0:
        warnings.warn(
            "the gradients of a plain module are not averaged over ranks. Unless the loop averages them "
            "itself, pass the DistributedDataParallel module or FSDP2's root module (call fully_shard "
            "on submodules first, then on the whole model)",
            stacklevel=2,
        )


def _split_on_all_ranks(
    batch: Any, count: int, device: torch.device | None
) -> tuple[list[Any], int | None]:
    """Split the batch into `count` parts with micro_batches.split. Collective if count > 1.

    If the split fails on any rank, or if `count` differs between ranks, every rank raises ValueError. Otherwise, ranks
    without an error would wait for the others in the next collective. But if only some ranks have a count of 1, the
    difference is not detected.

    Returns:
        The parts, and the number of samples. If count is 1, the batch is not split, and the number is None.
    """
    if count == 1:
        return [batch], None
    done: tuple[list[Any], int] | None = None
    problem = ValueError(
        f"the batch of another rank cannot be divided evenly into {count} micro-batches"
    )
    try:
        done = split(batch, count)
    except ValueError as error:
        problem = error
    mine = torch.tensor([float(done is None), count, -count], device=device)
    failed, most, fewest = comm.all_reduce_max(mine).tolist()
    if most != -fewest:
        raise ValueError(f"micro_batches differs between ranks, from {-fewest:g} to {most:g}")
    if done is None or failed:
        raise problem
    return done


@dataclass
class _Towers:
    """Runs the user's forward on a micro-batch, and again to backpropagate (implements grad_accum.Towers)."""

    forward: ForwardFunction
    backend: _Engine | _Plain
    num_micro_batches: int
    scale: float | None
    device: torch.device | None
    is_checked: bool
    """Whether to compare the features of the two forwards that are run on a micro-batch."""

    def __call__(self, batch: Any, keep_graph: bool) -> MicroFeatures:
        rng = Rng(self.device)
        last = self.num_micro_batches == 1
        # Before torch 2.11, a surrounding autocast would reuse weights that it has cast without a graph.
        torch.clear_autocast_cache()
        with torch.set_grad_enabled(keep_graph), self.backend.synchronized(last):
            features = self._run_forward(batch["batch"])
        return MicroFeatures(features, batch["index"], rng, batch["group_id"])

    def again(self, batch: Any, first: MicroFeatures) -> MicroFeatures:
        first.rng.restore()
        torch.clear_autocast_cache()
        features = self._run_forward(batch["batch"])
        if self.is_checked:
            self._refuse_different(features, first.features)
        return MicroFeatures(features, batch["index"], first.rng)

    def _run_forward(self, batch: Any) -> Features:
        found = self.forward(batch)
        if not isinstance(found, tuple | list):
            raise ValueError(f"forward returned a {type(found).__name__}; {EXPECTED}")
        if not 2 <= len(found) <= 4:
            raise ValueError(f"forward returned {len(found)} values; {EXPECTED}")
        image, text = found[:2]
        scale, bias = [*found[2:], None, None][:2]
        if scale is None:
            if self.scale is None:
                raise ValueError(
                    "forward returned no scale, and contrastive_step was called without a scale: return "
                    "exp(logit_scale) as the third value of forward, or pass a scale to contrastive_step, "
                    "for example scale=20.0"
                )
            scale = torch.tensor([self.scale], device=image.device)
        bias = None if bias is None else bias.reshape(1).float()
        return image, text, scale.reshape(1).float(), bias

    def _refuse_different(self, again: Features, first: Features) -> None:
        """Raise ValueError on every rank if a repeated forward returned different features. Collective."""
        distances = []
        for new, old in zip(again[:2], first[:2], strict=True):
            lengths = torch.linalg.vector_norm(old.float(), dim=-1)
            differences = torch.linalg.vector_norm(new.detach().float() - old.float(), dim=-1)
            distances.append((differences / lengths.clamp_min(1e-12)).max())
        worst = comm.all_reduce_max(torch.stack(distances).max()).item()
        if not worst <= REPEAT_TOLERANCE:
            raise ValueError(
                "forward returned different features for the same micro-batch the second time (relative "
                f"distance {worst:.2f}): either it draws random numbers from a generator other than torch's, or "
                "its result depends on earlier batches"
            )


class _Engine:
    """Backend for DeepSpeed, which needs an engine.backward and an engine.step for each micro-batch.

    Only the last engine.step of a training step updates the parameters.
    """

    def __init__(self, engine: DeepSpeedEngine, micro_batches: int):
        self.engine = engine
        steps = engine.gradient_accumulation_steps()
        if steps != micro_batches:
            raise ValueError(
                f"micro_batches is {micro_batches}, but the engine's gradient_accumulation_steps is "
                f"{steps}; they must be equal"
            )
        if engine.micro_steps % steps:
            raise ValueError(
                f"the engine is in the middle of a step ({engine.micro_steps % steps} of {steps} "
                "micro-batches), so gradients of earlier micro-batches would be added to those of this step"
            )
        check_gradient(engine._config._param_dict)
        widen_bucket(engine)

    def synchronized(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, surrogates: Iterator[Tensor]) -> bool:
        """Backpropagate the surrogate losses and update the parameters. Return True if the update was applied."""
        update = backward_and_step(self.engine, surrogates)
        if update.result == "not finite":
            raise FloatingPointError(f"step {self.engine.global_steps}: {NOT_FINITE}")
        return update.result == "applied"


@dataclass
class _Plain:
    """Backend for DDP, FSDP2 and plain modules, which accumulate gradients over the micro-batches.

    DDP and FSDP2 average the gradients over ranks in the last backward of a training step.
    """

    model: Any
    num_micro_batches: int
    backward: Callable[[Tensor], None]
    reports_skips: bool
    """Whether `run` checks if torch's GradScaler will skip the update."""

    def __post_init__(self) -> None:
        if self.num_micro_batches > 1 and getattr(self.model, "static_graph", False):
            raise ValueError(
                "DistributedDataParallel(static_graph=True) supports only one micro-batch: leave out "
                "static_graph, or pass micro_batches=1"
            )

    @contextmanager
    def synchronized(self, last: bool) -> Iterator[None]:
        """In this block, let DDP or FSDP2 average gradients over ranks only if `last` is True."""
        if hasattr(self.model, "set_requires_gradient_sync"):  # FSDP2
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
        is_ddp = hasattr(self.model, "no_sync")
        with self.model.no_sync() if is_ddp and not last else nullcontext():
            yield

    def run(self, surrogates: Iterator[Tensor]) -> bool:
        """Backpropagate the surrogate losses.

        Returns:
            False if torch's GradScaler will skip the update because the gradient is not finite. This is
            checked only for losses with state; for other losses the result is always True.
        """
        for k in range(1, self.num_micro_batches + 1):
            with self.synchronized(last=k == self.num_micro_batches):
                self.backward(next(surrogates))
        return not self.reports_skips or self._is_gradient_finite()

    def _is_gradient_finite(self) -> bool:
        """Return whether the gradient is finite on all ranks. Collective."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        # FSDP2's gradients are DTensors. This rank's part of a DTensor may have no rows.
        parts = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in gradients]
        parts = [part for part in parts if part.numel()]
        largest = torch.nn.utils.get_total_norm(parts, norm_type=torch.inf)
        # If this rank has no rows at all, `largest` is on the CPU.
        return not comm.largest_of({"not_finite": ~torch.isfinite(largest)})["not_finite"]
