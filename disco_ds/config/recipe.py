"""The settings of a run: what a recipe (YAML) may say, checked once and never changed after.

A recipe owns the batch, the loss, the model, the data, the optimizer and the logging; its `deepspeed` entry names a
ds_config (JSON), which owns ZeRO, precision, offload and communication (see ds_config.py). Anyone may import this file;
it imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from disco_ds.config.data import MAX_SECONDS, AugmentSettings, DataSettings, Pixels, Settings
from disco_ds.config.model import ModelSettings
from disco_ds.config.optim import OptimSettings, TowerOptimSettings
from disco_ds.config.recipe_yaml import Dumper
from disco_ds.config.templates import check_template

PACKAGE = Path(__file__).parents[1]
BASE_BATCH = 32_768
"""The batch that `optim.base_lr` is stated for (DisCo-CLIP, section 5.1)."""


class LossSettings(Settings):
    """The loss and its options."""

    name: str = "disco_fused"
    """A registered loss (python -c 'import disco_ds; print(disco_ds.list_losses())' lists them), or one of your own as
    `package.module:Class`, found on PYTHONPATH."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of that loss."""


class CheckpointSettings(Settings):
    """When a run is saved, what is kept and where it is copied."""

    every_steps: int = Field(1000, ge=0)
    """Steps between two checkpoints; 0: only at the end, and as every_minutes says."""
    every_epochs: float = Field(0.0, ge=0)
    """Epochs between two checkpoints, in place of every_steps: after the step with which each is complete; 0: none."""
    every_minutes: float = Field(0.0, ge=0, le=MAX_SECONDS / 60)
    """Save by the clock too, after so many minutes; 0: never. SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) to any rank saves as
    well, and ends the run."""
    asynchronous: bool = True
    """Write checkpoints beside the training: a step waits only for the copy of its rank's state to host memory, which
    needs as much memory as the rank's files; false: it waits until they are written."""
    keep_last: int | None = Field(3, gt=0)
    """Newest checkpoints to keep; older ones are removed, except as keep_every_steps says. None: all are kept."""
    keep_every_steps: int = Field(0, ge=0)
    """Checkpoints of steps that this divides are never removed; 0: no exception."""
    max_failed: int = Field(2, ge=0)
    """Saves in a row that may fail (the disk is full) before the run stops; 0: the first stops it."""
    copy_command: str | None = None
    """Run after each save, in the background and without a shell, one at a time, with {path} and {name} of the
    checkpoint: `aws s3 cp --recursive {path} s3://bucket/run/{name}`. While it runs, a newer checkpoint waits for it,
    and takes the place of one that waits; a failure is logged and does not stop the run."""
    copy_timeout_s: float = Field(600.0, ge=0, le=MAX_SECONDS)
    """How long the end of the run waits for copies."""

    @model_validator(mode="after")
    def _copy(self) -> CheckpointSettings:
        if self.copy_command is not None:
            if "{path}" not in self.copy_command:
                raise ValueError(f"checkpoint.copy_command does not say {{path}}, the checkpoint: {self.copy_command}")
            if unknown := set(re.findall(r"\{\w+\}", self.copy_command)) - {"{path}", "{name}"}:
                known = "{path} and {name} are filled in"
                raise ValueError(f"checkpoint.copy_command says {', '.join(sorted(unknown))}, where only {known}")
            try:
                shlex.split(self.copy_command)
            except ValueError as error:
                raise ValueError(f"checkpoint.copy_command cannot be split: {error}: {self.copy_command}") from None
        return self


class WandbSettings(Settings):
    """The run in Weights & Biases, which needs the package wandb. Its API key stays in the environment (WANDB_API_KEY)
    or in the file that `wandb login` writes."""

    project: str | None = None
    """Project that the run belongs to; None: nothing is logged to W&B."""
    name: str | None = None
    """Name of the run there; None: that of its folder."""
    group: str | None = None
    """Group of the project's runs that it is shown with."""
    entity: str | None = None
    """User or team that owns the project; None: the default of the API key's owner."""

    @model_validator(mode="after")
    def _project(self) -> WandbSettings:
        if self.project is None and (self.name or self.group or self.entity):
            raise ValueError("log.wandb.project is missing: without it nothing is logged to W&B")
        return self


class LogSettings(Settings):
    """Settings of the log, metrics.jsonl and TensorBoard."""

    every_steps: int = Field(10, gt=0)
    """Steps between two progress lines, metrics.jsonl records and TensorBoard points; only these steps are timed."""
    tensorboard: bool = True
    """Write TensorBoard points into the run folder."""
    wandb: WandbSettings = WandbSettings()
    peak_flops: float | None = Field(None, gt=0)
    """Floating-point operations per second of one device, which MFU is a part of; None: known GPUs' own, in 16 bits."""


