"""Train a recipe: `deepspeed --module disco_ds.train --config NAME [key=value ...]`, or under torchrun, or alone.

The loop, how ranks agree to stop, and the end. What a run is made of is in build.py, the step in step.py.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from disco_ds import checkpoint, comm
from disco_ds.arguments import count_ranks, describe_run, fail, parse_args, refuse_launch
from disco_ds.build import Run, build
from disco_ds.config import Config, load_config
from disco_ds.data import MicroBatch, StepData, augment
from disco_ds.engine import learning_rate, set_lr
from disco_ds.eval import Accuracy, describe, evaluate_sets, record
from disco_ds.interrupt import Interrupts
from disco_ds.report import REPORT, save_examples, told_only, write_report
from disco_ds.run_folder import mark_finished
from disco_ds.step import train_step
from disco_ds.watchdog import die_with_launcher


class StopError(RuntimeError):
    """All ranks have agreed to stop."""


class AskedToStopError(RuntimeError):
    """A signal has come, and all ranks have saved."""


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
            agree=partial(agree, step, data, run.interrupts),
        )
        done = step + 1
        if done % config.log.every_steps == 0 or done == num_steps:
            norm = None if out.grad_norm is None else out.grad_norm.item()
            values = {name: value.item() for name, value in out.metrics.items()}
            values |= {"scale": out.scale.item(), "lr": lr, "grad_norm": norm}
            run.metrics.log(done, values, torch.cat([batch.index for batch in data.micro_batches]), run.loader.broken)
        every = config.checkpoint.every_steps
        if done == num_steps or run.interrupts.save or (every and done % every == 0):
            save(run, done)
        if run.interrupts.stop and done < num_steps:
            raise AskedToStopError(f"asked to stop, saved after step {done:,}; --resume latest goes on from there")
        if config.eval.every_steps and done % config.eval.every_steps == 0 and done < num_steps:
            evaluate(run, done)


def agree(step: int, data: StepData, interrupts: Interrupts, loss: Tensor) -> None:
    """Go on together or stop together, before anything is changed. Collective, one all_reduce.

    What `interrupts` wish for is agreed on too, and done after the step.

    Raises: StopError for a data error or a loss that is not finite, naming step and ranks.
    """
    flags = torch.tensor([0.0, float(data.error is not None), *interrupts.wishes], device=loss.device)
    flags[0] = ~torch.isfinite(loss.detach())
    not_finite, has_error, save, stop = comm.all_reduce_max(flags).tolist()
    interrupts.agree(bool(save), bool(stop))
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
        view = partial(augment, batch.image, batch.epoch, batch.index, config.seed, config.data.augment)
        return view(), view(view=1) if config.model.two_views else batch.text, batch.index

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
            settings = run.config.checkpoint
            checkpoint.remove_old(run.folder, settings.keep_last, settings.keep_every_steps)
    run.interrupts.saved()


def finish(run: Run) -> None:
    """Evaluate, and say what came of it. Collective."""
    config = run.config
    values = evaluate(run, config.num_steps)
    if comm.rank() == 0:
        mark_finished(run.folder, {"steps": config.num_steps, **values})
        with told_only("report.png was not drawn"):
            monitor = run.engine.monitor.tb_monitor
            write_report(run.folder, monitor.summary_writer if monitor else None)
        tensorboard = Path(sys.executable).with_name("tensorboard")
        command = shlex.join(
            [str(tensorboard) if tensorboard.exists() else "tensorboard", "--logdir", str(run.folder.parent)]
        )
        print(f"run folder: {run.folder}\npictures: {run.folder / REPORT}\ncurves: {command}", flush=True)


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Evaluate on all sets and note the figures, which are returned. Collective; the run goes on as if it had not."""
    start = time.monotonic()
    results = evaluate_sets(run.engine, run.sets, run.image, run.tokenizer, run.config.micro_batch)
    values = record(results)
    run.metrics.note(step, values)
    run.metrics.skip(time.monotonic() - start)
    if comm.rank() == 0 and results:
        print(describe(results), flush=True)
        with told_only("the images for report.png were not kept"):
            shown = [result for result in results if isinstance(result, Accuracy)]
            if shown:
                save_examples(run.folder, shown[0].name, shown[0].examples)
    return values


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: done; 1: all ranks stopped together; 2: a mistake in settings or data, told before any work;
    3: asked to stop by a signal, and saved."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING if first else logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = load_config(args.config, args.overrides)
        if args.dry_run:
            print(describe_run(config, count_ranks(args.ranks, args.hostfile)))
            return 0
        refuse_launch()
    except ValueError as error:
        # Before the ranks know of each other: each host tells of its own mistake.
        return fail(error, os.environ.get("LOCAL_RANK", "0") == "0", code=2)
    die_with_launcher()
    with comm.session(config.timeout_s), ExitStack() as stack:
        try:
            run = build(config, args.resume, stack)
        except ValueError as error:
            return fail(error, first, code=2)
        if first:
            print(f"{run.folder}: {config.describe(comm.size())}", flush=True)
        try:
            train(run)
            finish(run)
        except (StopError, FloatingPointError, comm.AgreedError) as error:
            return fail(error, first, code=1)
        except AskedToStopError as error:
            return fail(error, first, code=3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
