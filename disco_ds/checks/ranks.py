"""Checks on the user's ranks: equal settings, data on each host, the gradient of a step, speed of
collectives.

The step uses the run's loss, ZeRO stage, precision and communication with a small model without
dropout. Its optimizer is SGD, so that the change of the weights shows the gradient. It is compared
with the float64 gradient of one process.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from disco_ds.checks import Line, examine
from disco_ds.checks.recipe_checks import check_sources
from disco_ds.config import Config, OptimSettings, render_ds_config
from disco_ds.config.ds_config import precision, stage
from disco_ds.data import load_sources
from disco_ds.distributed import comm
from disco_ds.distributed.agreement import check_agreement
from disco_ds.losses import Embeddings, build_loss
from disco_ds.losses.base import Loss
from disco_ds.losses.kernels import Tiling
from disco_ds.models.clip import build_model
from disco_ds.training.engine import build_engine, set_lr
from disco_ds.training.step import train_step

_ROWS = 8
"""Samples per micro-batch."""
_LR = 1000.0
"""Learning rate. It is so large that rounding of the weights is negligible compared with their
change."""
_MIN_TOLERANCE = 1e-5
"""Relative error that is always allowed. Otherwise: twice the error of one process in the run's
precision."""
_MAX_TOLERANCE = {"fp32": 1e-3, "tf32": 5e-3, "fp16": 2e-2, "bf16": 1e-1, "autocast": 1e-1}
"""Upper bound of the tolerance, by precision: a kernel may be wrong in one process too."""
_MIB = (1, 16, 64)
_SLOW_GBPS = 0.1
"""Warn below this many GB/s, slightly less than gigabit Ethernet."""
Answer = tuple[dict[str, Tensor], float]
"""Gradient by parameter name, and the loss."""


def check_ranks(config: Config, ranks: int, first: bool, gradients: bool) -> Iterator[Line]:
    """Run all checks of this file. Collective.

    Args:
        config: The recipe.
        ranks: World size.
        first: Whether this is the first rank, which computes the reference gradient.
        gradients: Whether to check the gradient of a step.
    """
    # Before the process group exists: the reference is computed by one process on its own.
    try:
        small = shrink(config, ranks)
        alone = run_alone(small) if first and gradients else None
    except ValueError as error:
        yield Line("fail", "gradients", str(error))
        return
    # Errors that all ranks raise together. After another error the launcher ends all ranks.
    common = (ValueError, FloatingPointError)
    with comm.session(config.timeout_s):
        settings = examine("settings", lambda: check_settings(config), ValueError)
        yield from settings
        if any(line.status == "fail" for line in settings):
            return
        if gradients:
            yield from examine("gradients", lambda: check_gradients(small, alone), *common)
        if ranks > 1:
            yield from check_other_hosts(config)
            yield from examine("bandwidth", check_bandwidth, *common)


def check_settings(config: Config) -> Iterator[Line]:
    """Check that all ranks have the same settings. Collective.

    Raises:
        ValueError: On all ranks, if they differ.
    """
    check_agreement(config.model_dump(mode="json"))
    if comm.size() > 1:
        yield Line("ok", "settings", f"the same on {comm.size()} ranks")


def check_other_hosts(config: Config) -> Iterator[Line]:
    """Check the data on every host except the first rank's, which is checked already. Collective."""
    mine = None
    if comm.rank() > 0 and os.environ["LOCAL_RANK"] == "0":
        mine = examine("data", lambda: check_sources(config, load_sources(config.data)), Exception)
    num_hosts = 0
    fine = True
    for host, lines in comm.gather_objects((socket.gethostname(), mine)):
        if lines is None:
            continue
        num_hosts += 1
        for line in lines:
            if line.status != "ok":
                fine = False
                yield line._replace(found=f"{host}: {line.found}")
    if num_hosts and fine:
        yield Line("ok", "data", f"read on {num_hosts} more host(s)")


