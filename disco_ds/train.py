"""Train a recipe: `deepspeed --module disco_ds.train --config NAME [key=value ...]`, or under torchrun, or alone.

Builds everything from the settings, then runs the loop. Nothing here computes: the step is in step.py.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from disco_ds import checkpoint, comm
from disco_ds.arguments import count_ranks, describe_run, parse_args
from disco_ds.checkpoint import Saved
from disco_ds.config import Config, load_config, render_ds_config
from disco_ds.data import (
    ImageSpec,
    Loader,
    Manifest,
    MicroBatch,
    StepData,
    augment,
    load_manifest,
    merge_states,
    resolve_shards,
)
from disco_ds.engine import Engine, build_engine, learning_rate, set_lr
from disco_ds.eval import Accuracy, classify_sets
from disco_ds.losses import build_loss
from disco_ds.losses.base import Loss
from disco_ds.metrics import Metrics
from disco_ds.model import build_model, build_tokenizer, read_preprocessing, read_text_size
from disco_ds.run_folder import FINISHED, RunFolder, find_run_folder, make_run_folder, mark_finished
from disco_ds.step import train_step
from disco_ds.watchdog import die_with_launcher


class StopError(RuntimeError):
    """All ranks have agreed to stop."""


@dataclass
class Run:
    """Everything a run is made of, once it is built."""

    config: Config
    folder: Path
    engine: Engine
    loss: Loss
    loader: Loader
    metrics: Metrics
    image: ImageSpec
    identity: dict[str, Any]
    first_step: int


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
        batch = batch.to(device)
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
    checkpoint.save(run.folder, step, run.engine, run.identity, run.loader.state_dict(), run.loss.state_dict())
    if comm.rank() == 0:
        checkpoint.remove_old(run.folder, run.config.checkpoint.keep_last)


def build(config: Config, resume: str | None, stack: ExitStack) -> Run:
    """Everything, in an order that finds mistakes before work is done. Collective.

    Raises: ValueError on every rank alike.
    """
    ranks = comm.size()
    render_ds_config(config, ranks)
    loss = build_loss(config.loss.name, **config.loss.options).to(comm.local_device())
    with comm.together("data"):
        manifest = load_manifest(resolve_shards(config.data.shards)) if config.data.shards else None
    with comm.together("model"):
        seed_generators(config.seed)
        model = build_model(config.model, loss.initial_scale, loss.initial_bias, loss.learns_scale)
    preprocessing = read_preprocessing(model)
    image = ImageSpec(preprocessing.size, preprocessing.interpolation, preprocessing.resize_mode)
    identity = checkpoint.identity(config, ranks, manifest.fingerprint if manifest else "synthetic")
    folder = open_folder(config, resume, stack) if resume else None
    saved = None
    with comm.together("data"):
        if folder:
            saved = checkpoint.read(checkpoint.find_latest(folder))
            checkpoint.refuse_changes(saved.meta["identity"], identity)
        loader = build_loader(config, manifest, model, image, saved)
    stack.callback(loader.close)
    folder = folder or open_folder(config, None, stack)
    ds_config = render_ds_config(config, ranks, folder)
    write_settings(config, ds_config, folder)
    # Dropout must differ between ranks; the weights above must not.
    seed_generators(config.seed + 1 + comm.rank())
    engine = build_engine(model, config.optim, ds_config)
    if saved:
        checkpoint.restore(saved, engine)
    first_step = saved.step if saved else 0
    metrics = Metrics(folder, engine.monitor.write_events, config.global_batch, config.num_steps, first_step)
    stack.callback(metrics.close)
    return Run(config, folder, engine, loss, loader, metrics, image, identity, first_step)


def seed_generators(seed: int) -> None:
    """Every generator a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def build_loader(
    config: Config, manifest: Manifest | None, model: torch.nn.Module, image: ImageSpec, saved: Saved | None
) -> Loader:
    """This rank's part of the data order, from the start or from where the checkpoint left it."""
    context_length, vocab_size = read_text_size(model)
    return Loader(
        config.data,
        manifest,
        image,
        build_tokenizer(config.model, model),
        context_length,
        vocab_size,
        rank=comm.rank(),
        size=comm.size(),
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        seed=config.seed,
        state=merge_states([part["data"] for part in saved.ranks]) if saved else None,
    )


def open_folder(config: Config, resume: str | None, stack: ExitStack) -> Path:
    """The run's folder, made or found and locked by rank 0, known to all. Collective."""
    opened: RunFolder | None = None
    with comm.together("run folder"):
        if comm.rank() == 0:
            runs, name = config.runs, config.name
            opened = find_run_folder(runs, name, resume) if resume else make_run_folder(runs, name)
            stack.callback(opened.close)
            if (opened.path / FINISHED).exists():
                raise ValueError(f"{opened.path} has done all its steps; start a new run without --resume")
    return comm.broadcast(opened.path if opened else None)


def write_settings(config: Config, ds_config: dict[str, Any], folder: Path) -> None:
    """config.yaml and ds_config.json: what this run really used."""
    if comm.rank() == 0:
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        (folder / "ds_config.json").write_text(json.dumps(ds_config, indent=2) + "\n", encoding="utf-8")


def finish(run: Run) -> None:
    """Evaluate, and say what came of it. Collective."""
    config = run.config
    results = classify_sets(run.engine, config, run.image, build_tokenizer(config.model, run.engine.module))
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
    with ExitStack() as stack:
        try:
            config = load_config(args.config, args.overrides)
            if args.dry_run:
                print(describe_run(config, count_ranks(args.ranks, args.hostfile)))
                return 0
            die_with_launcher()
            comm.init(config.timeout_s)
            stack.callback(comm.close)
            run = build(config, args.resume, stack)
        except ValueError as error:
            return _fail(error, first, code=2)
        if first:
            print(f"{run.folder}: {config.describe(comm.size())}", flush=True)
        try:
            train(run)
        except (StopError, FloatingPointError) as error:
            return _fail(error, first, code=1)
        finish(run)
    return 0


def _fail(error: Exception, first: bool, code: int) -> int:
    if first:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
