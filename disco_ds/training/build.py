"""Build all parts of a run from its settings, in an order that finds mistakes before expensive work starts.

The training loop is in loop.py.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.runtime.utils import set_random_seed
from torch import nn

from disco_ds.checkpoints.checkpoint import Checkpoint, restore_rng
from disco_ds.checkpoints.keep import Mirror
from disco_ds.checkpoints.resume import (
    find_changes,
    find_checkpoint,
    identity_of,
    log_changes,
    refuse_unchangeable,
    set_newer_aside,
    shape_of,
)
from disco_ds.checkpoints.save import Saver
from disco_ds.checkpoints.state import load_trained, load_untrained
from disco_ds.config import Config, Schedule, Tree, make_schedule, render_ds_config
from disco_ds.data import (
    Loader,
    Share,
    Source,
    Staging,
    count_epoch,
    fingerprint,
    load_sources,
    merge_states,
)
from disco_ds.data.sources.shards import refuse_remote
from disco_ds.data.stored import find_stored
from disco_ds.distributed import comm
from disco_ds.distributed.heartbeat import DIAGNOSTICS, Heartbeat, dump_records_to
from disco_ds.distributed.hosts import HostShare, check_agreement, share_host
from disco_ds.distributed.launcher import Interrupts
from disco_ds.eval import Encoder, ImageSet, load_sets
from disco_ds.eval.model import read_image_spec, read_input_spec
from disco_ds.losses import Loss, build_loss
from disco_ds.losses.kernels.similarity import find_problem as find_kernel_problem
from disco_ds.metrics.anomalies import AnomalyDetector
from disco_ds.metrics.logger import MetricsLogger, WriteEvents, rewind_tensorboard
from disco_ds.metrics.tracking import WandbRun, open_wandb
from disco_ds.models.clip import (
    build_model,
    build_tokenizer,
    check_image_size,
    read_architecture,
    read_text_size,
    register_config,
)
from disco_ds.models.fast.replace import compile_towers, describe_parts, is_compiled
from disco_ds.models.fast.texts import find_counter
from disco_ds.models.flops import peak_samples_per_s
from disco_ds.models.pretrained import (
    download_weights,
    find_weights,
    hash_weights,
    read_overrides,
    warn_of_random_tower,
)
from disco_ds.names import load_custom
from disco_ds.runs.run_folder import AUTO, find_newest
from disco_ds.runs.shared_folder import open_folder, removed_if_refused, write_settings
from disco_ds.training.engine import Engine, EngineTowers, build_engine, learning_rate, prepare
from disco_ds.training.optimizer import drop_average
from disco_ds.training.teacher import FrozenTeacher, RunTeacher, StoredTeacher, are_equal

SAME_FILES = "the files on the hosts differ: every host needs the same shards, manifest, csv and model config"


@dataclass
class Run:
    """All parts of a run, as `build` returns them."""

    recipe: Config
    """Settings of the whole run."""
    config: Config
    """Settings of the current stage."""
    schedule: Schedule
    folder: Path
    engine: Engine
    towers: EngineTowers
    """Computes the features of a micro-batch."""
    loss: Loss
    loader: Loader
    metrics: MetricsLogger
    anomalies: AnomalyDetector
    sets: list[ImageSet]
    """The evaluation sets."""
    encoder: Encoder
    """Encodes the images and texts of the evaluation sets."""
    description: str
    """For the log: which parts of the towers use this package's faster versions or are compiled, and the teacher."""
    saver: Saver
    interrupts: Interrupts
    heartbeat: Heartbeat
    skipped_in_a_row: int = 0
    """Number of batches skipped since the last successful step because the loss or the gradient was not finite."""
    overflows: list[float] = field(default_factory=list)
    """The fp16 loss scale after each step since the last applied update. All of these steps overflowed."""

    @property
    def is_last_stage(self) -> bool:
        """Whether the run ends with the current stage."""
        return self.schedule.last_step == self.schedule.num_steps

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the step that follows `step` completed steps.

        It depends on the number of samples in the completed steps, because the global batch may change within a run.
        """
        unit = self.schedule.warmup_batch
        done, total = self.schedule.samples(step) / unit, self.schedule.num_samples / unit
        return learning_rate(done, total, self.config.peak_lr, self.config.optim)


def build(
    config: Config,
    resume: str | None,
    stack: ExitStack,
    unattended: bool = False,
    allow_change: Sequence[str] = (),
    uploads: Mirror | None = None,
    interrupts: Interrupts | None = None,
) -> Run:
    """Build the current stage of a run, which is new or resumes from a checkpoint. Collective.

    The order is: loss, data, the checkpoint to resume from, model, loader, run folder, engine. The checkpoint is chosen
    before the model and the loader are built, because the weights and the position in the data come from it. A new run
    folder is created only after the loader has been built.

    Args:
        config: Settings of the run.
        resume: "latest", a run folder, or a checkpoint in a run folder. "auto" resumes if there is a complete
            checkpoint, and starts a new run otherwise. None starts a new run.
        stack: Everything that this function opens is closed when the stack is closed.
        unattended: Whether to fall back to an older checkpoint if the newest is damaged. resume="auto" implies it.
        allow_change: Dotted names of settings that may differ from the settings in the checkpoint.
        uploads: Uploads that the previous stage left unfinished.
        interrupts: Requests to save or to stop, shared by all stages of the run. None: there are no requests yet.

    Raises:
        ValueError: On every rank, if there is a mistake in the settings or the data.
        FinishedError: On every rank, if all steps are already done. It is a subclass of ValueError.
    """
    heartbeat = stack.enter_context(Heartbeat(config.lost_after_s, config.timeout_s))
    share = share_host()  # called early, because it sets the number of torch threads
    refuse_unchangeable(allow_change, resume)
    if resume == AUTO:
        newest = comm.from_rank_0("run folder", partial(find_newest, config.runs, config.name))
        resume = str(newest) if newest else None
        unattended = True
    for stage in config.stage_configs:
        # This only checks the settings. write_settings renders the final ds_config later, because it contains the path
        # of the run folder, which does not exist yet.
        render_ds_config(stage, comm.size())
    # The file of a custom loss or optimizer may be missing on one host.
    with comm.all_or_none("loss and optimizer"):
        loss = make_loss(config).to(comm.local_device())
        if config.optim.factory:
            load_custom(config.optim.factory)
    with comm.all_or_none("data"):
        sources = load_sources(config.data)
        sets = load_sets(config.eval, config.data)
    teacher = build_teacher(config, loss, sources) if config.teacher else None
    identify_stage = identify(config, sources, teacher)
    recipe = config.with_samples(count_epoch(config.data, sources))
    folder, saved = None, None
    if resume:
        folder = open_folder(recipe, resume, stack)
        saved = find_checkpoint(folder, resume, recipe, identify_stage, unattended, allow_change)
    progress: Tree = {}
    if saved:
        progress = {key: saved.meta[key] for key in ("step", "samples", "warmup_batch")}
        progress["previous_batch"] = saved.meta["identity"]["global_batch"]
    schedule = make_schedule(recipe, **progress)
    config = recipe.at_sample(schedule.first_samples)
    identity = identify_stage(config)
    with comm.all_or_none("model"):
        check_image_sizes(recipe)
    model, tokenizer, description = build_towers(config, loss, restored=saved is not None)
    if teacher:
        description += f"\nteacher: {teacher.description}"
    loader = build_loader(config, sources, model, tokenizer, share, saved, teacher)
    stack.callback(loader.close)
    if 0 < loader.num_samples < config.global_batch:
        comm.warn(
            f"global_batch={config.global_batch} is larger than the data ({loader.num_samples} samples), so a batch "
            "contains some samples twice"
        )
    loss.set_num_samples(loader.num_samples, schedule.num_samples)
    # This counts the operations of the model, so it must come before ZeRO partitions the parameters.
    peak_pace = peak_samples_per_s(model, config.log.peak_flops)
    folder = folder or open_folder(recipe, None, stack)
    shape = shape_of(config, comm.size())
    with removed_if_refused(folder, new=saved is None):
        heartbeat.folder = folder / DIAGNOSTICS
        dump_records_to(heartbeat.folder)
        ds_config = write_settings(recipe, config, folder)
        wandb = open_wandb(recipe, folder, stack)
        engine = start_engine(config, model, loss, ds_config, saved, shape)
        if saved:
            # Compare the checkpoint with the recipe's settings for the stage in which it was saved. If that
            # stage has ended, a comparison with the new stage would log its planned changes as unexpected.
            before = recipe.at_sample(schedule.first_samples - 1)
            log_changes(saved, schedule.num_steps, identify_stage(before), shape)
    writers = find_writers(engine, wandb)
    metrics = MetricsLogger(folder, writers, schedule, peak_pace, loader.epoch_samples)
    stack.callback(metrics.close)
    # If settings such as global_batch have changed, the loss may change too, so forget its earlier values.
    earlier = None
    if saved and not find_changes(saved.meta["identity"], identity):
        earlier = saved.meta["anomalies"]
    anomalies = AnomalyDetector(
        metrics.write_values,
        skip=config.on_spike == "skip",
        warmup_steps=config.optim.warmup_steps,
        state=earlier,
    )

    def read_state(step: int) -> tuple[Tree, Tree]:
        meta = {
            "step": step,
            "samples": schedule.samples(step),
            "num_steps": schedule.num_steps,
            "warmup_batch": schedule.warmup_batch,
            "identity": identity,
            "shape": shape,
            "anomalies": anomalies.state_dict(),
        }
        return meta, {"data": loader.state_dict(), "loss": loss.state_dict()}

    saver = Saver(
        folder,
        config.checkpoint,
        engine,
        read_state,
        heartbeat,
        metrics.add_save,
        uploads,
        saved_step=schedule.first_step,
    )
    stack.callback(saver.close)
    return Run(
        recipe=recipe,
        config=config,
        schedule=schedule,
        folder=folder,
        engine=engine,
        towers=EngineTowers(engine, partial(prepare, config), teacher),
        loss=loss,
        loader=loader,
        metrics=metrics,
        anomalies=anomalies,
        sets=sets,
        encoder=Encoder(engine, read_image_spec(model), tokenizer, config.micro_batch),
        description=description,
        saver=saver,
        interrupts=interrupts or Interrupts(60 * config.checkpoint.every_minutes),
        heartbeat=heartbeat,
    )


def build_loader(
    config: Config,
    sources: list[Source],
    model: nn.Module,
    tokenizer: Any,
    share: HostShare,
    saved: Checkpoint | None,
    teacher: RunTeacher | None,
) -> Loader:
    """Build this rank's loader. If `saved` is given, it starts at the checkpoint's position in the data. Collective."""
    position = None
    if saved:
        position = comm.from_rank_0("data", lambda: merge_states(saved.states("data")))
    device = comm.local_device()
    inputs = read_input_spec(model, tokenizer)
    if isinstance(teacher, StoredTeacher):
        inputs = replace(inputs, stored=teacher.stored)
    elif teacher and not are_equal(teacher.tokenizer, tokenizer):
        length = read_text_size(teacher.model)[0]
        inputs = replace(inputs, teacher_tokenize=teacher.tokenizer, teacher_length=length)
    with comm.all_or_none("data"):
        return Loader(
            config.data,
            sources,
            inputs,
            Share(comm.rank(), comm.size(), config.global_batch, config.micro_batch),
            config.seed,
            position,
            Staging(config.image_staging, device, share.ranks, share.cores, share.memory_bytes / 8),
            find_counter(model, device, config.precision != "fp32"),
        )


def find_writers(engine: Engine, wandb: WandbRun | None) -> dict[str, WriteEvents]:
    """Return one function per active tracker, which writes metrics to it, keyed by the tracker's name."""
    monitors = {
        "TensorBoard": engine.monitor.tb_monitor,
        "W&B": wandb,
        "csv_monitor": engine.monitor.csv_monitor,
        "Comet": engine.monitor.comet_monitor,
    }
    return {name: monitor.write_events for name, monitor in monitors.items() if monitor}


