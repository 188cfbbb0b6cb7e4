"""The DeepSpeed engine of a run: optimizer, schedule, precision, and what ZeRO hides (norm, logit-scale clamp).

The only caller of deepspeed.initialize. Optimizers are the client's (torch, timm), so nothing is compiled, and the
learning rate is set by hand before every step, so the schedule is a pure function of the step.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine as Engine
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param
from timm.optim import Lamb, Lion
from torch import Tensor, nn

from disco_ds.config import OptimSettings
from disco_ds.distributed import comm
from disco_ds.models.param_groups import parameter_groups
from disco_ds.training.disk import install_writer

logger = logging.getLogger(__name__)


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
    # Of the engine's own points only: they would repeat ours, at every step. write_events goes on working.
    engine.monitor.enabled = False
    install_writer(engine)
    if engine.fp16_enabled():
        # On overflow at the lowest scale it would raise in the middle of the step; backward_and_step raises after it.
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
    if engine.zero_optimization_stage() == 3:
        _clear_padding(engine)
    return engine


def _widen_bucket(model: nn.Module, ds_config: dict[str, Any]) -> dict[str, Any]:
    """Make the bucket of gradients hold the largest parameter where ZeRO 2 reduces beside the backward.

    DeepSpeed 0.19 reduces a larger one in place, and ZeRO 2 frees it while the reduction's stream still uses it.
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
    """Zero what ZeRO 3 pads a parameter with to divide it by the ranks.

    It is whatever the memory held; no step reads it, but checkpoints would differ from run to run.
    """
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            mine = safe_get_local_fp32_param(parameter)
            used = max(parameter.ds_numel - comm.rank() * mine.numel(), 0)
            if used < mine.numel():
                safe_set_local_fp32_param(parameter, torch.cat([mine[:used], torch.zeros_like(mine[used:])]))
                parameter.ds_tensor.data[used:] = 0


def build_optimizer(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    """A client optimizer, fused where torch has it, on the CPU too; its lr is a placeholder until set_lr."""
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    if settings.name == "lion":
        return Lion(groups, lr=1.0, betas=settings.betas)
    if settings.name == "lamb":
        # Clipping is the engine's.
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


def set_lr(engine: Engine, lr: float, tau_lr: float | None = None) -> None:
    """tau_lr: of the logit scale, if it has one of its own."""
    for group in engine.optimizer.param_groups:
        group["lr"] = tau_lr if tau_lr is not None and group["name"] == "scale" else lr * group["lr_factor"]


def set_rates(engine: Engine, lr: float, settings: OptimSettings, scale: Tensor) -> None:
    """Learning rates of the next update: `lr`, and the logit scale's own, if it has one, while exp of it is `scale`."""
    set_lr(engine, lr, temperature_lr(scale, settings))


def temperature_lr(scale: Tensor, settings: OptimSettings) -> float | None:
    """Of the logit scale while exp of it is `scale`, [1]; None for that of everything else."""
    if settings.tau_lr is None:
        return None
    return settings.tau_lr / 3 if settings.tau_slow * scale.item() >= 1 else settings.tau_lr


def backward_and_step(engine: Engine, surrogates: Any) -> Tensor | None:
    """engine.backward and engine.step for each micro-batch's surrogate loss: the way that is exact at ZeRO 0-3.

    Args:    surrogates: iterable of 0-d tensors, one per micro-batch, each built when asked for; their number is the
             engine's gradient_accumulation_steps.
    Returns: the global gradient norm before clipping, 0-d, or None where a loss scaler skipped the step.
    Raises:  FloatingPointError on every rank alike for a gradient that is not finite, unless a loss scaler has skipped
             it and can still go lower. Weights, optimizer, scaler and counts are then as if the step had not been.
    """
    norm, finite = None, True
    before = engine.global_steps, engine.global_samples, engine.skipped_steps
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    scaling = dict(vars(scaler)) if scaler is not None else {}
    for surrogate in surrogates:
        engine.backward(surrogate, scale_wrt_gas=False)
        if engine.is_gradient_accumulation_boundary() and engine.zero_optimization_stage() == 0:
            # At ZeRO 0 DeepSpeed neither reports the norm nor refuses a NaN. The gradients are reduced by now.
            gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            finite = bool(torch.isfinite(norm))
            if not finite:
                engine.zero_grad()  # to None: the optimizer passes over each parameter
        engine.step()
    if finite and engine.was_step_applied():
        value = engine.get_global_grad_norm() if norm is None else norm
        return None if value is None else torch.as_tensor(value, dtype=torch.float32)
    if scaling.get("dynamic") and scaling["cur_scale"] > scaling["min_scale"]:
        return None
    engine.global_steps, engine.global_samples, engine.skipped_steps = before
    if scaler is not None:
        vars(scaler).update(scaling)
    raise FloatingPointError(f"step {engine.global_steps}: the gradient is not finite; nothing was updated")


@torch.no_grad()
def clamp_scale(engine: Engine, max_scale: float) -> None:
    """Hold logit_scale at or below ln(max_scale), in the master copy too: the next step would bring the old value back.

    No communication and no device synchronisation: whoever owns the master copy clamps it.
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
