"""The DeepSpeed engine of a run: towers, learning rate, update, and the clamp of the logit scale.

No other file of this package calls deepspeed.initialize. The learning rate is computed and set before every update, so
no schedule state is stored. Patches of DeepSpeed are in distributed/deepspeed_quirks.py.
"""

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import deepspeed
import torch
from deepspeed import DeepSpeedEngine as Engine
from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param
from torch import Tensor, nn

from disco_ds.config import Config, OptimSettings, Tree
from disco_ds.data import MicroBatch, augment
from disco_ds.distributed import comm, deepspeed_quirks
from disco_ds.models.clip import Texts, trained_sides
from disco_ds.models.fast.replace import is_compiled
from disco_ds.models.param_groups import parameter_groups
from disco_ds.training.grad_accum import MicroFeatures, Rng
from disco_ds.training.optimizer import Muon, build_optimizer
from disco_ds.training.teacher import RunTeacher

NOT_FINITE = "the gradient is not finite; nothing was updated"
"""End of an error message."""
Prepare = Callable[[Any], tuple[Any, ...]]
"""Maps a micro-batch of m samples to inputs on the device: (image, text, index) or (image, text, index, group_id).

Image is [m, 3, height, width]. Text is Texts or a tensor of tokens, [m, tokens per text]. Index [m] contains the sample
ids, and group_id [m] the group ids. For a model with two views, the second view of each image takes the place of the
text. Repeated calls with the same micro-batch return the same values."""


def prepare(config: Config, batch: MicroBatch) -> tuple[Any, ...]:
    """Turn a micro-batch into the inputs of the towers: (image, text, sample ids).

    For a model with two views, the second view of each image takes the place of the text. With data.group_by, the group
    ids are a fourth element.

    The augmentation depends only on the samples' view keys, so repeated calls return equal inputs.
    """
    view = partial(augment, batch["image"], batch["view_key"], config.data.augment)
    text = Texts(batch["text"], batch.get("lengths"))
    inputs = view(), view(view=1) if config.model.two_views else text, batch["index"]
    return (*inputs, batch["group_id"]) if "group_id" in batch else inputs


@dataclass
class EngineTowers:
    """Runs an engine's towers on a micro-batch (implements grad_accum.Towers).

    Calling the object computes the features for the loss. `again` recomputes them for the backward, but only those of
    the trained towers.
    """

    engine: Engine
    prepare: Prepare
    """Turns a micro-batch into the inputs of the towers."""
    teacher: RunTeacher | None = None
    """Called on each micro-batch; `again` does not call it."""

    def __post_init__(self) -> None:
        self.trained = trained_sides(self.engine.module)
        self.compiled = is_compiled(self.engine.module)

    def __call__(self, batch: Any, keep_graph: bool) -> MicroFeatures:
        """Compute the features of a micro-batch."""
        image, text, *ids = self.prepare(batch)
        # The loss needs the ids after all micro-batches, but the loader may reuse a micro-batch's buffers earlier.
        ids = [x.clone() for x in ids]
        teacher = self.teacher(image, text, batch) if self.teacher else ()
        with torch.no_grad():
            locked_image, locked_text, *_ = self._run(image, text, trained=False)
        rng = Rng()  # taken after the locked tower has run, because `again` does not run that tower
        # torch.compile builds separate graphs with and without gradients, which may draw different random numbers. So a
        # compiled tower runs both forwards with gradients.
        with torch.set_grad_enabled(keep_graph or self.compiled):
            image, text, scale, bias = self._run(image, text, trained=True)
        image = locked_image if image is None else image
        text = locked_text if text is None else text
        return MicroFeatures((image, text, scale, bias), rng, teacher, *ids)

    def again(self, batch: Any, first: MicroFeatures) -> Any:
        """Recompute the features of the trained towers, now with a graph. They equal the features in `first`."""
        image, text, *_ = self.prepare(batch)
        first.rng.restore()
        return self._run(image, text, trained=True)

    def _run(self, image: Tensor, text: Tensor | Texts, trained: bool) -> Any:
        """Run either the trained or the locked towers. The features of a tower that does not run are None."""
        inputs: dict[str, Any] = {}
        if self.trained["image"] == trained:
            inputs["image"] = image
        if self.trained["text"] == trained:
            inputs |= text._asdict() if isinstance(text, Texts) else {"text": text}
        return self.engine(**inputs) if inputs else (None, None, None, None)