def check_without_data(config: Config) -> None:
    """Check the loss, optimizer and model settings, and refuse remote shards unless they are allowed. Read no data.

    Raises:
        ValueError: If a run with these settings would fail one of these checks.
    """
    make_loss(config)
    if config.optim.factory:
        load_custom(config.optim.factory)
    teacher = config.teacher.settings if config.teacher else None
    for settings in filter(None, (config.model, teacher)):
        read_architecture(settings)
        find_weights(register_config(settings.name), settings)
    warn_of_random_tower(config.model)
    for text in (*(part.shards for part in config.data.per_source), *config.eval.sets):
        if text is not None:
            refuse_remote(text, config.data.remote)


def check_image_sizes(config: Config) -> None:
    """Check that the models of all stages differ only in the size of the position embedding, which can be resized.

    Raises:
        ValueError: If a stage sets an image size that the model does not support.
    """
    models = {stage.model.image_size: stage.model for stage in config.stage_configs}
    if len(models) == 1:
        return
    first: dict[str, Any] = {}
    for size, settings in models.items():
        model = build_model(settings, pretrained=False)
        check_image_size(settings, model)
        for name, value in model.state_dict().items():
            before = first.setdefault(name, value.shape)
            if value.shape != before and name != "visual.positional_embedding":
                raise ValueError(
                    f"stages: the image size cannot change to {size}, because {name} of {settings.label} would "
                    f"change from {list(before)} to {list(value.shape)}; only the position embedding of an open_clip "
                    "ViT can be resized"
                )


