"""All patches of DeepSpeed's internals.

The docstring of each public patch states why the patch is needed, and for which DeepSpeed version it was
written. When DeepSpeed is upgraded, check every function again.
"""

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine as Engine
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param
from torch import Tensor, nn

_CACHED = "_PartitionedParameterCoordinator__params_to_release"
"""Mangled name of the method whose cache `release` clears."""
logger = logging.getLogger(__name__)
# DeepSpeed 0.19 calls collectives by names that torch 2.14 deprecates. Users cannot do anything about this warning.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def disable_custom_ops() -> None:
    """Keep DeepSpeed 0.19 from checking and compiling its custom operations, which this package does not use.

    When DeepSpeed loads one custom operation, it checks the build requirements of all custom operations,
    which runs nvcc on a GPU machine. One custom operation implements collectives for CPUs in shared memory.
    It needs a compiler, does not free its memory in /dev/shm, and waits without a timeout.
    """
    deepspeed.ops.__compatible_ops__ = {}


def reset_autocast() -> None:
    """Reset the autocast precision that an earlier engine in this process has set.

    DeepSpeed 0.19 stores this precision in a global variable. Without the reset, a second engine would
    reduce gradients in the precision of the first engine.
    """
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False


def release(engine: Engine) -> None:
    """Remove references that keep the memory of an unused engine allocated.

    At ZeRO 3, DeepSpeed 0.19 keeps the model in a global list, and the partitions in the cache of a method.
    """
    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    # A decorator hides the cached method in its closure.
    cached = getattr(PartitionedParameterCoordinator, _CACHED)
    inspect.getclosurevars(cached).nonlocals["func"].cache_clear()


def silence_monitor(engine: Engine) -> None:
    """Keep the engine from logging values at every step. DeepSpeed 0.19 has no setting for this.

    The trainer logs by calling the monitors' write_events, which still works.
    """
    engine.monitor.enabled = False


def allow_overflow_at_min_scale(engine: Engine) -> None:
    """Keep the fp16 loss scaler of DeepSpeed 0.19 from raising an error in the middle of engine.step().

    The scaler raises this error when a gradient overflows at the lowest loss scale. Instead, after
    engine.step(), backward_and_step restores the state from before the step and raises an error.
    """
    if engine.fp16_enabled():
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False


def widen_bucket(engine: Engine) -> None:
    """Raise reduce_bucket_size to the size of the largest parameter, for ZeRO 2 with overlap_comm.

    If a gradient does not fit into the bucket, DeepSpeed 0.19 reduces it in place. With overlap_comm, ZeRO 2
    frees this gradient while the reduction, which runs on another stream, still uses it.
    """
    if engine.zero_optimization_stage() != 2 or not engine.optimizer.overlap_comm:
        return
    size = engine.optimizer.reduce_bucket_size
    largest = max(p.numel() for p in engine.module.parameters() if p.requires_grad)
    if largest <= size:
        return
    if engine.global_rank == 0:
        logger.warning(
            f"reduce_bucket_size is raised from {size} to {largest}, the size of the largest parameter: at ZeRO 2 with "
            "overlap_comm DeepSpeed would free its gradient too early"
        )
    engine.optimizer.reduce_bucket_size = largest


@torch.no_grad()
def clear_padding(engine: Engine) -> None:
    """Set to zero the padding that ZeRO 3 adds so that each parameter can be divided evenly among the ranks.

    DeepSpeed 0.19 leaves the padding uninitialized. It does not affect training, but it is saved in
    checkpoints, so the checkpoints of identical runs would differ.
    """
    if engine.zero_optimization_stage() != 3:
        return
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            continue
        part = safe_get_local_fp32_param(parameter)
        used = max(parameter.ds_numel - engine.global_rank * part.numel(), 0)
        if used < part.numel():
            part[used:] = 0
            safe_set_local_fp32_param(parameter, part)
            parameter.ds_tensor.data[used:] = 0


def fuse_update(engine: Engine, all_reduce: Callable[[Tensor], Tensor]) -> None:
    """Make the end of a step faster by processing many parameters in one operation.

    DeepSpeed 0.19 processes one parameter at a time. For ViT-B/32 at ZeRO 1, this takes 1,344 operations, and the GPU
    idles while the host issues them (tools/lab_notes.md). The results are the same up to rounding.

    Args:
        engine: The engine. At ZeRO 3, nothing is changed.
        all_reduce: Returns the sum of a tensor over ranks.
    """
    stage = engine.zero_optimization_stage()
    if stage == 0:
        _copy_together(engine)
    if stage in (1, 2) and not engine.optimizer.cpu_offload:
        _take_norm_together(engine.optimizer, all_reduce)
        # This method points each parameter to its part of the flat weights, to which it has pointed since the start.
        engine.optimizer._update_model_bit16_weights = lambda group: None
    if stage == 1 and not engine.optimizer.contiguous_gradients:
        _reduce_without_copies(engine.optimizer)


def _copy_together(engine: Engine) -> None:
    """At ZeRO 0, copy all gradients of a reduced bucket back in one operation."""

    def reduce(bucket: list[Tensor], group: Any, size: int | None = None) -> None:
        flat = engine.allreduce_bucket(bucket, group, size)
        torch._foreach_copy_(bucket, engine.unflatten(flat, bucket))

    engine.allreduce_and_copy = reduce


