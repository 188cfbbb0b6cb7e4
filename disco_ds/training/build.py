"""Builds what a run is made of from its settings, in an order that finds mistakes before work is done.

The run itself is loop.py's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.runtime.utils import set_random_seed
from torch import nn

from disco_ds.checkpoints import checkpoint
from disco_ds.checkpoints.changes import refuse_unchangeable
from disco_ds.checkpoints.checkpoint import RunState, Saved
from disco_ds.checkpoints.resume import (
    choose,
    find_started,
    record_changes,
    restore,
    set_newer_aside,
)
from disco_ds.checkpoints.saver import Saver
from disco_ds.checkpoints.upload import start_uploads
from disco_ds.config import Config, render_ds_config
from disco_ds.data import (
    ImageSpec,
    Loader,
    SampleForm,
    Share,
    Source,
    Staging,
    fingerprint,
    load_sources,
    merge_states,
)
from disco_ds.data.sources.listing import refuse_remote
from disco_ds.distributed import comm
from disco_ds.distributed.agreement import check_agreement
from disco_ds.distributed.diagnostics import collect_in
from disco_ds.distributed.heartbeat import Heartbeat
from disco_ds.distributed.host_share import HostShare, share_host
from disco_ds.distributed.interrupt import Interrupts
from disco_ds.eval import ImageSet, load_sets
from disco_ds.losses import build_loss
from disco_ds.losses.base import Loss
from disco_ds.metrics.anomalies import AnomalyDetector
from disco_ds.metrics.logger import MetricsLogger, rewind_tensorboard
from disco_ds.metrics.tracking import WandbRun, check_packages, open_wandb
from disco_ds.models.clip import (
    build_model,
    build_tokenizer,
    check_image_size,
    read_architecture,
    read_preprocessing,
    read_text_size,
    register_config,
)
from disco_ds.models.compile_check import check_compiled
from disco_ds.models.flops import peak_samples_per_s
from disco_ds.models.pretrained import (
    download_weights,
    find_weights,
    read_overrides,
    warn_of_random_tower,
)
from disco_ds.runs.run_folder import AUTO
from disco_ds.runs.shared_folder import open_folder, removed_if_refused, write_settings
from disco_ds.training.engine import Engine, build_engine
from disco_ds.training.evaluation import Evaluation

SAME_FILES = "their files differ: every host needs the same shards, manifest, csv and model config"


@dataclass
class Run:
    """What a run consists of, once it is built."""

    config: Config
    folder: Path
    engine: Engine
    loss: Loss
    loader: Loader
    metrics: MetricsLogger
    anomalies: AnomalyDetector
    evaluation: Evaluation
    saver: Saver
    interrupts: Interrupts
    heartbeat: Heartbeat
    first_step: int
    """Number of steps completed before this start of the run."""
    skipped_in_a_row: int = 0
    """Batches skipped in a row because their loss was not finite."""


def build(
    config: Config,
    resume: str | None,
    stack: ExitStack,
    unattended: bool = False,
    allow_change: Sequence[str] = (),
) -> Run:
    """Build a run: data, model, the checkpoint to resume from, loader, folder, engine, in this order. Collective.

    Args:   resume: "latest", a run folder to resume in, or one of its checkpoints; "auto": as "latest" if that has a
            complete checkpoint, else a new run; None for a new run; stack: closes what is opened here; unattended: take
            an older checkpoint where the newest is damaged, as "auto" does; allow_change: settings that may differ from
            the checkpoint's.
    Raises: ValueError on every rank alike; FinishedError, one of them, if all steps are done already.
    """
    heartbeat = stack.enter_context(Heartbeat(config.lost_after_s, config.timeout_s))
    share = share_host()  # early, because it sets the number of torch's threads
    refuse_unchangeable(allow_change, resume)
    if resume == AUTO:
        resume = comm.from_rank_0("run folder", partial(find_started, config))
        unattended = True
    render_ds_config(
        config, comm.size()
    )  # only to refuse mistakes early; the run's own names the run folder
    comm.from_rank_0("log", partial(check_packages, config))
    loss = choose_loss(config)
    sources, sets = open_sources(config)
    identity = identify(config, sources)
    config = config.with_steps(sum(source.num_samples for source in sources))
    # The checkpoint is chosen before the model, which takes its weights, and the loader, which starts at its cursor. A
    # new folder is made only when the settings have turned out to fit together.
    folder = open_folder(config, resume, stack) if resume else None
    saved = (
        choose(folder, resume, config, identity, unattended, allow_change)
        if folder and resume
        else None
    )
    first_step = saved.step if saved else 0
    model, tokenizer, image = build_towers(config, loss, restored=saved is not None)
    with comm.all_or_none("data"):
        loader = build_loader(config, sources, model, image, tokenizer, saved, share)
    stack.callback(loader.close)
    loss.set_num_samples(loader.num_samples, config.num_steps * config.global_batch)
    best_pace = peak_samples_per_s(
        model, config.log.peak_flops
    )  # before ZeRO partitions the parameters
    folder = folder or open_folder(config, None, stack)
    with removed_if_refused(folder, new=saved is None):
        heartbeat.folder = collect_in(folder)
        ds_config = write_settings(config, folder)
        wandb = open_wandb(config, folder, stack)
        engine = start_engine(config, model, loss, ds_config, saved)
        record_changes(folder, saved, config, identity)
    metrics = open_metrics(
        config, folder, engine, wandb, stack, first_step, best_pace, loader.num_samples
    )
    anomalies = watch_anomalies(config, loss, metrics, saved)
    shape = checkpoint.shape(config, comm.size())

    def read_state(step: int) -> RunState:
        meta = {
            "step": step,
            "num_steps": config.num_steps,
            "identity": identity,
            "shape": shape,
            "trouble": anomalies.state_dict(),
        }
        return RunState(meta, loader.state_dict(), loss.state_dict())

    uploads = start_uploads(config, folder, stack)
    saver = Saver(
        folder, config.checkpoint, engine, read_state, heartbeat, metrics.add_save, uploads
    )
    stack.callback(saver.close)
    evaluation = Evaluation(
        sets=sets,
        engine=engine,
        image=image,
        tokenizer=tokenizer,
        batch_size=config.micro_batch,
        global_batch=config.global_batch,
        num_samples=loader.num_samples,
        folder=folder,
        metrics=metrics,
        heartbeat=heartbeat,
        wandb=wandb,
    )
    return Run(
        config=config,
        folder=folder,
        engine=engine,
        loss=loss,
        loader=loader,
        metrics=metrics,
        anomalies=anomalies,
        evaluation=evaluation,
        saver=saver,
        interrupts=Interrupts(60 * config.checkpoint.every_minutes, lambda: saver.is_writing),
        heartbeat=heartbeat,
        first_step=first_step,
    )


def open_metrics(
    config: Config,
    folder: Path,
    engine: Engine,
    wandb: WandbRun | None,
    stack: ExitStack,
    first_step: int,
    best_pace: float | None,
    num_samples: int,
) -> MetricsLogger:
    """The records of the run, which DeepSpeed's monitors and W&B get as well. Collective."""
    monitors = {
        "TensorBoard": engine.monitor.tb_monitor,
        "W&B": wandb,
        "csv_monitor": engine.monitor.csv_monitor,
        "Comet": engine.monitor.comet_monitor,
    }
    writers = {
        name: monitor.write_events for name, monitor in monitors.items() if monitor is not None
    }
    metrics = MetricsLogger(
        folder,
        writers,
        config.global_batch,
        config.num_steps,
        first_step,
        best_pace,
        num_samples,
    )
    stack.callback(metrics.close)
    return metrics