def make_loss(config: Config) -> Loss:
    """Build the loss on the CPU, and check that it is compatible with the optimizer's settings.

    Raises:
        ValueError: If the loss does not exist, or if optim.tau_lr is set but the loss does not learn
            the logit scale.
    """
    loss = build_loss(config.loss.name, **config.loss_options)
    if config.optim.tau_lr is not None and not loss.learns_scale:
        raise ValueError(
            f"optim.tau_lr is the learning rate of the logit scale, but loss.name={config.loss.name} "
            "does not learn it; remove optim.tau_lr"
        )
    return loss


def build_towers(config: Config, loss: Loss, restored: bool) -> tuple[nn.Module, Any, str]:
    """Build the model and its tokenizer. The weights are the same on every rank. Collective.

    Args:
        config: Settings of the run.
        loss: Its attributes determine the initial logit scale and bias, and whether the scale is learned.
        restored: Whether weights will be loaded from a checkpoint later. If so, pretrained weights
            are not needed and not downloaded.

    Returns:
        The model, the tokenizer, and a line for the log that describes the towers.
    """
    settings = config.model
    if not restored:
        with comm.all_or_none("model"):
            name = register_config(settings.name)
            find_weights(name, settings)
            # One rank per host downloads the files; the other ranks on the host then find them in the cache.
            if os.environ["LOCAL_RANK"] == "0":
                download_weights(name, settings)
        if comm.rank() == 0:
            warn_of_random_tower(settings)
    with comm.all_or_none("model"):
        set_random_seed(config.seed)
        bias = loss.initial_bias(config.global_batch)
        model = build_model(
            settings, loss.initial_scale, bias, loss.learns_scale, pretrained=not restored
        )
        check_image_size(settings, model)
        tokenizer = build_tokenizer(settings, model)
    compiled = compile_if_possible(config, model)
    is_half = config.precision != "fp32"
    parts = [*describe_parts(model, comm.local_device(), is_half), compiled]
    return model, tokenizer, f"towers: {', '.join(parts)}"


