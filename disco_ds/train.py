"""Train a recipe: `deepspeed --module disco_ds.train --config NAME [key=value ...]`, or under torchrun, or alone.

The loop, how ranks agree to stop, and the end. What a run is made of is in build.py, the step in step.py.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from disco_ds import checkpoint, comm
from disco_ds.arguments import count_ranks, describe_run, parse_args
from disco_ds.build import Run, build
from disco_ds.config import Config, load_config
from disco_ds.data import MicroBatch, StepData, augment
from disco_ds.engine import learning_rate, set_lr
from disco_ds.eval import Accuracy, classify_sets
from disco_ds.run_folder import mark_finished
from disco_ds.step import train_step
from disco_ds.watchdog import die_with_launcher


class StopError(RuntimeError):
    """All ranks have agreed to stop."""


def train(run: Run) -> None:
    """The loop. Collective."""
    config, engine, num_steps = run.config, run.engine, run.config.num_steps
    engine.train()
    for step in range(run.first_step, num_steps):
        data = run.loader.read_step()
        run.metrics.add_wait(data.wait_s)
        lr = learning_rate(step, num_steps, config.peak_lr, config.optim)
        set_lr(engine, lr)
        out = train_step(
            engine,
            run.loss,
            hold_pixels(data.micro_batches, config.pixels),
            prepare(config),
            config.model.max_scale,
            agree=partial(agree, step, data),
        )
        done = step + 1
        if done % config.log.every_steps == 0 or done == num_steps:
            norm = None if out.grad_norm is None else out.grad_norm.item()
            values = {name: value.item() for name, value in out.metrics.items()}
            values |= {"scale": out.scale.item(), "lr": lr, "grad_norm": norm}
            run.metrics.log(done, values, torch.cat([batch.index for batch in data.micro_batches]), run.loader.broken)
        if done == num_steps or (config.checkpoint.every_steps and done % config.checkpoint.every_steps == 0):
            save(run, done)


def agree(step: int, data: StepData, loss: Tensor) -> None:
    """Go on together or stop together, before anything is changed. Collective, one all_reduce.

    Raises: StopError for a data error or a loss that is not finite, naming step and ranks.
    """
    problems = torch.tensor([float(data.error is not None), 0.0], device=loss.device)
    problems[1] = ~torch.isfinite(loss.detach())
    has_error, not_finite = comm.all_reduce_max(problems).tolist()
    if not (has_error or not_finite):
        return
    reports = comm.gather_objects((data.error, loss.item()))
    if has_error:
        told = {rank: error for rank, (error, _) in enumerate(reports) if error is not None}
        raise StopError(f"step {step}: data failed on rank {', '.join(map(str, told))}: {next(iter(told.values()))}")
    ranks = [str(rank) for rank, (_, value) in enumerate(reports) if not torch.isfinite(torch.tensor(value))]
    raise StopError(f"step {step}: the loss is not finite on rank {', '.join(ranks)}; nothing was updated")


def prepare(config: Config) -> Callable[[MicroBatch], tuple[Tensor, Tensor, Tensor]]:
    """What step.py calls once per pass: to the device, and augmented there by (seed, epoch, id), so equal each time."""
    device = comm.local_device()

    def on_device(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        batch = batch.to(device, non_blocking=True)
        return augment(batch.image, batch.epoch, batch.index, config.seed, config.data.augment), batch.text, batch.index

    return on_device


def hold_pixels(batches: list[MicroBatch], where: str) -> list[MicroBatch]:
    """The step's micro-batches, where they shall wait between the two passes."""
    device = comm.local_device()
    if where == "device":
        return [batch.to(device) for batch in batches]
    return [batch.pin_memory() for batch in batches] if device.type != "cpu" else batches


def save(run: Run, step: int) -> None:
    """Write a checkpoint, then remove old ones. Collective."""
    meta = {"step": step, "num_steps": run.config.num_steps, "identity": run.identity}
    checkpoint.save(run.folder, meta, run.engine, run.loader.state_dict(), run.loss.state_dict())
    with comm.together("removing old checkpoints"):
        if comm.rank() == 0:
            checkpoint.remove_old(run.folder, run.config.checkpoint.keep_last)


def finish(run: Run) -> None:
    """Evaluate, and say what came of it. Collective."""
    config = run.config
    results = classify_sets(run.engine, run.sets, config, run.image, run.tokenizer)
    values = {
        f"eval/{name}_{kind}": getattr(value, kind) for name, value in results.items() for kind in ("top1", "top5")
    }
    run.metrics.note(config.num_steps, values)
    if comm.rank() == 0:
        mark_finished(run.folder, {"steps": config.num_steps, **values})
        print(describe_results(results))
        print(f"run folder: {run.folder}\ncurves: tensorboard --logdir {shlex.quote(str(run.folder))}", flush=True)


def describe_results(results: dict[str, Accuracy]) -> str:
    """A line per evaluated set, accuracy against chance."""
    return "\n".join(
        f"{name}: top-1 {value.top1:.2%}, top-5 {value.top5:.2%} of {value.num_images:,} images among "
        f"{value.num_classes:,} labels (chance {value.chance:.2%})"
        for name, value in results.items()
    )


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: done; 1: all ranks stopped together; 2: a mistake in settings or data, told before any work."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING if first else logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = load_config(args.config, args.overrides)
        if args.dry_run:
            print(describe_run(config, count_ranks(args.ranks, args.hostfile)))
            return 0
    except ValueError as error:
        # Before the ranks know of each other: each host tells of its own mistake.
        return _fail(error, os.environ.get("LOCAL_RANK", "0") == "0", code=2)
    die_with_launcher()
    with comm.session(config.timeout_s), ExitStack() as stack:
        try:
            run = build(config, args.resume, stack)
        except ValueError as error:
            return _fail(error, first, code=2)
        if first:
            print(f"{run.folder}: {config.describe(comm.size())}", flush=True)
        try:
            train(run)
            finish(run)
        except (StopError, FloatingPointError, comm.AgreedError) as error:
            return _fail(error, first, code=1)
    return 0


def _fail(error: Exception, tells: bool, code: int) -> int:
    if tells:
        print(f"error on {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
