"""contrastive_step: compute the gradient of the global batch in a custom loop, under DeepSpeed, DDP or FSDP2.

docs/custom_loop.md shows how to use it. The algorithm is in grad_accum.py. The trainer in this package
uses the same algorithm through step.py.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from disco_ds.config.ds_config import check_gradient
from disco_ds.distributed import comm, deepspeed_quirks
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

ForwardFunction = Callable[[Any], tuple[Tensor, ...]]
REPEAT_TOLERANCE = 0.05
"""Maximum of |again - first| / |first|. With 16-bit kernels, values of 0.01 occur.

The forward of a micro-batch runs twice. `first` is a feature row from the first run, and `again` is the same row from
the second.
"""
DIVIDES = "a batch is a tensor [b, ...], which is divided along its first dimension, or a dict, tuple or list of them"


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
        batch: This rank's b samples: a tensor [b, ...], or a mapping, tuple or list of such tensors, which may be
            nested. With micro_batches=1, the batch is not split and may be anything.
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
    is_engine = isinstance(model, DeepSpeedEngine)
    if is_engine:
        _check_engine(model, micro_batches)
    elif micro_batches > 1 and getattr(model, "static_graph", False):
        raise ValueError(
            "DistributedDataParallel(static_graph=True) supports only one micro-batch: leave out static_graph, or "
            "pass micro_batches=1"
        )
    if micro_batches > 1:
        refuse_batch_statistics(model)
    device = None if micro_batches == 1 else find_device(model)
    parts, num_samples = _split_on_all_ranks(
        {"batch": batch, "index": index, "group_id": group_id}, micro_batches
    )
    group = getattr(loss, "group", None)
    mode = (micro_batches, model.training)
    checked = _checked.setdefault(model, set())
    due = mode not in checked
    towers = _Towers(forward, model, micro_batches, scale, device, is_checked=due)

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
        losses = surrogates(towers, parts, features, leaves)
        if is_engine:
            update = backward_and_step(model, losses)
            if update.result == "not finite":
                raise FloatingPointError(f"step {model.global_steps}: {NOT_FINITE}")
            is_updated = update.result == "applied"
        else:
            for k in range(micro_batches):
                with _synchronized(model, last=k == micro_batches - 1):
                    backward(next(losses))
            has_state = type(loss).commit is not Loss.commit
            is_updated = not has_state or _is_gradient_finite(model)
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
    devices = {p.device for p in model.parameters()} - {torch.device("cpu")}
    return devices.pop() if devices else comm.local_device()


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


def _check_engine(engine: DeepSpeedEngine, micro_batches: int) -> None:
    """Refuse an engine that would apply another gradient.

    Raises:
        ValueError: If the number of micro-batches, an unfinished step or the ds_config would change the gradient.
    """
    steps = engine.gradient_accumulation_steps()
    if steps != micro_batches:
        raise ValueError(
            f"micro_batches is {micro_batches}, but the engine's gradient_accumulation_steps is {steps}; they must be "
            "equal"
        )
    if engine.micro_steps % steps:
        raise ValueError(
            f"the engine is in the middle of a step ({engine.micro_steps % steps} of {steps} micro-batches), so "
            "gradients of earlier micro-batches would be added to those of this step"
        )
    check_gradient(engine._config._param_dict)
    deepspeed_quirks.widen_bucket(engine)


def split(batch: Any, count: int) -> tuple[list[Any], int]:
    """Split a batch into `count` parts of equal size. None is copied into every part.

    Returns:
        The parts, and b, the number of samples in the batch.

    Raises:
        ValueError: If the batch contains anything but tensors [b, ...] and None, or b is not a multiple of `count`.
    """
    # For torch, mappings of other classes, such as the outputs of transformers' tokenizers, are leaves.
    batch = tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else leaf, batch)
    leaves, structure = tree_flatten(batch)
    sizes = set()
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim():
            sizes.add(len(leaf))
        elif leaf is not None:
            raise ValueError(f"a {type(leaf).__name__} in the batch cannot be divided; {DIVIDES}")
    if len(sizes) != 1 or 0 in sizes or max(sizes) % count:
        raise ValueError(
            f"tensors with {sorted(sizes)} samples cannot be divided evenly into {count} micro-batches; {DIVIDES}"
        )
    columns = [[None] * count if leaf is None else leaf.chunk(count) for leaf in leaves]
    parts = [tree_unflatten(part, structure) for part in zip(*columns, strict=True)]
    return parts, sizes.pop()


def _split_on_all_ranks(batch: Any, count: int) -> tuple[list[Any], int | None]:
    """Split the batch into `count` parts. Collective if count > 1.

    If the split fails on any rank, or if `count` differs between ranks, every rank raises ValueError. Otherwise, ranks
    without an error would wait for the others in the next collective. But if only some ranks have a count of 1, the
    difference is not detected.

    Returns:
        The parts, and the number of samples. If count is 1, the batch is not split, and the number is None.
    """
    if count == 1:
        return [batch], None
    problem = ""
    parts: tuple[list[Any], int | None] = [], None
    try:
        parts = split(batch, count)
    except ValueError as error:
        problem = str(error)
    worst = comm.largest_of({"failed": bool(problem), "most": count, "minus_fewest": -count})
    if worst["most"] != -worst["minus_fewest"]:
        raise ValueError(
            f"micro_batches differs between ranks, from {-worst['minus_fewest']:g} to {worst['most']:g}"
        )
    if worst["failed"]:
        raise ValueError(problem or "the batch of another rank cannot be divided evenly")
    return parts


def _is_gradient_finite(model: Any) -> bool:
    """Return whether the gradient is finite on all ranks, so that torch's GradScaler will not skip it. Collective."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # FSDP2's gradients are DTensors. This rank's part of a DTensor may have no rows.
    parts = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in gradients]
    parts = [part for part in parts if part.numel()]
    largest = torch.nn.utils.get_total_norm(parts, norm_type=torch.inf)
    # If this rank has no rows at all, `largest` is on the CPU.
    return not comm.largest_of({"not_finite": ~torch.isfinite(largest)})["not_finite"]