def shrink(config: Config, ranks: int) -> Config:
    """Return the settings with a small model and at most four small micro-batches.

    Raises:
        ValueError: See Config.num_micro_batches.
    """
    model: dict[str, Any] = {
        "name": str(Path(__file__).with_name("small_model.json")),
        "factory": None,
        "options": {},
        "pretrained": None,
        "pretrained_image": None,
        "image_size": None,
        "patch_dropout": None,
        "compile": False,
    }
    changes = {
        "model": config.model.model_copy(update=model),
        "optim": OptimSettings(name="sgd", momentum=0.0, weight_decay=0.0),
        "micro_batch": _ROWS,
        "global_batch": ranks * _ROWS * min(config.num_micro_batches(ranks), 4),
    }
    return config.model_copy(update=changes)


def run_alone(small: Config) -> tuple[Answer, float]:
    """Compute the reference in one process.

    Call this before the process group exists, so that the loss sees the whole batch and does not
    communicate.

    Returns:
        The answer in float64 on the CPU, and the relative error of one process in the run's
        precision on the run's device.
    """
    true = _backward(small, "float64", torch.device("cpu"))
    rough, _ = _backward(small, precision(small.deepspeed), comm.local_device())
    return true, _distance(rough, true[0])


def check_gradients(small: Config, alone: tuple[Answer, float] | None) -> Iterator[Line]:
    """Compare the gradient of all ranks with that of one process. Collective.

    Args:
        small: See `shrink`.
        alone: See `run_alone`; None on ranks that do not compare.

    Raises:
        ValueError: On all ranks together.
        FloatingPointError: On all ranks together.
    """
    count = small.num_micro_batches(comm.size())
    got, loss = _step(small, count)
    if alone is None:
        return
    (true, true_loss), rough = alone
    tolerance = min(max(_MIN_TOLERANCE, 2 * rough), _max_tolerance(small))
    error = _distance(got, true)
    loss_error = abs(loss / true_loss - 1)
    worst = max(true, key=lambda name: (got[name] - true[name]).norm().item())
    found = (
        f"relative error {error:.1e} against one process, largest in {worst}; loss {loss_error:.1e}; "
        f"allowed {tolerance:.1e}; {small.loss.name}, {comm.size()} ranks x {count} micro-batches, "
        f"ZeRO {stage(small.deepspeed)}, {precision(small.deepspeed)}"
    )
    custom = ":" in small.loss.name
    remedy = "the ranks would train another model: remove loss.options and ds_config keys until this passes"
    if custom:
        remedy = (
            "the ranks would train another model: check that the loss gathers with comm.gather and that its mean "
            "over ranks is the global loss"
        )
    fine = error <= tolerance and loss_error <= tolerance
    yield Line("ok" if fine else "fail", "gradients", found, remedy)
    if custom and comm.size() == 1:
        found = "with one rank it is unknown whether the loss gathers the rows of the others"
        remedy = "torchrun --nproc_per_node 2 -m disco_ds.doctor, with the same arguments"
        yield Line("warn", "gather", found, remedy)


def _max_tolerance(small: Config) -> float:
    """Return the upper bound of the tolerance, by the coarsest precision of towers and loss."""
    loss = build_loss(small.loss.name, **small.loss.options)
    tiling = getattr(loss, "tiling", Tiling(precision="fp32")).on(comm.local_device())
    return max(_MAX_TOLERANCE[precision(small.deepspeed)], _MAX_TOLERANCE[tiling.precision])


def _step(small: Config, count: int) -> Answer:
    """Return the answer of one update by the engine. Collective.

    Args:
        small: See `shrink`.
        count: Micro-batches per rank.
    """
    device = comm.local_device()
    model, loss = _build(small, device)
    micro_batches = list(zip(*(x.split(_ROWS) for x in _draw(small, device)), strict=True))
    first = comm.rank() * count
    mine = micro_batches[first : first + count]
    engine = build_engine(model, small.optim, render_ds_config(small, comm.size()))
    set_lr(engine, _LR)
    before = _master_weights(engine)
    for _ in range(40):  # an fp16 loss scaler skips steps until its scale fits
        out = train_step(engine, loss, mine, lambda batch: batch, max_scale=math.inf)
        if out.grad_norm is not None:
            break
    after = _master_weights(engine)
    engine.destroy()
    return {name: (before[name] - after[name]) / _LR for name in before}, out.metrics["loss"].item()


