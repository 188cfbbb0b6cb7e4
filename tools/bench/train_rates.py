"""Measure training on one GPU. tools/bench/gpu.py runs these measurements, in a process group of one rank.

There are five kinds of slices:
  step       the time of a step on pixels that are already on the device, for disco_ds and for open_clip, each with and
             without torch.compile
  first step the time of a process's first step, with empty caches of compiled code and of tuned kernels
  GradAccum  the time of one step of eight micro-batches, and of eight steps of one micro-batch
  peak       the peak memory of a run, and the peak that `disco-ds plan` predicts
  data       the speed of a run that reads JPEG shards, and the fraction of time that it waits for data

In the first two kinds, the steps of disco_ds use bf16 autocast, ZeRO 1 and the loss disco_fused. They do not compute
accuracies, because a run computes them only on logged steps. MFU counts each operation once, even if it is recomputed
(flops.py), and is relative to the GPU's 16-bit rate in the data sheet (gpus.py).
"""

import gc
import json
import os
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from disco_ds.config import Config, check_config, render_ds_config
from disco_ds.config.ds_config import read_ds_config
from disco_ds.data import MicroBatch, index_shards, write_manifest
from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.metrics.logger import METRICS_FILE
from disco_ds.models.clip import Texts, build_model, read_text_size, register_config
from disco_ds.models.flops import count_flops
from disco_ds.models.gpus import recognize
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.memory import GIB, plan_memory
from disco_ds.plan.towers import make_batch, trace
from disco_ds.training.build import build
from disco_ds.training.engine import (
    EngineTowers,
    backward_and_step,
    build_engine,
    clamp_scale,
    set_lr,
)
from disco_ds.training.grad_accum import forward_all, loss_at_features, surrogates
from disco_ds.training.loop import train
from tools.bench import slices
from tools.bench.data import make_shards
from tools.bench.timing import Clock

TINY = str(Path(__file__).with_name("tiny_vit.json"))
"""Config of the tiny model that --rehearse uses in place of every other model."""
MICRO_BATCHES = {"ViT-B-32": 2048, "ViT-B-16": 768, "ViT-L-14": 256}
"""Model -> micro-batch for which `disco-ds plan` predicts a peak memory of 65 to 72 GiB."""
MFU_GOALS = {"ViT-B-32": 0.30, "ViT-B-16": 0.45, "ViT-L-14": 0.50}
ACCUMULATED = ("ViT-B-32", "ViT-L-14")
FROM_SHARDS = ("ViT-B-32", "ViT-L-14")
RATIO_GOAL, PEAK_GOAL, FIRST_GOAL_S = 1.33, 0.05, 30
KINDS = ("step", "first step", "GradAccum", "peak", "data")
FIRST = (
    "step: ViT-B-32, mean19",
    "step: ViT-B-32, open_clip",
    "first step: ViT-B-32",
    "GradAccum: ViT-B-32",
    "data: ViT-B-32",
    "peak: ViT-B-32, 1 x 2048, zero1",
    "step: ViT-B-32, open_clip compiled",
)
"""The most important slices. They are expected to take 510 s."""


@dataclass(frozen=True)
class Setting:
    """A run whose peak memory is predicted and measured."""

    model: str
    micro_batch: int
    count: int
    deepspeed: str
    checkpointing: bool = False
    pixels: str = "device"

    def __str__(self) -> str:
        words = [self.model, f"{self.count} x {self.micro_batch}", self.deepspeed]
        words += ["checkpointing"] * self.checkpointing + ["pixels on the host"] * (
            self.pixels == "host"
        )
        return ", ".join(words)


SETTINGS = {
    str(x): x
    for x in (
        Setting("ViT-B-32", 2048, 1, "zero1"),
        Setting("ViT-L-14", 128, 8, "zero1"),
        Setting("ViT-B-32", 4096, 4, "zero2", checkpointing=True),
        Setting("ViT-B-16", 512, 2, "zero3"),
        Setting("ViT-L-14", 1024, 1, "zero1", checkpointing=True),
        Setting("ViT-B-32", 1024, 8, "zero1", pixels="host"),
    )
}


