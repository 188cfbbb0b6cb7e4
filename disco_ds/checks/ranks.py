"""Checks on the user's ranks: equal settings, the data of each host, the gradient of a step, the speed of collectives.

The step has the run's loss, ZeRO stage, precision and communication, and a small model without dropout. Its optimizer
is SGD, so that the change of the weights is the gradient that was used. One process computes the same in float64.
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
from disco_ds.checks.here import check_sources
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
"""Samples of a micro-batch."""
_LR = 1000.0
"""So large that the change of the weights dwarfs their rounding, since the gradient is read from the change."""
_FP32 = 1e-5
"""Relative error that is always allowed; else up to twice the error that one process makes in the run's precision,"""
_BARS = {"fp32": 1e-3, "tf32": 5e-3, "fp16": 2e-2, "bf16": 1e-1, "autocast": 1e-1}
"""but never more than this, by the coarsest precision of towers and loss: a kernel may be wrong in one process too."""
_MIB = (1, 16, 64)
_SLOW_GBPS = 0.1
"""GB/s: a little less than gigabit Ethernet reaches."""
Answer = tuple[dict[str, Tensor], float]
"""The gradient by parameter, and the loss."""


def look_at_ranks(config: Config, ranks: int, first: bool, gradients: bool) -> Iterator[Line]:
    """All checks of this file. Collective."""
    # Before there is a process group: a lone process computes the answer that the ranks must agree with.
    try:
        small = shrink(config, ranks)
        alone = run_alone(small) if first and gradients else None
    except ValueError as error:
        yield Line("fail", "gradients", str(error))
        return
    alike = (
        ValueError,
        FloatingPointError,
    )  # raised by all ranks together; else the launcher ends them
    with comm.session(config.timeout_s):
        settings = examine("settings", lambda: check_settings(config), ValueError)
        yield from settings
        if any(line.status == "fail" for line in settings):
            return
        if gradients:
            yield from examine("gradients", lambda: check_gradients(small, alone), *alike)
        if ranks > 1:
            yield from check_other_hosts(config)
            yield from examine("bandwidth", check_bandwidth, *alike)


def check_settings(config: Config) -> Iterator[Line]:
    """Check that all ranks have the same settings. Collective. Raises: ValueError on all ranks, see check_agreement."""
    check_agreement(config.model_dump(mode="json"))
    if comm.size() > 1:
        yield Line("ok", "settings", f"the same on {comm.size()} ranks")


def check_other_hosts(config: Config) -> Iterator[Line]:
    """Check the data on every host but the first rank's, which has reported already. Collective."""
    looks = comm.rank() > 0 and os.environ["LOCAL_RANK"] == "0"
    mine = examine("data", lambda: check_sources(config, load_sources(config.data)), Exception) if looks else None
    reports = [(host, lines) for host, lines in comm.gather_objects((socket.gethostname(), mine)) if lines is not None]
    wrong = [(host, line) for host, lines in reports for line in lines if line.status != "ok"]
    yield from (line._replace(found=f"{host}: {line.found}") for host, line in wrong)
    if reports and not wrong:
        yield Line("ok", "data", f"read on {len(reports)} more host(s)")


def shrink(config: Config, ranks: int) -> Config:
    """The run with a small model and at most four small micro-batches. Raises: ValueError, see num_micro_batches."""
    small: dict[str, Any] = {"name": str(Path(__file__).with_name("small_model.json")), "options": {}}
    small |= dict.fromkeys(("factory", "pretrained", "pretrained_image", "image_size", "patch_dropout"))
    changes = {
        "model": config.model.model_copy(update={**small, "compile": False}),
        "optim": OptimSettings(name="sgd", momentum=0.0, weight_decay=0.0),
        "micro_batch": _ROWS,
        "global_batch": ranks * _ROWS * min(config.num_micro_batches(ranks), 4),
    }
    return config.model_copy(update=changes)


def run_alone(small: Config) -> tuple[Answer, float]:
    """The answer in float64 on the CPU, and the error of one process with the run's precision and device.

    To be called before there is a process group, so that the loss sees the whole batch and does not communicate.
    """
    true = _backward(small, "float64", torch.device("cpu"))
    return true, _distance(_backward(small, precision(small.deepspeed), comm.local_device())[0], true[0])


def check_gradients(small: Config, alone: tuple[Answer, float] | None) -> Iterator[Line]:
    """Compare the gradient of the ranks with that of one process, on the rank that has `alone`.

    Collective. Raises: ValueError, FloatingPointError on all ranks alike.
    """
    count = small.num_micro_batches(comm.size())
    got, loss = _step(small, count)
    if alone is None:
        return
    (true, true_loss), rough = alone
    # Twice the error of one process in the same precision, within fixed bounds.
    limit = min(max(_FP32, 2 * rough), _bar(small))
    error, loss_error = _distance(got, true), abs(loss / true_loss - 1)
    worst = max(true, key=lambda name: (got[name] - true[name]).norm().item())
    found = f"{error:.1e} off one process, most in {worst}, the loss {loss_error:.1e}; allowed {limit:.1e}; "
    found += f"{small.loss.name}, {comm.size()} ranks x {count} micro-batches, ZeRO {stage(small.deepspeed)}, "
    own = ":" in small.loss.name
    cause = "take loss.options and ds_config keys out until this is right"
    if own:
        cause = "check that the loss gathers with comm.gather, and is the mean over ranks"
    remedy = f"the ranks would train another model: {cause}"
    fine = error <= limit and loss_error <= limit
    yield Line("ok" if fine else "fail", "gradients", found + precision(small.deepspeed), remedy)
    if own and comm.size() == 1:
        shown = "one rank does not show whether the loss gathers the rows of the others"
        yield Line("warn", "gather", shown, "torchrun --nproc_per_node 2 -m disco_ds.doctor, with the same arguments")