def build_teacher(config: Config, loss: Loss, sources: list[Source]) -> RunTeacher:
    """Build the teacher on this rank's device, in the precision of the run. Collective."""
    settings = config.teacher
    assert settings is not None
    stages = [stage.data for stage in config.stage_configs]
    stored = comm.from_rank_0("teacher", partial(find_stored, stages, settings, sources))
    if stored:
        return StoredTeacher(settings, stored, comm.local_device())
    # A loss that needs a bias initializes it to -log(global_batch - 1), which is 0 for a global batch of 2. The bias
    # keeps this value only if the teacher's weights contain none.
    own = config.replace(model=settings.settings, global_batch=2)
    model, tokenizer, description = build_towers(own, loss, restored=False)
    identity = settings.model_dump(mode="json", include={"model", "weight"})
    identity |= {"weights": hash_weights(model)}
    description = f"{settings.model}; {description}"
    placed = model.to(comm.local_device())
    return FrozenTeacher(placed, tokenizer, config.precision, description, identity)


def compile_if_possible(config: Config, model: nn.Module) -> str:
    """If model.compile=auto, compile the towers, unless a rank cannot. Collective: every rank must call this.

    Returns:
        A phrase for the log: whether the towers are compiled and, if not, why.
    """
    device = comm.local_device()
    if config.model.compile != "auto" or device.type != "cuda":
        return "compiled" if is_compiled(model) else "not compiled"
    if config.zero_stage == 3:
        problem: str | None = "at ZeRO 3, torch.compile would read parameters that are not gathered"
    else:
        problem = find_kernel_problem(device, "fp16")
    problems = [x for x in comm.gather_objects(problem) if x]
    if not problems:
        problems = compile_towers(model, config.model.activation_checkpointing)
    if not is_compiled(model):
        return f"not compiled ({problems[0]})"
    return "; ".join(["compiled", *problems])