def watch_anomalies(
    config: Config, loss: Loss, metrics: MetricsLogger, saved: Saved | None
) -> AnomalyDetector:
    """Build the detector of spikes and collapse, with its state in the checkpoint."""
    return AnomalyDetector(
        metrics.note,
        skip=config.on_spike == "skip",
        max_scale=config.model.max_scale if loss.learns_scale else None,
        warmup_steps=config.optim.warmup_steps,
        state=saved.meta["trouble"] if saved else None,
    )


def check_without_data(config: Config) -> None:
    """Refuse what a start would refuse before it looks at data: packages, loss, options, model, forbidden shards.

    Raises: ValueError, as the start would.
    """
    check_packages(config)
    make_loss(config)
    check_model(config)
    for text in (*(part.shards for part in config.data.parts), *config.eval.sets):
        if text is not None:
            refuse_remote(text, config.data.remote)


def check_model(config: Config) -> None:
    """Refuse a model that does not exist, or weights that are not there. Raises: ValueError."""
    read_architecture(config.model)
    find_weights(register_config(config.model.name), config.model)
    warn_of_random_tower(config.model)


def make_loss(config: Config) -> Loss:
    """The loss on the CPU. Raises: ValueError for one that does not exist, or does not fit the optimizer."""
    loss = build_loss(config.loss.name, **config.loss.options)
    if config.optim.tau_lr is not None and not loss.learns_scale:
        raise ValueError(
            f"optim.tau_lr is for a learned logit scale, and loss {config.loss.name} learns none"
        )
    return loss