@contextmanager
def _synchronized(model: Any, last: bool) -> Iterator[None]:
    """In this block, let DDP or FSDP2 average gradients over ranks only if `last` is True."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    is_ddp = hasattr(model, "no_sync") and not isinstance(model, DeepSpeedEngine)
    with model.no_sync() if is_ddp and not last else nullcontext():
        yield


@dataclass
class _Towers:
    """Runs the user's forward on a micro-batch, and again to backpropagate (implements grad_accum.Towers)."""

    forward: ForwardFunction
    model: Any
    num_micro_batches: int
    scale: float | None
    device: torch.device | None
    is_checked: bool
    """Whether to compare the features of the two forwards that are run on a micro-batch."""

    def __call__(self, batch: Any, keep_graph: bool) -> MicroFeatures:
        rng = Rng(self.device)
        last = self.num_micro_batches == 1
        with torch.set_grad_enabled(keep_graph), _synchronized(self.model, last):
            features = self._run_forward(batch["batch"])
        return MicroFeatures(features, rng, index=batch["index"], group_id=batch["group_id"])

    def again(self, batch: Any, first: MicroFeatures) -> Features:
        first.rng.restore()
        features = self._run_forward(batch["batch"])
        if self.is_checked:
            self._refuse_different(features, first.features)
        return features

    def _run_forward(self, batch: Any) -> Features:
        # Before torch 2.11, a surrounding autocast would reuse weights that it has cast without a graph.
        torch.clear_autocast_cache()
        outputs: Any = self.forward(batch)
        if not isinstance(outputs, tuple | list) or not 2 <= len(outputs) <= 4:
            raise ValueError(
                "forward must return a tuple: the features of both sides, then the scale and the bias, if there are "
                f"any; it returned a {type(outputs).__name__}"
            )
        image, text, scale, bias = (*outputs, None, None)[:4]
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
        new, old = (torch.cat(features[:2]).detach().float() for features in (again, first))
        distances = (new - old).norm(dim=-1) / old.norm(dim=-1).clamp_min(1e-12)
        worst = comm.all_reduce_max(distances.max()).item()
        if not worst <= REPEAT_TOLERANCE:
            raise ValueError(
                "forward returned different features for the same micro-batch the second time (relative "
                f"distance {worst:.2f}): either it draws random numbers from a generator other than torch's, or "
                "its result depends on earlier batches"
            )