def identify(
    config: Config, sources: list[Source], teacher: RunTeacher | None
) -> Callable[[Config], Tree]:
    """Return a function that maps a stage's settings to the values that must stay the same on resume. Collective.

    These values are those of identity_of and the entries model.preprocess and teacher. The returned function does not
    communicate.

    Raises:
        ValueError: On every rank, if hosts have different shards or model configs at the same path.
    """
    # Synthetic data needs no fingerprint: data.num_samples identifies it, and that setting is compared too.
    data = "synthetic" if config.data.source == "synthetic" else fingerprint(config.data, sources)
    with comm.all_or_none("model"):
        # Checkpoints store these values, because export and evaluation need them even if the pretrained weights are
        # deleted later.
        preprocess = read_overrides(register_config(config.model.name), config.model)

        def identify_stage(stage: Config) -> Tree:
            return {
                **identity_of(stage, data, read_architecture(stage.model)),
                "model.preprocess": preprocess,
                "teacher": teacher and teacher.identity,
            }

        found = identify_stage(config)
    # All ranks already agree on the paths, but the files at a path may differ between hosts.
    same = ("data.shards", "model.config", "model.preprocess", "teacher")
    check_agreement({key: found[key] for key in same}, SAME_FILES)
    return identify_stage


def start_engine(
    config: Config,
    model: nn.Module,
    loss: Loss,
    ds_config: Tree,
    saved: Checkpoint | None,
    shape: Tree,
) -> Engine:
    """Build the engine. Collective.

    On resume, also restore the engine and the loss, and set aside checkpoints that are newer than `saved`. If `shape`
    and the image size have not changed, the random generators are restored too, so the resumed run is bit-identical to
    an uninterrupted one. Otherwise, random draws, such as dropout, differ.

    Raises:
        ValueError: On every rank, if the checkpoint does not fit the model or cannot be read.
    """
    # The weights were initialized earlier, with the same seed on all ranks. From now on each rank needs
    # a different seed, because dropout must differ between ranks.
    set_random_seed(config.seed + 1 + comm.rank())
    if saved:
        # Do this before the engine is built: at ZeRO 3, an engine leaves each rank only a part of each parameter.
        load_untrained(saved, model)
    engine = build_engine(model, config.optim, ds_config)
    if saved is None:
        return engine
    architecture = read_architecture(config.model)
    is_resized = find_changes(saved.meta["identity"]["model.config"], architecture)
    is_same = saved.meta["shape"] == shape and not is_resized
    load_trained(saved, engine, is_same)
    if is_same:
        restore_rng(saved.load(saved.rank_files[comm.rank()])["rng"])
    if config.optim.ema is None:
        drop_average(engine)
    with comm.all_or_none("the loss's state"):
        if loss.state_dict():  # without state, do not make every rank read the files of all ranks
            loss.load_state_parts(saved.states("loss"))
    set_newer_aside(saved)
    rewind_tensorboard(engine.monitor, saved.meta["samples"])
    return engine