def _backward(small: Config, kind: str, device: torch.device) -> Answer:
    """Return the answer of one graph over the whole batch.

    Args:
        small: See `shrink`.
        kind: Precision of the towers: float64, fp32, autocast, bf16 or fp16.
        device: Device to run on.
    """
    model, loss = _build(small, device)
    dtypes = {"float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
    model.to(dtypes.get(kind, torch.float32))
    image, text, index = _draw(small, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=kind == "autocast"):
        image, text, scale, bias = model(image, text)
    out = loss(Embeddings(image, text, scale, bias, index))
    # Without scaling, fp16 gradients of a mean over the batch would be subnormal.
    factor = 256.0 if kind == "fp16" else 1.0
    (factor * out.loss).backward()
    gradient = {
        name: p.grad.double().cpu() / factor
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return gradient, out.metrics["loss"].item()


def _build(small: Config, device: torch.device) -> tuple[nn.Module, Loss]:
    loss = build_loss(small.loss.name, **small.loss.options)
    loss.set_num_samples(small.global_batch, small.global_batch)
    torch.manual_seed(small.seed)
    model = build_model(small.model, loss.initial_scale, loss.initial_bias, loss.learns_scale)
    return model.to(device).train(), loss.to(device)


def _draw(small: Config, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw images, texts (or second views) and ids of the global batch, equal on every rank."""
    generator = torch.Generator().manual_seed(small.seed)
    B = small.global_batch
    image = torch.randint(0, 256, (B, 3, 32, 32), generator=generator, dtype=torch.uint8)
    text = torch.randint(1, 100, (B, 12), generator=generator)
    if small.model.two_views:
        text = image.flip(3)
    return image.to(device), text.to(device), torch.arange(B, device=device)


def _master_weights(engine: Any) -> dict[str, Tensor]:
    """Return every trained parameter, unpartitioned, from the fp32 master weights. Collective."""
    read = safe_get_full_fp32_param if engine.zero_optimization_stage() else torch.Tensor.detach
    trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    return {name: read(p).to("cpu", torch.float64, copy=True) for name, p in trained}


def _distance(got: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Return |got - true| / |true| over the whole gradient."""
    error = sum((got[name] - value).square().sum().item() for name, value in true.items())
    return math.sqrt(error / sum(value.square().sum().item() for value in true.values()))


def check_bandwidth() -> Iterator[Line]:
    """Measure the bandwidth of each collective on the slowest rank. Collective."""
    N = comm.size()
    # Name -> bytes that a rank of a ring receives for each byte of x, and the collective.
    collectives: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
        "all_gather": (1 - 1 / N, lambda x: comm.gather(x.chunk(N)[0])),
        "reduce_scatter": (1 - 1 / N, comm.reduce_scatter_in_place),
        "all_reduce": (2 - 2 / N, comm.all_reduce_sum),
    }
    for name, (share, run) in collectives.items():
        rates = []
        for mib in _MIB:
            # The number of fp32 elements is a multiple of the ranks.
            x = torch.ones(mib * 2**18 // N * N, device=comm.local_device())
            run(x)  # the first call opens connections
            comm.barrier()
            start = time.perf_counter()
            for _ in range(3):
                run(x)
            get_accelerator().synchronize()
            seconds = torch.tensor((time.perf_counter() - start) / 3, device=x.device)
            rates.append(share * 4 * len(x) / comm.all_reduce_max(seconds).item() / 1e9)
        shown = " / ".join(f"{rate:.2f}" for rate in rates)
        found = f"{shown} GB/s per rank at {' / '.join(map(str, _MIB))} MiB"
        remedy = "slower than gigabit Ethernet: NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME may name the wrong interface"
        yield Line("ok" if max(rates) >= _SLOW_GBPS else "warn", name, found, remedy)
