"""Checks on all ranks: equal settings and software, and the gradient of a step.

The step trains a small model without dropout, with the loss, ZeRO stage, precision and communication
of the run. The optimizer is SGD, so the change of the weights reveals the gradient. The check
compares this gradient with the one that a single process computes in float64.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from disco_ds.checks.hosts import check_all_hosts
from disco_ds.checks.report import Line, examine
from disco_ds.config import Config, ModelSettings, OptimSettings, render_ds_config
from disco_ds.distributed import comm
from disco_ds.eval.model import in_precision
from disco_ds.losses import Embeddings, Loss, build_loss
from disco_ds.models.clip import build_model
from disco_ds.training.custom_loop import contrastive_step
from disco_ds.training.engine import build_engine, set_lr

_ROWS = 8
"""Samples per micro-batch."""
_LR = 1000.0
"""Learning rate, chosen so large that the rounding of the weights is negligible compared with the update."""
_MIN_TOLERANCE = 1e-5
"""Lower bound of the tolerance for the relative errors of the gradient and of the loss.

The tolerance is twice the relative error of the gradient that a single process computes in the run's precision.
"""
_MAX_TOLERANCE = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 2e-2, "bf16": 1e-1, "autocast": 1e-1}
"""Upper bound of the tolerance for each precision.