def choose_loss(config: Config) -> Loss:
    """Build the loss on this rank's device. Collective. Raises: ValueError on every rank alike, see make_loss."""
    with comm.all_or_none("loss"):  # a user's own may be missing on one host
        loss = make_loss(config)
    return loss.to(comm.local_device())


def open_sources(config: Config) -> tuple[list[Source], list[ImageSet]]:
    """What to train on and what to evaluate on. Collective."""
    with comm.all_or_none("data"):
        return load_sources(config.data), load_sets(config.eval, config.data)


def build_towers(
    config: Config, loss: Loss, restored: bool = False
) -> tuple[nn.Module, Any, ImageSpec]:
    """Build the model, equal on every rank, its tokenizer, and the description of its images. Collective.

    Args:   restored: a checkpoint's weights come next, so that pretrained ones are neither needed nor fetched.
    """
    if not restored:
        with comm.all_or_none("model"):
            name = register_config(config.model.name)
            find_weights(name, config.model)
            if os.environ["LOCAL_RANK"] == "0":  # the other ranks of the host then find the files
                download_weights(name, config.model)
        if comm.rank() == 0:
            warn_of_random_tower(config.model)
    with comm.all_or_none("model"):
        set_random_seed(config.seed)
        start = loss.initial_scale, loss.initial_bias, loss.learns_scale
        model = build_model(config.model, *start, pretrained=not restored)
        check_image_size(config.model, model)
        check_compiled(config, model, comm.size())
        tokenizer = build_tokenizer(config.model, model)
    preprocessing = read_preprocessing(model)
    return (
        model,
        tokenizer,
        ImageSpec(preprocessing.size, preprocessing.interpolation, preprocessing.resize_mode),
    )


def identify(config: Config, sources: list[Source]) -> dict[str, Any]:
    """The settings that must not change when the run is resumed, see checkpoint.identity. Collective.

    Raises: ValueError on every rank alike where hosts have other shards or another model config under the same path.
    """
    # Synthetic data are identified by data.num_samples, which is one of the settings compared.
    data = "synthetic" if config.data.source == "synthetic" else fingerprint(config.data, sources)
    with comm.all_or_none("model"):
        found = checkpoint.identity(config, data, read_architecture(config.model))
        # Export and evaluation read it, when the weights' folder may be gone.
        found["model.preprocess"] = read_overrides(register_config(config.model.name), config.model)
    # Paths agree by now, but a path may name another file on each host.
    same = ("data.shards", "model.config", "model.preprocess")
    check_agreement({key: found.get(key) for key in same}, SAME_FILES)
    return found


def start_engine(
    config: Config, model: nn.Module, loss: Loss, ds_config: dict[str, Any], saved: Saved | None
) -> Engine:
    """Build the engine, new or restored with the loss from a checkpoint; newer ones are set aside. Collective."""
    # The weights, drawn before, must be equal on all ranks; dropout, drawn from here on, must differ.
    set_random_seed(config.seed + 1 + comm.rank())
    new_engine = partial(build_engine, model, config.optim, ds_config)
    if saved is None:
        return new_engine()
    engine = restore(saved, config, model, new_engine)
    with comm.all_or_none("the loss's state"):
        loss.load_state_parts(saved.states("loss"))
    set_newer_aside(saved)
    rewind_tensorboard(engine.monitor, saved.step * config.global_batch)
    return engine


def build_loader(
    config: Config,
    sources: list[Source],
    model: nn.Module,
    image: ImageSpec,
    tokenizer: Any,
    saved: Saved | None,
    share: HostShare,
) -> Loader:
    """This rank's part of the data order, from the start or from where the checkpoint left it."""
    return Loader(
        config.data,
        sources,
        SampleForm(image, tokenizer, *read_text_size(model)),
        Share(comm.rank(), comm.size(), config.global_batch, config.micro_batch),
        config.seed,
        merge_states(saved.states("data")) if saved else None,
        Staging(
            config.pixels, comm.local_device(), share.ranks, share.cores, share.memory_bytes / 8
        ),
    )