def our_slices() -> list[slices.Slice]:
    """Return the slices that measure disco_ds, in the order in which they run."""
    found = [
        slices.Slice(f"step: {name}, {captions}", 60)
        for captions in ("mean19", "full")
        for name in MICRO_BATCHES
    ]
    found += [slices.Slice(f"step: {name}, mean19, eager", 60) for name in MICRO_BATCHES]
    found += [slices.Slice(f"first step: {name}", 60) for name in MICRO_BATCHES]
    found += [slices.Slice(f"GradAccum: {name}", 90) for name in ACCUMULATED]
    found += [slices.Slice(f"peak: {label}", 60) for label in SETTINGS]
    return found + [slices.Slice(f"data: {name}", 60) for name in FROM_SHARDS]


def other_slices() -> list[slices.Slice]:
    """Return the slices that measure the steps of open_clip."""
    found = [slices.Slice(f"step: {name}, open_clip", 60) for name in MICRO_BATCHES]
    return found + [
        slices.Slice(f"step: {name}, open_clip compiled", 120) for name in MICRO_BATCHES
    ]


def measure(name: str, rehearse: bool, record: slices.Record) -> None:
    """Run the slice with this name, and record its results.

    If the slice fails, record the error as `problem` instead. If a package is not installed, record the message of the
    ImportError as `missing`.
    """
    kind, label = name.split(": ")
    work: dict[str, Callable[[str, bool], dict[str, Any]]] = {
        "step": measure_step,
        "first step": measure_first_step,
        "GradAccum": measure_accumulation,
        "peak": measure_peak,
        "data": measure_data,
    }
    with slices.case(record):
        try:
            record(**work[kind](label, rehearse))
        except ImportError as error:
            record(missing=str(error))


def settings(
    name: str, micro_batch: int, count: int = 1, rehearse: bool = False, **changes: Any
) -> Config:
    """Return the config of a run of one rank, by default on random pixels.

    Args:
        name: Name of the model.
        micro_batch: Number of samples in a micro-batch.
        count: Number of micro-batches in a step.
        rehearse: Whether to use a tiny model and micro-batch.
        changes: Settings and whole sections that replace the defaults below. Only the section `model` is merged with
            its default, which is the name.
    """
    m = 8 if rehearse else micro_batch
    tree = {
        "name": "bench",
        "global_batch": m * count,
        "micro_batch": m,
        "steps": 1000,
        "data": {"source": "synthetic"},
        "optim": {"lr": 1e-4, "warmup_steps": 0},
        "log": {"every_steps": 1, "tensorboard": False},
        "checkpoint": {"every_steps": 0},
        "deepspeed": read_ds_config("zero1", Path.cwd()),
    }
    tree |= changes
    tree["model"] = {"name": TINY if rehearse else name} | changes.get("model", {})
    return check_config(tree, "bench_gpu")


# Steps


def measure_step(label: str, rehearse: bool) -> dict[str, Any]:
    """Measure the time of a step.

    Args:
        label: "MODEL, CAPTIONS", "MODEL, CAPTIONS, eager", "MODEL, open_clip" or "MODEL, open_clip compiled". See
            draw_lengths for CAPTIONS. open_clip computes padding, so its time does not depend on them.
        rehearse: Whether to use a tiny model and few steps.
    """
    model, how, *rest = label.split(", ")
    compiled = how == "open_clip compiled" or (not how.startswith("open_clip") and not rest)
    config = settings(model, MICRO_BATCHES[model], rehearse=rehearse, model={"compile": compiled})
    steps, warmups = (2, 1) if rehearse else (10, 5)
    if how.startswith("open_clip"):
        from tools.bench.open_clip_step import step_ms

        flops = count_flops(build_model(config.model.model_copy(update={"compile": False})))
        ms = step_ms(
            register_config(config.model.name), config.micro_batch, compiled, steps, warmups
        )
    else:
        step, flops = build_step(config, how)
        ms = time_steps(step, steps, warmups)
    samples_per_s = 1000 * config.micro_batch / statistics.median(ms)
    peak = peak_flops()
    return {
        "micro_batch": config.micro_batch,
        "ms": statistics.median(ms),
        "samples_per_s": samples_per_s,
        "gflop": flops / 1e9,
        **({"mfu": samples_per_s * flops / peak} if peak else {}),
        "peak_bytes": peak_bytes(),
    }