class EvalSettings(Settings):
    """What a model is evaluated on, and when."""

    every_steps: int = Field(0, ge=0)
    """Steps between two evaluations; 0: only at the end."""
    every_epochs: float = Field(0.0, ge=0)
    """Epochs between two evaluations, in place of every_steps; 0: none."""
    labelled: dict[str, str] = Field({})
    """Name -> images to classify among the labels of their own set: shards (as data.shards), a folder with a sub-folder
    per class (ImageNet val, -v2, -R, -Sketch), or a folder in clip_benchmark's webdataset layout."""
    label_key: str = "{json[label]}"
    """Template of a sample's label in shards."""
    classes: dict[str, Path] = Field({})
    """Name of a labelled set -> file that names its labels: lines of names, lines of label and name, or JSON."""
    templates: dict[str, str] = Field({})
    """Name of a labelled set -> file of prompts with {} or {c} for the class, or `imagenet` for open_clip's 80; else
    shards take the label alone, clip_benchmark's layout its own file, folders the 80."""
    retrieval: dict[str, str] = Field({})
    """Name -> captioned images to find by text and the other way round: shards, a csv, or clip_benchmark's layout."""
    validation: dict[str, str] = Field({})
    """Name -> held-out pairs to compute the contrastive loss on: shards, a csv, or clip_benchmark's layout."""
    validation_batch: int = Field(1024, gt=1)
    """Pairs among which the validation loss is computed; it is named with the figures, which depend on it."""
    caption_key: str = "{txt}"
    """Template of a sample's captions, one per line; the validation loss takes the first. In a csv {txt} means
    {title}, and a column of image paths may also be called filepath."""

    @property
    def sets(self) -> list[str]:
        """Locations of all evaluation sets: folders, shards or bundled ones."""
        return [*self.labelled.values(), *self.retrieval.values(), *self.validation.values()]

    @model_validator(mode="after")
    def _sets(self) -> EvalSettings:
        check_template("eval.label_key", self.label_key)
        check_template("eval.caption_key", self.caption_key)
        for key, names in (("classes", self.classes), ("templates", self.templates)):
            if unknown := [name for name in names if name not in self.labelled]:
                known = ", ".join(self.labelled) or "none"
                raise ValueError(f"eval.{key}: there is no labelled set {unknown[0]}; eval.labelled has {known}")
        return self