Without it, a wrong gradient of the single process would make the tolerance so large that every gradient passes.
"""
Result = tuple[Tensor, float]
"""The gradient of all trained parameters (flattened, float64, on the CPU) and the loss."""


def check_ranks(config: Config, ranks: int, first: bool, gradients: bool) -> Iterator[Line]:
    """Check the settings, the hosts and, if `gradients` is true, the gradient. Collective.

    Args:
        config: The recipe.
        ranks: World size.
        first: Whether this is the first rank. Only the first rank computes the reference gradient.
        gradients: Whether to check the gradient of a step.
    """
    # Compute the reference before the process group exists, so that it involves no communication.
    try:
        small = shrink(config, ranks)
        alone = run_alone(small) if first and gradients else None
    except ValueError as error:
        yield Line("fail", "gradients", str(error))
        return
    # All ranks raise these errors together. After any other error the launcher ends all ranks.
    common = (ValueError, FloatingPointError)
    with comm.session(config.timeout_s):
        hosts = examine("hosts", check_all_hosts(config), common)
        yield from hosts
        if gradients and hosts[0].status == "ok":
            yield from examine("gradients", check_gradients(small, alone), common)


def shrink(config: Config, ranks: int) -> Config:
    """Return the settings with a small model, SGD, and at most four small micro-batches per rank.

    Raises:
        ValueError: If the recipe's global batch or number of ranks does not fit `ranks`.
    """
    kept = {"lock_image", "lock_text", "two_views", "activation_checkpointing", "towers"}
    return config.replace(
        model=ModelSettings(name="two_layers", **config.model.model_dump(include=kept)),
        optim=OptimSettings(name="sgd", momentum=0.0, weight_decay=0.0),
        micro_batch=_ROWS,
        global_batch=ranks * _ROWS * min(config.num_micro_batches(ranks), 4),
    )


def run_alone(small: Config) -> tuple[Result, float]:
    """Compute the reference gradient and loss in one process.

    Call it before the process group exists, so that the loss sees the whole batch and does not
    communicate.

    Returns:
        The gradient and loss in float64 on the CPU, and the relative error of the gradient that this
        process computes in the run's precision on the run's device.
    """
    true, loss = _backward(small, "float64", torch.device("cpu"))
    rough, _ = _backward(small, small.precision, comm.local_device())
    return (true, loss), _relative_error(rough, true)


def check_gradients(small: Config, alone: tuple[Result, float] | None) -> Iterator[Line]:
    """Compare the gradient of all ranks with that of one process. Collective.

    Args:
        small: Settings with a small model, as `shrink` returns them.
        alone: What `run_alone` returned; None on ranks that do not compare gradients.

    Raises:
        ValueError: If the engine or the loss refuses the settings; raised on all ranks.
        FloatingPointError: If the loss is not finite; raised on all ranks.
    """
    count = small.num_micro_batches(comm.size())
    got, loss = _step(small, count)
    if alone is None:
        return
    (true, true_loss), rough = alone
    tiling = getattr(build_loss(small.loss.name, **small.loss.options), "tiling", None)
    loss_precision = tiling.on(comm.local_device()).precision if tiling else "fp32"
    most = max(_MAX_TOLERANCE[small.precision], _MAX_TOLERANCE[loss_precision])
    tolerance = min(max(_MIN_TOLERANCE, 2 * rough), most)
    error = _relative_error(got, true)
    loss_error = abs(loss / true_loss - 1)
    found = (
        f"relative error {error:.1e} of the gradient and {loss_error:.1e} of the loss compared with one "
        f"process; allowed {tolerance:.1e}, the rounding of towers in {small.precision} and the loss in "
        f"{loss_precision}; {small.loss.name}, ranks {comm.size()}, micro-batches {count}, "
        f"ZeRO {small.zero_stage}"
    )
    remedy = (
        "the training would be wrong: remove loss.options and ds_config keys until this passes; a "
        "custom loss must gather with comm.gather, and its mean over ranks must be the global loss"
    )
    fine = error <= tolerance and loss_error <= tolerance
    yield Line("ok" if fine else "fail", "gradients", found, remedy)


def _step(small: Config, count: int) -> Result:
    """Return the gradient and the loss of one step of the DeepSpeed engine. Collective.

    Args:
        small: Settings with a small model, as `shrink` returns them.
        count: Number of micro-batches per rank.
    """
    model, loss, batch = _prepare(small, comm.local_device())
    image, text, index, group_id = (x.chunk(comm.size())[comm.rank()] for x in batch)
    engine = build_engine(model, small.optim, render_ds_config(small, comm.size()))
    set_lr(engine, _LR)
    before = _read_weights(engine)
    for _ in range(40):  # the loss scaler of fp16 skips steps until its scale is low enough
        out = contrastive_step(
            engine,
            loss,
            (image, text),
            lambda views: engine(*views),
            micro_batches=count,
            index=index,
            group_id=group_id,
        )
        if engine.was_step_applied():
            break
    gradient = (before - _read_weights(engine)) / _LR
    engine.destroy()
    return gradient, out.metrics["loss"].item()


def _backward(small: Config, kind: str, device: torch.device) -> Result:
    """Return the gradient and the loss of the whole batch, from a single forward and backward pass.

    Args:
        small: Settings with a small model, as `shrink` returns them.
        kind: Precision of the towers: float64, fp32, autocast, bf16 or fp16.
        device: Device to run on.
    """
    model, loss, (image, text, index, group_id) = _prepare(small, device)
    model = model.double() if kind == "float64" else in_precision(model, kind)
    image, text, scale, bias = model(image, text)
    out = loss(Embeddings(image, text, scale, bias, index, group_id))
    # Without this factor, fp16 gradients of a mean over the batch would be subnormal.
    factor = 256.0 if kind == "fp16" else 1.0
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(factor * out.loss, trained, materialize_grads=True)
    return _flatten(gradients) / factor, out.metrics["loss"].item()


def _prepare(small: Config, device: torch.device) -> tuple[nn.Module, Loss, list[Tensor]]:
    """Return the model, the loss and the global batch, which are the same on every rank.

    The batch consists of images, texts (or second views), sample ids, and group ids. Each group contains two samples.
    """
    loss = build_loss(small.loss.name, **small.loss.options)
    loss.set_num_samples(small.global_batch, small.global_batch)
    torch.manual_seed(small.seed)
    bias = loss.initial_bias(small.global_batch)
    model = build_model(small.model, loss.initial_scale, bias, loss.learns_scale)
    generator = torch.Generator().manual_seed(small.seed)
    B = small.global_batch
    image = torch.randint(0, 256, (B, 3, 32, 32), generator=generator, dtype=torch.uint8)
    text = torch.randint(1, 100, (B, 12), generator=generator)
    if small.model.two_views:
        text = image.flip(3)
    index = torch.arange(B)
    batch = [x.to(device) for x in (image, text, index, index // 2)]
    return model.to(device).train(), loss.to(device), batch


def _read_weights(engine: Any) -> Tensor:
    """Return all trained parameters as one flat float64 tensor, read from the fp32 master weights. Collective."""
    read = safe_get_full_fp32_param if engine.zero_optimization_stage() else torch.Tensor.detach
    return _flatten([read(p) for p in engine.module.parameters() if p.requires_grad])


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.to("cpu", torch.float64).flatten() for x in tensors])


def _relative_error(got: Tensor, true: Tensor) -> float:
    return ((got - true).norm() / true.norm()).item()