def measure_first_step(model: str, rehearse: bool) -> dict[str, Any]:
    """Measure the first step of a process, which compiles the blocks and tunes the kernels, with empty caches.

    Triton and torch must not have compiled anything in this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        compiled = {"compile": torch.cuda.is_available()}
        config = settings(model, MICRO_BATCHES[model], rehearse=rehearse, model=compiled)
        step, _ = build_step(config, "mean19")
        return {"micro_batch": config.micro_batch, "first_s": time_steps(step, 1, 0)[0] / 1000}


def draw_lengths(captions: str, m: int, context: int) -> np.ndarray:
    """Draw the number of tokens of m captions.

    Args:
        captions: "full": all captions fill the context. "mean19": a log-normal distribution like that of alt texts,
            with a mean of 19.6, a median of 18 and a 95th percentile of 36.
        m: Number of captions.
        context: Maximum number of tokens.
    """
    random = np.random.default_rng(0)
    if captions == "full":
        return np.full(m, context)
    drawn = np.rint(np.exp(2.7 + 0.5 * random.standard_normal(m))).astype(int) + 3
    return drawn.clip(4, context)


def build_step(config: Config, captions: str = "full") -> tuple[Callable[[], Any], int]:
    """Build an engine and a loss.

    Returns:
        A function that runs one training step on random pixels, and the model's FLOPs per sample.
    """
    device, m = comm.local_device(), config.micro_batch
    loss = build_loss(config.loss.name, **config.loss.options).to(device)
    loss.set_num_samples(config.global_batch, config.global_batch)
    loss.accuracy = False
    torch.manual_seed(0)
    model = build_model(
        config.model, loss.initial_scale, loss.initial_bias(config.global_batch), loss.learns_scale
    )
    lengths = draw_lengths(captions, m, read_text_size(model)[0])
    flops = count_flops(model, round(float(lengths.mean())))
    batches = [
        make_batch(model, m, device, lengths) for _ in range(config.num_micro_batches(comm.size()))
    ]
    engine = build_engine(model, config.optim, render_ds_config(config, comm.size()))
    engine.train()
    set_lr(engine, config.peak_lr)

    def prepare(batch: MicroBatch) -> tuple[Any, ...]:
        return batch["image"], Texts(batch["text"], batch.get("lengths")), batch["index"]

    towers = EngineTowers(engine, prepare)

    def step() -> None:
        features = forward_all(towers, batches, len(batches))
        _, leaves = loss_at_features(loss, features)
        backward_and_step(engine, surrogates(towers, batches, features, leaves))
        clamp_scale(engine, config.model.max_scale, leaves.scale.detach())

    return step, flops


def time_steps(step: Callable[[], Any], steps: int, warmups: int) -> list[float]:
    """Run `warmups` steps and then, without a pause, `steps` measured steps. Return the milliseconds of each."""
    for _ in range(warmups):
        step()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    clock.mark()
    for _ in range(steps):
        step()
        clock.mark()
    return clock.ms()


def peak_flops() -> float | None:
    """Return this GPU's 16-bit FLOP/s, or None if unknown. On a CPU, return an arbitrary number for test runs."""
    if not torch.cuda.is_available():
        return 1e12
    gpu = recognize(torch.cuda.get_device_name())
    return 1e12 * gpu.half if gpu else None


