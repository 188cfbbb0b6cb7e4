"""The DeepSpeed engine of a run: optimizer, schedule, precision, and what ZeRO hides (norm, logit-scale clamp).

The only caller of deepspeed.initialize. The optimizers are torch's and timm's, so DeepSpeed compiles nothing. The
learning rate is set before every update, so the schedule is a pure function of the step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine as Engine
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param
from timm.optim import Lamb, Lion
from torch import Tensor, nn

from disco_ds.config import OptimSettings
from disco_ds.distributed import comm
from disco_ds.models.param_groups import parameter_groups
from disco_ds.training.disk import install_writer

logger = logging.getLogger(__name__)


class SpikeError(Exception):
    """A batch is to be skipped for a spike. Raised on every rank alike, with nothing changed."""


def build_engine(model: nn.Module, settings: OptimSettings, ds_config: dict[str, Any]) -> Engine:
    """Wrap the model. Collective: every rank must call.

    Args: ds_config: rendered by config.render_ds_config, so complete and free of combinations DeepSpeed gets wrong.
    """
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # Global to the process in DeepSpeed 0.19: a second engine would reduce in the first one's autocast precision.
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    model.to(comm.local_device())
    ds_config = _widen_bucket(model, ds_config)
    optimizer = build_optimizer(parameter_groups(model, settings), settings)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config, dist_init_required=False)
    # Switches off the engine's own points, which would repeat ours at every step; write_events still works.
    engine.monitor.enabled = False
    install_writer(engine)
    if engine.fp16_enabled():
        # Else an overflow at the lowest scale would raise in the middle of the step; backward_and_step raises after it.
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
    if engine.zero_optimization_stage() == 3:
        _clear_padding(engine)
    return engine


def _widen_bucket(model: nn.Module, ds_config: dict[str, Any]) -> dict[str, Any]:
    """Make the gradient bucket hold the largest parameter where ZeRO 2 reduces gradients during the backward.

    DeepSpeed 0.19 reduces a larger gradient in place, and ZeRO 2 frees it while the reduction's stream still uses it.
    """
    zero = DeepSpeedZeroConfig(**ds_config["zero_optimization"])
    largest = max(p.numel() for p in model.parameters() if p.requires_grad)
    if zero.stage != 2 or not zero.overlap_comm or largest <= zero.reduce_bucket_size:
        return ds_config
    if comm.rank() == 0:
        logger.warning(
            "reduce_bucket_size is raised from %d to %d, the largest parameter: at ZeRO 2 with overlap_comm DeepSpeed "
            "would free its gradient too early",
            zero.reduce_bucket_size,
            largest,
        )
    return ds_config | {"zero_optimization": ds_config["zero_optimization"] | {"reduce_bucket_size": largest}}


@torch.no_grad()
def _clear_padding(engine: Engine) -> None:
    """Zero the padding with which ZeRO 3 makes a parameter divisible by the number of ranks.

    The padding is uninitialised memory: no step reads it, but checkpoints would differ from run to run.
    """
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            mine = safe_get_local_fp32_param(parameter)
            used = max(parameter.ds_numel - comm.rank() * mine.numel(), 0)
            if used < mine.numel():
                safe_set_local_fp32_param(parameter, torch.cat([mine[:used], torch.zeros_like(mine[used:])]))
                parameter.ds_tensor.data[used:] = 0


def build_optimizer(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    """The optimizer of `settings`, fused where torch can, on the CPU too. Its lr is a placeholder until set_rates."""
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    if settings.name == "lion":
        return Lion(groups, lr=1.0, betas=settings.betas)
    if settings.name == "lamb":
        # The engine clips the gradient, so LAMB does not.
        return Lamb(groups, lr=1.0, betas=settings.betas, eps=settings.eps, max_grad_norm=None)
    return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, fused=True)


def learning_rate(step: int, num_steps: int, peak: float, settings: OptimSettings) -> float:
    """Learning rate of a step, counted from 0: linear warm-up to `peak`, then as settings.schedule says."""
    warmup, low = settings.warmup_steps, settings.lr_min
    if step < warmup:
        return peak * (step + 1) / warmup
    if settings.schedule == "cosine":
        progress = (step - warmup) / max(num_steps - warmup, 1)
        return low + (peak - low) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    left = num_steps - step
    if settings.schedule == "cooldown" and left < settings.cooldown_steps:
        return low + (peak - low) * left / settings.cooldown_steps
    return peak


def set_rates(engine: Engine, lr: float, settings: OptimSettings, scale: Tensor) -> None:
    """Set the learning rates of the next update, that of the logit scale by optim.tau_lr if it is given.

    Args: scale [1]: exp(logit_scale), from which on tau_lr may be divided by 3 (optim.tau_slow).
    """
    set_lr(engine, lr, temperature_lr(scale, settings))


def set_lr(engine: Engine, lr: float, tau_lr: float | None = None) -> None:
    """Set the learning rate of each group to `lr` x its factor, that of the logit scale to `tau_lr` if given."""
    for group in engine.optimizer.param_groups:
        group["lr"] = tau_lr if tau_lr is not None and group["name"] == "scale" else lr * group["lr_factor"]


def temperature_lr(scale: Tensor, settings: OptimSettings) -> float | None:
    """Learning rate of the logit scale while exp(logit_scale) is `scale`, [1]; None: that of everything else."""
    if settings.tau_lr is None:
        return None
    return settings.tau_lr / 3 if settings.tau_slow * scale.item() >= 1 else settings.tau_lr


def watch_norm(engine: Engine, refuses: Callable[[int, Tensor], bool]) -> None:
    """Call `refuses` with the step and its gradient norm, 0-d, before each update; True leaves the update out.

    DeepSpeed computes the norm inside engine.step(), and drops a gradient whose norm is not finite: at ZeRO 1 to 3 it
    gets such a norm for one that is refused.
    """

    def check(norm: Tensor) -> bool:
        engine.norm_refused = refuses(engine.global_steps + 1, norm)
        return engine.norm_refused

    engine.check_norm = check
    if engine.zero_optimization_stage() == 0:
        return  # backward_and_step computes the norm itself
    optimizer, in_groups = engine.optimizer, engine.zero_optimization_stage() == 3
    name = "_get_norm_groups" if in_groups else "scaled_global_norm"
    compute = getattr(optimizer, name)

    def compute_and_check() -> Any:
        scaled = compute()
        norm = combine_grad_norm_groups(scaled) if in_groups else scaled
        refused = check(norm / optimizer.loss_scale)
        return scaled if not refused else [math.inf] if in_groups else math.inf

    setattr(optimizer, name, compute_and_check)


def backward_and_step(engine: Engine, surrogates: Any) -> Tensor | None:
    """Call engine.backward and engine.step for each micro-batch's surrogate loss, which is exact at ZeRO 0 to 3.

    Args:    surrogates: iterable of 0-d tensors, one per micro-batch, each built when it is its turn; their number is
             the engine's gradient_accumulation_steps.
    Returns: the global gradient norm before clipping, 0-d, or None where a loss scaler skipped the step.
    Raises:  FloatingPointError on every rank alike for a gradient that is not finite, unless a loss scaler has skipped
             it and can still lower its scale; SpikeError where watch_norm's function refuses the gradient. Weights,
             optimizer, scaler and counters are then as before the step.
    """
    engine.norm_refused = False
    norm, finite = None, True
    before = engine.global_steps, engine.global_samples, engine.skipped_steps
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    scaling = dict(vars(scaler)) if scaler is not None else {}
    for surrogate in surrogates:
        engine.backward(surrogate, scale_wrt_gas=False)
        if engine.is_gradient_accumulation_boundary() and engine.zero_optimization_stage() == 0:
            # At ZeRO 0 DeepSpeed neither reports the norm nor refuses a NaN. The gradients are already reduced here.
            gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            finite = bool(torch.isfinite(norm))
            if not finite or (hasattr(engine, "check_norm") and engine.check_norm(norm)):
                engine.zero_grad()  # sets gradients to None, so that the optimizer skips every parameter
        engine.step()
    refused = engine.norm_refused
    if finite and engine.was_step_applied() and not refused:
        value = engine.get_global_grad_norm() if norm is None else norm
        return None if value is None else torch.as_tensor(value, dtype=torch.float32)
    if not refused and scaling.get("dynamic") and scaling["cur_scale"] > scaling["min_scale"]:
        return None
    engine.global_steps, engine.global_samples, engine.skipped_steps = before
    if scaler is not None:
        vars(scaler).update(scaling)
    if refused:
        raise SpikeError
    raise FloatingPointError(f"step {engine.global_steps}: the gradient is not finite; nothing was updated")


@torch.no_grad()
def clamp_scale(engine: Engine, max_scale: float) -> None:
    """Clamp logit_scale to ln(max_scale), in the master copy too, from which the next step would restore the old value.

    Each rank clamps what it owns, without communication or synchronisation with the device.
    """
    parameter = engine.module.logit_scale
    if not parameter.requires_grad:
        return
    limit = math.log(max_scale)
    if hasattr(parameter, "ds_id"):  # ZeRO 3: every rank holds a padded part
        safe_set_local_fp32_param(parameter, safe_get_local_fp32_param(parameter).clamp(max=limit))
        parameter.ds_tensor.data.clamp_(max=limit)
        if parameter.numel():  # small parameters stay gathered
            parameter.data.clamp_(max=limit)
        return
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:  # ZeRO 1-2: this rank owns (a part of) the fp32 copy
        mapping.get_hp_fragment().clamp_(max=limit)
    parameter.data.clamp_(max=limit)