class Config(Settings):
    """A whole recipe."""

    name: str = Field(pattern=r"^[\w+=@][\w.+=@ -]*$", max_length=100)
    """Name of the run, and of its folder in `runs`: letters, digits and . + = @ - _ or spaces."""
    runs: Path = Path("runs")
    """Folder of all run folders; on several hosts on a file system that all share."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the data order, the weights and all random draws."""
    ranks: int | None = Field(None, gt=0)
    """World size this recipe is for; another one is refused. None: any."""
    global_batch: int = Field(gt=0)
    """Samples per optimizer step, over all ranks."""
    micro_batch: int = Field(gt=0)
    """Samples per rank and forward pass."""
    steps: int | None = Field(None, gt=0)
    """Length of the run in steps; or `samples`, or `epochs`."""
    samples: int | None = Field(None, gt=0)
    """Length of the run in samples, rounded down to whole steps."""
    epochs: float | None = Field(None, gt=0)
    """Length of the run in epochs, rounded down to whole steps. An epoch is as many samples as all sources have
    together, by their manifests; the start of the run counts them and writes `steps` into its config.yaml."""
    pixels: Pixels = "device"
    """Where a step's images wait between the two passes of GradAccum: as uint8 on the device, or pinned on the host; or
    compressed in the data workers, which then decode them twice."""
    timeout_s: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """A collective that waits longer, or a phase of a step that takes longer, ends the run, naming the rank or the GPU
    that has not come as far as the others."""
    lost_after_s: float = Field(120.0, ge=1, le=MAX_SECONDS)
    """A rank that sends no heartbeat for so long (it was killed or stopped, or its host is gone) ends the run."""
    skip_nonfinite: int = Field(0, ge=0)
    """Batches in a row whose loss or gradient is not finite that are skipped, with nothing changed; the next one stops
    the run. 0: the first one stops it. A step that fp16's loss scaler skips does not count."""
    on_spike: Literal["warn", "skip"] = "warn"
    """Action on a batch whose loss or gradient norm is far above those of the last 64 steps: warn, or skip it
    with nothing changed, at any ZeRO stage. A level that lasts for 32 steps is no longer a spike."""
    model: ModelSettings = ModelSettings()
    loss: LossSettings = LossSettings()
    data: DataSettings
    optim: OptimSettings = OptimSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()
    eval: EvalSettings = EvalSettings()
    deepspeed: dict[str, Any]
    """The ds_config as read: a name in ds_configs/, a path, or a mapping (with `base` naming the file it changes)."""

    @model_validator(mode="after")
    def _whole(self) -> Config:
        lengths = {"steps": self.steps, "samples": self.samples, "epochs": self.epochs}
        if sum(value is not None for value in lengths.values()) != 1:
            got = ", ".join(f"{name}={value}" for name, value in lengths.items())
            raise ValueError(f"give one of steps, samples and epochs, got {got}; NAME=null takes one away")
        if self.epochs is None:
            self._check_length()
        if self.data.timeout_s >= self.timeout_s:
            raise ValueError(
                f"data.timeout_s ({self.data.timeout_s:g}) must be below timeout_s ({self.timeout_s:g}): else the "
                "other ranks give up before the silent worker is named"
            )
        remote = self.data.remote
        if (remote.http or remote.pipe) and remote.longest_s >= self.timeout_s:
            raise ValueError(
                f"data.remote.tries ({remote.tries}) of data.remote.timeout_s ({remote.timeout_s:g}), their pauses and "
                f"one attempt ahead may last {remote.longest_s:g} s: keep them below timeout_s ({self.timeout_s:g}), "
                "or the other ranks give up before the shard is named"
            )
        for side, locked in (("image", self.model.lock_image), ("text", self.model.lock_text or self.model.two_views)):
            frozen = locked and not self.model.unlocked_layers
            if frozen and getattr(self.optim, side) != TowerOptimSettings():
                raise ValueError(f"optim.{side} is of a tower that is not trained; leave it out")
        if self.model.two_views:
            if self.data.augment == AugmentSettings():
                raise ValueError("model.two_views needs data.augment: without it the two views are one")
            if self.eval.sets:
                raise ValueError("model.two_views trains no text tower, so there is nothing to evaluate by text")
        return self

    def _check_length(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"samples ({self.samples}) is less than one global_batch ({self.global_batch})")
        if self.optim.warmup_steps + self.optim.cooldown_steps > self.num_steps:
            raise ValueError(
                f"optim.warmup_steps + optim.cooldown_steps ({self.optim.warmup_steps} + {self.optim.cooldown_steps}) "
                f"exceed the run's {self.num_steps} steps; set optim.warmup_steps={self.num_steps // 10}, for instance"
            )

    @property
    def num_steps(self) -> int:
        """Length of the run. Raises: ValueError where it is in epochs, until `with_steps` has counted them."""
        if self.epochs is not None:
            raise ValueError("epochs is a number of steps only when the samples of the data are counted")
        return self.steps if self.steps is not None else (self.samples or 0) // self.global_batch

    def with_steps(self, num_samples: int) -> Config:
        """These settings with the epochs, if any, of so many samples, as steps. Raises: ValueError for too few."""
        if self.epochs is None:
            return self
        steps = int(self.epochs * num_samples) // self.global_batch
        if not steps:
            raise ValueError(
                f"epochs ({self.epochs:g} of {num_samples:,} samples) is less than one global_batch "
                f"({self.global_batch})"
            )
        config = self.model_copy(update={"steps": steps, "epochs": None})
        config._check_length()
        return config

    @property
    def peak_lr(self) -> float:
        return self.optim.lr if self.optim.lr is not None else self.optim.base_lr * self.global_batch / BASE_BATCH

    def num_micro_batches(self, ranks: int) -> int:
        """Micro-batches per rank and step.

        Raises: ValueError when ranks x micro_batch does not divide global_batch, naming the nearest batch that works.
        """
        if ranks < 1:
            raise ValueError(f"a run needs at least 1 rank, got {ranks} ranks; does the hostfile have slots?")
        if self.ranks is not None and ranks != self.ranks:
            raise ValueError(
                f"the recipe is for {self.ranks} ranks, this run has {ranks}: the likely cause is a missing hostfile "
                "(deepspeed then runs on this host alone); set ranks= to mean it"
            )
        part = ranks * self.micro_batch
        if self.global_batch % part:
            below = self.global_batch - self.global_batch % part
            nearest = below if below and self.global_batch - below <= part // 2 else below + part
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of ranks x micro_batch "
                f"({ranks} x {self.micro_batch} = {part}); nearest: "
                f"global_batch={nearest}"
            )
        return self.global_batch // part

    def describe(self, ranks: int) -> str:
        """The batch algebra, in words."""
        count = self.num_micro_batches(ranks)
        if self.epochs is not None:
            length = f"{self.epochs:g} epochs, whose steps are known when the samples of the data are counted"
        else:
            length = f"{self.num_steps:,} steps, {self.num_steps * self.global_batch:,} samples"
        return (
            f"global batch {self.global_batch:,} = {ranks} ranks x {self.micro_batch:,} micro-batch x {count} "
            f"micro-batches per rank\n"
            f"{length}, peak lr {self.peak_lr:g}{'' if self.optim.lr else ', from base_lr and the batch'}, "
            f"warm-up {self.optim.warmup_steps:,} steps, then {self.optim.schedule}"
        )

    def to_yaml(self) -> str:
        return yaml.dump(self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)