def clip_by(engine: Engine, trained: list[nn.Parameter], norm: Tensor) -> None:
    """Pass the known norm of the gradients to the clipping in the next engine.step(), at ZeRO 0 in fp32.

    DeepSpeed 0.19 would compute the norm again, and would clip the gradient of each parameter separately.
    """
    engine.clip_fp32_gradients = lambda: torch.nn.utils.clip_grads_with_norm_(
        trained, engine.gradient_clipping(), norm
    )


def forget_clipping(engine: Engine) -> None:
    """Undo clip_by, which holds for one step only."""
    vars(engine).pop("clip_fp32_gradients", None)


def _take_norm_together(zero: Any, all_reduce: Callable[[Tensor], Tensor]) -> None:
    """At ZeRO 1 and 2, compute the gradient norm of all groups with one collective.

    The norm is infinite if a gradient is not finite. The optimizer takes that as an overflow, so a separate check for
    overflow is not needed.
    """

    @torch.no_grad()
    def compute_norm() -> Tensor:
        squares = []
        for number, group in zero.averaged_gradients.items():
            # Leave out the padding at the end, unless this rank has nothing but padding.
            parts = group[: max(len(zero.params_in_partition[number]), 1)]
            squares.append(torch.stack(torch._foreach_norm(parts, 2, torch.float64)).square().sum())
        # Round the norm of each group like DeepSpeed, so that the clipped gradients have the same bits.
        norms = all_reduce(torch.stack(squares).float()).sqrt()
        norm = torch.linalg.vector_norm(norms).nan_to_num(nan=math.inf, posinf=math.inf)
        # This is the host's only wait. If the norm stayed on the device, DeepSpeed would wait once for each group.
        return norm.cpu()

    zero.scaled_global_norm = compute_norm
    zero.check_overflow = lambda partition_gradients: None


def _reduce_without_copies(zero: Any) -> None:
    """At ZeRO 1 without contiguous_gradients, make gradients views of the reduced bucket instead of copying it back."""

    def reduce(bucket: list[Tensor], comm_dtype: torch.dtype, **options: Any) -> None:
        flat = zero.allreduce_bucket(
            bucket, comm_dtype, divide=options["divide"], process_group=options["process_group"]
        )
        flat = flat.to(bucket[0].dtype)
        for gradient, part in zip(bucket, zero.unflatten(flat, bucket), strict=True):
            gradient.data = part

    zero.allreduce_and_copy = reduce


def forget_gradients(engine: Engine) -> None:
    """Set ZeRO 3's gradient buffer to zero. Call this before the first backward of a step.

    In DeepSpeed 0.19, the buffer still contains the previous step's gradient, which is overwritten only for parameters
    that the first micro-batch uses. The other parameters, such as a layer that LayerDrop has skipped, would get the old
    gradient again.
    """
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.grad_partitions_flat_buffer.zero_()


def forget_trace(engine: Engine) -> None:
    """Make ZeRO 3 record the execution order of the modules again. Call this after a forward without a backward.

    Otherwise, the next forward in DeepSpeed 0.19 could end in a "tracing error". This happens if a module uses
    parameters of its children without calling them, like the attention pool of open_clip's ResNets.
    """
    if engine.zero_optimization_stage() == 3:
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()


def refresh_weights(engine: Engine) -> None:
    """Update the model's weights after the optimizer's fp32 copies have been set. Collective.

    DeepSpeed 0.19 does this only inside engine.step().
    """
    zero, level = engine.optimizer, engine.zero_optimization_stage()
    if level in (1, 2):
        zero.update_lp_params()
    if level == 3:
        zero._partition_all_parameters()
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        # Small parameters stay gathered on every rank.
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        zero.invalidate_secondary_tensor()


@contextmanager
def norm_refused_by(engine: Engine, refuses: Callable[[Tensor], bool]) -> Iterator[None]:
    """In this block, make engine.step() skip the update if `refuses` returns True for the gradient norm.

    DeepSpeed 0.19 computes the norm inside engine.step() and has no hook to check it, but it skips the
    update if the norm is not finite. So this patch reports an infinite norm if `refuses` returns True.

    Args:
        engine: An engine at ZeRO 1, 2 or 3.
        refuses: Called with the norm of the gradient (0-d) before clipping. The loss scale is divided out.
    """
    optimizer = engine.optimizer
    in_groups = engine.zero_optimization_stage() == 3
    name = "_get_norm_groups" if in_groups else "scaled_global_norm"
    compute = getattr(optimizer, name)

    def compute_and_check() -> Any:
        scaled = compute()
        norm = combine_grad_norm_groups(scaled) if in_groups else scaled
        if not refuses(norm / optimizer.loss_scale):
            return scaled
        return [math.inf] if in_groups else math.inf

    setattr(optimizer, name, compute_and_check)
    try:
        yield
    finally:
        setattr(optimizer, name, compute)


def collect_checkpoint(engine: Engine, folder: Path, tag: str) -> dict[Path, Any]:
    """Return the states that engine.save_checkpoint would write on this rank, keyed by file path. Collective.

    This function writes nothing. If a write failed inside engine.save_checkpoint of DeepSpeed 0.19, the
    other ranks would wait forever in one of its barriers.
    """
    states: dict[Path, Any] = {}
    collector = TorchCheckpointEngine()
    collector.save = lambda state_dict, path: states.update({Path(path): state_dict})
    collector.makedirs = lambda path, exist_ok: None  # the thread that writes the files does this
    writer, engine.checkpoint_engine = engine.checkpoint_engine, collector
    engine._copy_recovery_script = lambda folder: None
    try:
        # save_latest=False, because DeepSpeed's file `latest` would name a folder that is not complete yet.
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    finally:
        engine.checkpoint_engine = writer
        del engine._copy_recovery_script
    return states