def build_engine(model: nn.Module, settings: OptimSettings, ds_config: Tree) -> Engine:
    """Wrap the model in a DeepSpeed engine. Collective: every rank must call this.

    Args:
        model: The model, on any device; it is moved to this rank's device.
        settings: Settings of the optimizer.
        ds_config: The result of config.render_ds_config, which sets every needed key and refuses
            combinations of settings that DeepSpeed handles incorrectly.

    Raises:
        ValueError: If a parameter has no dimensions.
    """
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed_quirks.reset_autocast()
    # All steps have the same shapes, so let cuDNN time its algorithms once. Without timing, cuDNN chose a slow one for
    # the gradient of ViT-B/32's patch embedding, which took 18 ms of a 436 ms step (H200, micro-batch 2048).
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(
                f"model: DeepSpeed cannot train {name}, a parameter without dimensions; give it the shape [1]"
            )
    model.to(comm.local_device())
    groups = parameter_groups(model, settings)
    matrices = [matrix for group in groups if group["muon"] for matrix in group["params"]]
    optimizer = build_optimizer(groups, settings)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=ds_config, dist_init_required=False
    )
    deepspeed_quirks.silence_monitor(engine)
    deepspeed_quirks.widen_bucket(engine)
    deepspeed_quirks.allow_overflow_at_min_scale(engine)
    deepspeed_quirks.clear_padding(engine)
    deepspeed_quirks.fuse_update(engine, comm.all_reduce_sum)
    if isinstance(optimizer, Muon):
        optimizer.attach(engine, matrices)
    return engine


def learning_rate(done: float, total: float, peak: float, settings: OptimSettings) -> float:
    """Return the learning rate of a step: linear warmup to `peak`, then settings.schedule.

    Args:
        done: Number of samples trained before this step, divided by Schedule.warmup_batch.
        total: Number of samples in the whole run, divided by Schedule.warmup_batch.
        peak: Learning rate after the warmup.
        settings: Only warmup_steps, schedule, cooldown_steps and lr_min are used.
    """
    warmup, low = settings.warmup_steps, settings.lr_min
    if done < warmup:
        return peak * min(done + 1, warmup) / warmup
    if settings.schedule == "cosine":
        progress = (done - warmup) / max(total - warmup, 1)
        return low + (peak - low) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    left = total - done
    if settings.schedule == "cooldown" and left < settings.cooldown_steps:
        return low + (peak - low) * left / settings.cooldown_steps
    return peak


def set_rates(engine: Engine, lr: float, settings: OptimSettings, scale: Tensor) -> None:
    """Set the learning rates for the next update.

    If optim.tau_lr is set, the logit scale and bias get that learning rate instead of `lr`.

    Args:
        engine: The engine.
        lr: Learning rate for this step.
        settings: Settings of the optimizer.
        scale: [1], exp(logit_scale). While the temperature, 1 / scale, is at or below
            optim.tau_slow, tau_lr is divided by 3.
    """
    tau_lr = settings.tau_lr
    if tau_lr is not None and settings.tau_slow * scale.item() >= 1:
        tau_lr /= 3
    set_lr(engine, lr, tau_lr)


def set_lr(engine: Engine, lr: float, tau_lr: float | None = None) -> None:
    """Set the learning rate of each parameter group to `lr` times the group's lr_factor.

    Args:
        engine: The engine.
        lr: Learning rate.
        tau_lr: Learning rate of the logit scale and bias. None: `lr` times the lr_factor of their group.
    """
    for group in engine.optimizer.param_groups:
        if group["name"] == "scale" and tau_lr is not None:
            group["lr"] = tau_lr
        else:
            group["lr"] = lr * group["lr_factor"]


class Update(NamedTuple):
    """What backward_and_step did. The same on every rank."""

    result: Literal["applied", "overflow", "spike", "not finite"]
    """overflow: a loss scaler skipped the update and can still lower its scale. spike: the norm is above max_norm."""
    norm: Tensor
    """Norm of the global gradient before clipping, 0-d fp32. Valid if the result is "applied" or "spike"."""


@dataclass
class NormLimit:
    """Compares the gradient norm of a step with a limit. All ranks get the same result."""

    max_norm: float | None
    """The limit; None if there is none."""
    norm: float = math.nan
    """The largest norm of all ranks, which sum it in different orders. Set by `refuses`, if there is a limit."""

    def refuses(self, norm: Tensor) -> bool:
        """Return whether the gradient is finite but its norm is above the limit. Collective."""
        if self.max_norm is None:
            return False
        # With offload, DeepSpeed computes the norm on the CPU, but NCCL takes only tensors on the device.
        self.norm = comm.all_reduce_max(norm.to(comm.local_device())).item()
        return self.is_exceeded

    @property
    def is_exceeded(self) -> bool:
        """Whether `refuses` last returned True."""
        return self.max_norm is not None and self.max_norm < self.norm < math.inf