def peak_bytes() -> int:
    """Return the peak memory that torch has allocated on the GPU since the last reset.

    On a CPU, return the peak memory of this process since its start.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_accumulation(model: str, rehearse: bool) -> dict[str, Any]:
    """Compare the time of one step of several micro-batches with that of as many steps of one micro-batch each."""
    count, found = 2 if rehearse else 8, {}
    for name, k, steps in (("plain", 1, 2 * count), ("whole", count, 3)):
        config = settings(model, MICRO_BATCHES[model], k, rehearse)
        found[name] = statistics.median(
            time_steps(build_step(config)[0], steps, 1 if rehearse else 3)
        )
        gc.collect()  # free the memory of the previous engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    plain_ms = count * found["plain"]
    return {
        "micro_batch": config.micro_batch,
        "count": count,
        "ms": found["whole"],
        "plain_ms": plain_ms,
        "ratio": found["whole"] / plain_ms,
    }


# Runs


class EnoughError(Exception):
    """Raised after the requested number of steps."""


def run_steps(config: Config, steps: int) -> list[dict[str, Any]]:
    """Run the training loop for `steps` steps, and return the records of its log.

    The loop ends before it saves a checkpoint, so `steps` must be less than config.steps.
    """
    done = 0

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        if done > steps:
            raise EnoughError

    with tempfile.TemporaryDirectory() as folder:
        with ExitStack() as stack, suppress(EnoughError):
            run = build(config.model_copy(update={"runs": Path(folder)}), None, stack)
            run.loss.register_forward_pre_hook(count)
            train(run)
        lines = (run.folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return [record for line in lines if "loss" in (record := json.loads(line))]


def workers() -> int:
    return max(1, len(os.sched_getaffinity(0)) - 2)


def measure_peak(label: str, rehearse: bool) -> dict[str, Any]:
    """Measure the peak memory of a run, and compare it with the plan.

    torch counts only allocated memory. So the measured peak is compared with a plan without slack (fragmentation) and
    without the CUDA context.
    """
    x = SETTINGS[label]
    config = settings(
        x.model,
        x.micro_batch,
        x.count,
        rehearse,
        # The plan is for towers that are not compiled, so do not compile them.
        model={"activation_checkpointing": x.checkpointing, "compile": False},
        data={"source": "synthetic", "workers": 1 if rehearse else workers()},
        image_staging=x.pixels,
        deepspeed=read_ds_config(x.deepspeed, Path.cwd()),
    )
    towers = trace(config, config.micro_batch)
    bare = plan_memory(config, 1, towers, Assumptions(slack=0.0, context_gib=0.0))
    record = run_steps(config, 2 if rehearse else 3)[-1]
    reserved = (
        torch.cuda.max_memory_reserved()
        if torch.cuda.is_available()
        else record["peak_memory_bytes"]
    )
    return {
        "planned_bytes": bare.total,
        "moment": bare.peak,
        "measured_bytes": record["peak_memory_bytes"],
        "error": bare.total / record["peak_memory_bytes"] - 1,
        "planned_whole_bytes": plan_memory(config, 1, towers).total,
        "reserved_bytes": reserved,
    }


def measure_data(model: str, rehearse: bool) -> dict[str, Any]:
    """Measure the speed of a run that reads JPEG shards, and the fraction of time that it waits for data.

    The first steps do not count, because the data workers start during them.
    """
    shards, samples, size, each = (2, 40, 40, 2) if rehearse else (16, 150, 256, 4)
    with tempfile.TemporaryDirectory() as folder:
        make_shards(Path(folder), size, shards, samples)
        write_manifest(index_shards(Path(folder)))
        config = settings(
            model,
            MICRO_BATCHES[model],
            rehearse=rehearse,
            data={"shards": folder, "workers": 1 if rehearse else workers()},
            log={"every_steps": each, "tensorboard": False},
        )
        _, *found = run_steps(config, 3 * each)
    return {
        "micro_batch": config.micro_batch,
        "workers": config.data.workers,
        "samples_per_s": statistics.harmonic_mean(x["samples_per_s"] for x in found),
        "data_wait": statistics.mean(x["data_wait"] for x in found),
    }


# What is printed


def is_ours(name: str) -> bool:
    return "open_clip" not in name


def in_short(record: dict[str, Any]) -> str | None:
    """Return the most important number of a record as text, which is printed when a slice ends; None if it has none."""
    for key, text in (
        ("ratio", "{:.2f} times as long as plain steps"),
        ("ms", "{:.2f} ms"),
        ("error", "{:+.1%}"),
        ("first_s", "{:.1f} s"),
        ("data_wait", "{:.1%} of the time waiting for data"),
    ):
        if key in record:
            return text.format(record[key])
    return None


def tables(
    outcomes: dict[str, slices.Outcome], problem: Callable[[slices.Outcome], str]
) -> Iterator[str]:
    """Yield Markdown: for each kind of slices, a table of the results and a list of the slices without results.

    Args:
        outcomes: Name of a slice -> outcome.
        problem: Returns why a slice with this outcome has no results.
    """
    rows = {
        "step": step_rows,
        "first step": first_rows,
        "GradAccum": accumulation_rows,
        "peak": peak_rows,
        "data": data_rows,
    }
    for kind in KINDS:
        mine = {
            name.split(": ")[1]: x for name, x in outcomes.items() if name.startswith(f"{kind}: ")
        }
        found = {
            label: x.records[0] for label, x in mine.items() if x.records and in_short(x.records[0])
        }
        if found:
            yield from rows[kind](found)
        left_out = [f"{label}: {problem(x)}" for label, x in mine.items() if label not in found]
        if left_out:
            yield f"\nLeft out of {kind}: " + "; ".join(left_out) + "."


def gib(count: int) -> str:
    return f"{count / GIB:.1f}"


def step_rows(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "\n### Training steps on one GPU, bf16 autocast, pixels on the device\n"
    yield "| model | trainer | micro-batch | ms | samples/s | GFLOP per sample | MFU | goal | peak GiB |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for label in sorted(
        found, key=lambda label: list(MICRO_BATCHES).index(label.partition(", ")[0])
    ):
        x, (model, _, how) = found[label], label.partition(", ")
        who = how if "open_clip" in how else f"disco_ds {how}".strip()
        mfu = f"{x['mfu']:.0%}" if "mfu" in x else "unknown GPU"
        goal = f"{MFU_GOALS[model]:.0%}" if is_ours(label) else ""
        yield (
            f"| {model} | {who} | {x['micro_batch']:,} | {x['ms']:.1f} | {x['samples_per_s']:,.0f} | {x['gflop']:.1f} "
            f"| {mfu} | {goal} | {gib(x['peak_bytes'])} |"
        )


def first_rows(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "\n### First step with empty caches\n"
    yield "| model | micro-batch | s | goal |"
    yield "|---|---|---|---|"
    for label, x in found.items():
        yield f"| {label} | {x['micro_batch']:,} | {x['first_s']:.1f} | <= {FIRST_GOAL_S} |"


def accumulation_rows(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "\n### GradAccum and plain steps on the same number of samples\n"
    yield "| model | micro-batches | GradAccum ms | plain ms | ratio | goal |"
    yield "|---|---|---|---|---|---|"
    for label, x in found.items():
        yield (
            f"| {label} | {x['count']} x {x['micro_batch']:,} | {x['ms']:.1f} | {x['plain_ms']:.1f} | {x['ratio']:.2f} "
            f"| <= {RATIO_GOAL} |"
        )


def peak_rows(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "\n### Peak memory, planned and measured, GiB\n"
    yield "| run | planned | measured | error | goal | peak in | planned with slack | reserved |"
    yield "|---|---|---|---|---|---|---|---|"
    for label, x in found.items():
        yield (
            f"| {label} | {gib(x['planned_bytes'])} | {gib(x['measured_bytes'])} | {x['error']:+.1%} | "
            f"{PEAK_GOAL:.0%} | {x['moment']} | {gib(x['planned_whole_bytes'])} | {gib(x['reserved_bytes'])} |"
        )


def data_rows(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "\n### A run from JPEG shards\n"
    yield "| model | micro-batch | workers | samples/s | waiting for data |"
    yield "|---|---|---|---|---|"
    for label, x in found.items():
        rates = f"{x['samples_per_s']:,.0f} | {x['data_wait']:.1%}"
        yield f"| {label} | {x['micro_batch']:,} | {x['workers']} | {rates} |"
