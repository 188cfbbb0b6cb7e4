"""Measure the memory of a training step and the time of its phases for each loss, as in DisCo-CLIP's Tables 1 and 4.

    python tools/bench_step.py --ranks 2 --batch 512 --micro-batch 64              two CPU ranks, or two GPUs
    python tools/bench_step.py --ranks 8 --batch 32768 --micro-batch 512 --model ViT-B-32 --deepspeed zero1
    python tools/bench_step.py --model text.json --towers auto open_clip --captions 5-11 --losses disco_fused

A method is a loss with or without GradAccum, with the faster towers or open_clip's. Each method runs whole optimizer
steps on random data. The methods take turns, and the results are medians over the steps. A step has three phases
(grad_accum.py):
  forward               the forward passes of the towers
  loss                  forward and backward of the loss, including its collectives
  backward and update   the backward passes of the towers, the forward passes that GradAccum repeats, the reduction of
                        the gradients, and the update
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from train_rates import draw_lengths

from disco_ds.config import check_config, render_ds_config
from disco_ds.config.ds_config import merge, read_ds_config
from disco_ds.data import MicroBatch
from disco_ds.distributed import comm
from disco_ds.losses import build_loss, list_losses
from disco_ds.models.clip import Texts, build_model, read_text_size
from disco_ds.plan.towers import make_batch
from disco_ds.training.engine import build_engine, set_lr
from disco_ds.training.step import train_step

PHASES = ("step/forward", "step/loss", "step/backward and update")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=512, help="global batch")
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=64,
        help="micro-batch of the methods with GradAccum; the others have one micro-batch",
    )
    parser.add_argument("--model", default="quickstart")
    parser.add_argument(
        "--deepspeed", default="zero1", help="a ds_config: a name in ds_configs/ or a file"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "autocast"), default="fp32", help="autocast: bf16"
    )
    parser.add_argument(
        "--losses", nargs="*", default=["clip", "disco", "disco_fused"], choices=list_losses()
    )
    parser.add_argument(
        "--towers", nargs="*", default=["auto"], choices=("auto", "open_clip"), help="model.towers"
    )
    parser.add_argument(
        "--captions",
        default="full",
        help="numbers of tokens per caption: full, mean19 (like alt texts), or a range such as 5-11",
    )
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def build_step(
    args: argparse.Namespace, loss_name: str, micro_batch: int, towers: str
) -> Callable[[], Any]:
    """Build an engine for one method, and return a function that runs one training step with it."""
    precision: dict[str, Any] = {
        "torch_autocast": {"enabled": args.precision == "autocast", "dtype": "bfloat16"}
    }
    config = check_config(
        {
            "name": "bench",
            "global_batch": args.batch,
            "micro_batch": micro_batch,
            "steps": 1000,
            "model": {"name": args.model, "towers": towers},
            "data": {"source": "synthetic"},
            "optim": {"warmup_steps": 0},
            "log": {"tensorboard": False},
            "deepspeed": merge(read_ds_config(args.deepspeed, Path.cwd()), precision),
        },
        "bench_step",
    )
    loss = build_loss(loss_name).to(comm.local_device())
    loss.set_num_samples(micro_batch, micro_batch)
    torch.manual_seed(0)
    model = build_model(
        config.model, loss.initial_scale, loss.initial_bias(config.global_batch), loss.learns_scale
    )
    lengths = draw_lengths(args.captions, micro_batch, read_text_size(model)[0])
    engine = build_engine(model, config.optim, render_ds_config(config, comm.size()))
    engine.train()
    set_lr(engine, 1e-4)
    batches = [
        make_batch(model, micro_batch, comm.local_device(), lengths)
        for _ in range(config.num_micro_batches(comm.size()))
    ]

    def prepare(batch: MicroBatch) -> tuple[Any, ...]:
        return batch.image, Texts(batch.text, batch.lengths), batch.index

    return lambda: train_step(engine, loss, batches, prepare, config.model.max_scale)


def measure(step: Callable[[], Any]) -> dict[str, float]:
    """Run a step. Return the milliseconds of the step and of its phases.

    On a GPU, also return the peak memory of the step minus the memory at its start, in MiB.
    """
    activities = [ProfilerActivity.CPU] + (
        [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    comm.barrier()
    with profile(activities=activities) as profiler:
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    kind = "device_time_total" if torch.cuda.is_available() else "cpu_time_total"
    found = {event.key: getattr(event, kind) / 1000 for event in profiler.key_averages()}
    row = {phase: found.get(phase, float("nan")) for phase in PHASES}
    if torch.cuda.is_available():
        row["memory"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"step": 1000 * seconds} | row


def run(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure all methods. Return each method's medians, each of which is the largest of all ranks. Collective."""
    whole = args.batch // comm.size()
    steps = {}
    for name, towers in itertools.product(args.losses, args.towers):
        label = name if len(args.towers) == 1 else f"{name}, {towers}"
        steps[label] = build_step(args, name, whole, towers)
        if whole > args.micro_batch:
            steps[f"{label} + GradAccum"] = build_step(args, name, args.micro_batch, towers)
    rows: dict[str, list[dict[str, float]]] = {label: [] for label in steps}
    for repeat in range(args.repeats + 1):
        for label, step in steps.items():
            if repeat == 0:
                step()  # a warmup step, which allocates buffers and chooses kernels
            else:
                rows[label].append(measure(step))
    medians = {
        label: {key: statistics.median(row[key] for row in found) for key in found[0]}
        for label, found in rows.items()
    }
    for row in medians.values():
        worst: Tensor = comm.all_reduce_max(
            torch.tensor(list(row.values()), device=comm.local_device())
        )
        row |= dict(zip(row, worst.tolist(), strict=True))
    return medians


def print_table(rows: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{args.model}, B {args.batch:,}, {args.ranks} ranks, micro-batch {args.micro_batch:,}, {args.deepspeed}, "
        f"{args.precision}, captions {args.captions}, {device}, torch {torch.__version__}"
    )
    columns = list(next(iter(rows.values())))
    print(
        f"{'ms; memory in MiB':34}"
        + "".join(f"{name.removeprefix('step/'):>22}" for name in columns)
    )
    for label, row in rows.items():
        print(f"{label:34}" + "".join(f"{row[name]:22.1f}" for name in columns))


def worker(rank: int, args: argparse.Namespace, port: int) -> None:
    """Run one rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "KINETO_LOG_LEVEL": "99"}
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    with comm.session(timeout_s=1800):
        rows = run(args)
    if rank == 0:
        print_table(rows, args)


def main() -> int:
    args = parse_args()
    if args.batch % (args.ranks * args.micro_batch):
        print(f"--batch {args.batch} is not a multiple of ranks x micro-batch", file=sys.stderr)
        return 2
    from torch.multiprocessing import spawn

    spawn(worker, (args, comm._free_port()), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