def backward_and_step(
    engine: Engine, surrogates: Iterable[Tensor], max_norm: float | None = None
) -> Update:
    """Backpropagate the surrogate loss of each micro-batch, then update the parameters, at any ZeRO stage. Collective.

    If the result is "spike" or "not finite", the weights, optimizer, loss scaler and counters are as they were before
    the step, with one exception: at ZeRO 0, the step count that LAMB and some other optimizers keep in their parameter
    groups then includes this step. If it is "overflow", only the loss scaler and the counters have changed.

    Args:
        engine: The engine.
        surrogates: Yields one 0-d surrogate loss per micro-batch, gradient_accumulation_steps in all.
            Each one is built only when it is requested.
        max_norm: If the norm of the gradient is higher, nothing is updated. None: there is no limit.
    """
    before = engine.global_steps, engine.global_samples, engine.skipped_steps
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    scaling = dict(vars(scaler)) if scaler is not None else {}
    zero_stage = engine.zero_optimization_stage()
    limit = NormLimit(max_norm)
    norm, is_finite = torch.tensor(math.nan), True
    deepspeed_quirks.forget_gradients(engine)
    is_limited = max_norm is not None and zero_stage > 0
    with deepspeed_quirks.norm_refused_by(engine, limit.refuses) if is_limited else nullcontext():
        for surrogate in surrogates:
            engine.backward(surrogate, scale_wrt_gas=False)
            if engine.is_gradient_accumulation_boundary() and zero_stage == 0:
                # At ZeRO 0, DeepSpeed neither returns the norm nor checks for NaN, so this code does.
                # At this point, the gradients are already averaged over ranks.
                trained = [p for p in engine.module.parameters() if p.grad is not None]
                norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
                norm = norm.cpu()  # the only wait for the device
                deepspeed_quirks.clip_by(engine, trained, norm)
                is_finite = bool(torch.isfinite(norm))
                if not is_finite or limit.refuses(norm):
                    engine.zero_grad()  # sets gradients to None, so no parameter changes
            engine.step()
            deepspeed_quirks.forget_clipping(engine)
    if is_finite and engine.was_step_applied() and not limit.is_exceeded:
        value = norm if zero_stage == 0 else engine.get_global_grad_norm()
        value = value if max_norm is None else limit.norm
        return Update("applied", torch.as_tensor(value, dtype=torch.float32))
    can_scale_down = scaling.get("dynamic") and scaling["cur_scale"] > scaling["min_scale"]
    if can_scale_down and not limit.is_exceeded:
        return Update("overflow", norm)
    engine.global_steps, engine.global_samples, engine.skipped_steps = before
    if scaler is not None:
        vars(scaler).update(scaling)
    if limit.is_exceeded:
        return Update("spike", torch.tensor(limit.norm))
    return Update("not finite", norm)


@torch.no_grad()
def clamp_scale(engine: Engine, max_scale: float, before: Tensor) -> None:
    """Limit logit_scale to at most ln(max_scale), in the parameter and in the optimizer's fp32 copy.

    Pretrained weights can have a scale above the bound. Such a scale is not lowered to the bound, but the update cannot
    raise it. Each rank clamps the part of logit_scale that it owns, without
    communication or device synchronization.

    Args:
        engine: The engine.
        max_scale: The bound.
        before: The scale before the update, [1].
    """
    parameter = engine.module.logit_scale
    if not parameter.requires_grad:
        return
    bound = math.log(max_scale)
    if parameter.dtype in (torch.bfloat16, torch.float16):
        bound = round_down(bound, parameter.dtype)
    # The factor covers the rounding of exp, so that a scale at the bound does not count as above it.
    is_above = before > 1.0001 * max_scale
    limit = torch.where(is_above, before.double().log(), bound)

    def clamp(values: Tensor) -> Tensor:
        return values.copy_(values.minimum(limit.to(values)))

    if hasattr(parameter, "ds_id"):  # ZeRO 3: each rank stores one padded part
        safe_set_local_fp32_param(parameter, clamp(safe_get_local_fp32_param(parameter)))
        clamp(parameter.ds_tensor.data)
        if parameter.numel():  # ZeRO 3 keeps small parameters gathered
            clamp(parameter.data)
        return
    # At ZeRO 1 and 2, a rank has a mapping if it owns all or part of the fp32 copy.
    if mapping := getattr(parameter, "_hp_mapping", None):
        clamp(mapping.get_hp_fragment())
    clamp(parameter.data)


def round_down(value: float, dtype: torch.dtype) -> float:
    """Return the largest number of this dtype that is not above `value`."""
    mantissa, exponent = math.frexp(value)
    num_steps = 2 / torch.finfo(dtype).eps
    return math.ldexp(math.floor(mantissa * num_steps) / num_steps, exponent)