def _bar(small: Config) -> float:
    """The largest error that may be allowed, see _BARS."""
    tiling = getattr(build_loss(small.loss.name, **small.loss.options), "tiling", Tiling(precision="fp32"))
    return max(_BARS[precision(small.deepspeed)], _BARS[tiling.on(comm.local_device()).precision])


def _step(small: Config, count: int) -> Answer:
    """The answer of one update by the engine. Collective."""
    device = comm.local_device()
    model, loss = _build(small, device)
    parts = list(zip(*(x.split(_ROWS) for x in _draw(small, device)), strict=True))
    mine = parts[comm.rank() * count :][:count]  # this rank's micro-batches of the same global batch
    engine = build_engine(model, small.optim, render_ds_config(small, comm.size()))
    set_lr(engine, _LR)
    before = _masters(engine)  # in fp32, as 16-bit weights are rounded
    for _ in range(40):  # an fp16 loss scaler skips steps until its scale fits
        out = train_step(engine, loss, mine, lambda batch: batch, max_scale=math.inf)
        if out.grad_norm is not None:
            break
    after = _masters(engine)
    engine.destroy()
    return {name: (before[name] - after[name]) / _LR for name in before}, out.metrics["loss"].item()


def _backward(small: Config, kind: str, device: torch.device) -> Answer:
    """The answer of one graph over the whole batch. Args: kind: float64, fp32, autocast, bf16, fp16: how towers run."""
    model, loss = _build(small, device)
    model.to({"float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32))
    image, text, index = _draw(small, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=kind == "autocast"):
        image, text, scale, bias = model(image, text)
    out = loss(Embeddings(image, text, scale, bias, index))
    factor = 256.0 if kind == "fp16" else 1.0  # gradients of a mean over the batch would be subnormal
    (factor * out.loss).backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.double().cpu() / factor for name, grad in trained.items()}, out.metrics["loss"].item()


def _build(small: Config, device: torch.device) -> tuple[nn.Module, Loss]:
    loss = build_loss(small.loss.name, **small.loss.options)
    loss.set_num_samples(small.global_batch, small.global_batch)
    torch.manual_seed(small.seed)
    model = build_model(small.model, loss.initial_scale, loss.initial_bias, loss.learns_scale)
    return model.to(device).train(), loss.to(device)


def _draw(small: Config, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Images, texts or second views, and ids of the global batch: the same on every rank."""
    generator, B = torch.Generator().manual_seed(small.seed), small.global_batch
    image = torch.randint(0, 256, (B, 3, 32, 32), generator=generator, dtype=torch.uint8)
    text = image.flip(3) if small.model.two_views else torch.randint(1, 100, (B, 12), generator=generator)
    return image.to(device), text.to(device), torch.arange(B, device=device)


def _masters(engine: Any) -> dict[str, Tensor]:
    """The fp32 copy of every trained parameter, whole. Collective."""
    read = safe_get_full_fp32_param if engine.zero_optimization_stage() else torch.Tensor.detach
    trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    return {name: read(p).to("cpu", torch.float64, copy=True) for name, p in trained}


def _distance(got: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """|got - true| / |true| over the whole gradient."""
    error = sum((got[name] - value).square().sum().item() for name, value in true.items())
    return math.sqrt(error / sum(value.square().sum().item() for value in true.values()))


def check_bandwidth() -> Iterator[Line]:
    """Measure what the slowest rank receives per second. Collective."""
    N = comm.size()
    # By collective: the bytes that a rank of a ring receives for each byte of x.
    collectives: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
        "all_gather": (1 - 1 / N, lambda x: comm.gather(x.chunk(N)[0])),
        "reduce_scatter": (1 - 1 / N, comm.reduce_scatter_in_place),
        "all_reduce": (2 - 2 / N, comm.all_reduce_sum),
    }
    for name, (share, run) in collectives.items():
        rates = []
        for mib in _MIB:
            # fp32 numbers, a multiple of the ranks.
            x = torch.ones(mib * 2**18 // N * N, device=comm.local_device())
            run(x)  # the first one makes connections
            comm.barrier()
            start = time.perf_counter()
            for _ in range(3):
                run(x)
            get_accelerator().synchronize()
            seconds = torch.tensor((time.perf_counter() - start) / 3, device=x.device)
            rates.append(share * 4 * len(x) / comm.all_reduce_max(seconds).item() / 1e9)
        found = f"{' / '.join(f'{rate:.2f}' for rate in rates)} GB/s per rank at {' / '.join(map(str, _MIB))} MiB"
        remedy = "slower than gigabit Ethernet: NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME may name a wrong interface"
        yield Line("ok" if max(rates) >= _SLOW_GBPS else "warn", name, found, remedy)
