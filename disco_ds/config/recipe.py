"""The settings of a run, as a recipe (YAML) gives them. They are validated once and never change
afterwards.

A recipe owns the batch, the loss, the model, the data, the optimizer and the logging. Its
`deepspeed` entry names a ds_config (JSON), which owns ZeRO, precision, offload and communication
(see ds_config.py).

Any module may import this file. It imports neither torch nor DeepSpeed.
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
"""The global batch that `optim.base_lr` refers to (DisCo-CLIP, section 5.1)."""


class LossSettings(Settings):
    """The loss and its options."""

    name: str = "disco_fused"
    """Name of a registered loss (`python -c 'import disco_ds; print(disco_ds.list_losses())'`
    lists them), or a custom loss as `package.module:Class`, importable through PYTHONPATH."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of the loss."""


class CheckpointSettings(Settings):
    """When checkpoints are saved, which ones are kept, and where they are copied."""

    every_steps: int = Field(1000, ge=0)
    """Steps between two checkpoints; 0: only at the end, and according to every_minutes."""
    every_epochs: float = Field(0.0, ge=0)
    """Epochs between two checkpoints, instead of every_steps; saved after the step that
    completes them. 0: off."""
    every_minutes: float = Field(0.0, ge=0, le=MAX_SECONDS / 60)
    """Also save after this many minutes; 0: off. SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) to any rank
    saves a checkpoint too, and ends the run."""
    asynchronous: bool = True
    """Write checkpoints in the background: training waits only while each rank's state is copied
    to host memory, which takes as much memory as the rank's files. False: training waits
    until the files are written."""
    keep_last: int | None = Field(3, gt=0)
    """Number of newest checkpoints to keep; older ones are removed, except those of
    keep_every_steps. None: keep all."""
    keep_every_steps: int = Field(0, ge=0)
    """Never remove checkpoints whose step is a multiple of this; 0: off."""
    max_failed_saves: int = Field(2, ge=0)
    """Consecutive saves that may fail (for example because the disk is full) before the run
    stops; 0: stop at the first."""
    copy_command: str | None = None
    """Run after each save, in the background and without a shell, one at a time, with {path} and {name} of the
    checkpoint: `aws s3 cp --recursive {path} s3://bucket/run/{name}`. While it runs, a newer checkpoint waits for it,
    and takes the place of one that waits; a failure is logged and does not stop the run. A copy that its run has not
    seen the end of is made again when the run is resumed, so the command must be one that can be repeated."""
    copy_timeout_s: float = Field(600.0, ge=0, le=MAX_SECONDS)
    """How long the run waits at its end for copies to finish."""

    @model_validator(mode="after")
    def _check_copy_command(self) -> CheckpointSettings:
        command = self.copy_command
        if command is None:
            return self
        if "{path}" not in command:
            raise ValueError(f"checkpoint.copy_command must contain {{path}}, got {command!r}")
        unknown = set(re.findall(r"\{\w+\}", command)) - {"{path}", "{name}"}
        if unknown:
            raise ValueError(
                f"checkpoint.copy_command contains {', '.join(sorted(unknown))}; only {{path}} and {{name}} are "
                "replaced"
            )
        try:
            shlex.split(command)
        except ValueError as error:
            raise ValueError(
                f"checkpoint.copy_command cannot be split: {error}: {command}"
            ) from None
        return self


class WandbSettings(Settings):
    """Logging to Weights & Biases, which needs the wandb package. Its API key stays in the
    environment variable WANDB_API_KEY or in the file that `wandb login` writes."""

    project: str | None = None
    """Project of the run; None: nothing is logged to W&B."""
    name: str | None = None
    """Name of the run in W&B; None: the name of its folder."""
    group: str | None = None
    """Group of the run within the project."""
    entity: str | None = None
    """User or team that owns the project; None: the default of the API key's owner."""

    @model_validator(mode="after")
    def _check_project(self) -> WandbSettings:
        if self.project is None and (self.name or self.group or self.entity):
            raise ValueError("log.wandb.project is missing: without it nothing is logged to W&B")
        return self


class LogSettings(Settings):
    """What is logged, how often and where."""

    every_steps: int = Field(10, gt=0)
    """Steps between two progress lines, metrics.jsonl records and TensorBoard points. Only these
    steps are timed."""
    tensorboard: bool = True
    """Write TensorBoard points into the run folder."""
    wandb: WandbSettings = WandbSettings()
    peak_flops: float | None = Field(None, gt=0)
    """Peak floating-point operations per second of one device, for MFU; None: the 16-bit peak of
    the GPU, if known."""


class EvalSettings(Settings):
    """On which data the model is evaluated, and when."""

    every_steps: int = Field(0, ge=0)
    """Steps between two evaluations; 0: only at the end."""
    every_epochs: float = Field(0.0, ge=0)
    """Epochs between two evaluations, instead of every_steps; 0: off."""
    labeled: dict[str, str] = Field({})
    """Name -> labeled images for zero-shot classification among the labels of that set: shards
    (as in data.shards), a folder with one sub-folder per class (ImageNet val, -v2, -R,
    -Sketch), or a folder in clip_benchmark's webdataset layout."""
    label_key: str = "{json[label]}"
    """Template of a sample's label in shards."""
    classes: dict[str, Path] = Field({})
    """Name of a labeled set -> file with its class names: lines of names, lines of label and
    name, or JSON."""
    templates: dict[str, str] = Field({})
    """Name of a labeled set -> file of prompt templates with {} or {c} for the class, or
    `imagenet` for open_clip's 80 templates. Default: the data set's own templates if it has
    any (clip_benchmark layout), the 80 ImageNet templates for class folders, the plain label
    for shards."""
    retrieval: dict[str, str] = Field({})
    """Name -> captioned images for image-to-text and text-to-image retrieval: shards, a csv, or
    clip_benchmark's layout."""
    validation: dict[str, str] = Field({})
    """Name -> held-out pairs for the validation loss: shards, a csv, or clip_benchmark's layout."""
    validation_batch: int = Field(1024, gt=1)
    """Batch size of the validation loss. The loss depends on it, so it is part of the metric's name."""
    caption_key: str = "{txt}"
    """Template of a sample's captions, one per line; the validation loss uses the first. In a
    csv, {txt} stands for the column `title`, and the column of image paths may also be named
    `filepath`."""

    @property
    def sets(self) -> list[str]:
        """Locations of all evaluation sets: folders, shards or bundled sets."""
        return [*self.labeled.values(), *self.retrieval.values(), *self.validation.values()]

    @model_validator(mode="after")
    def _check_sets(self) -> EvalSettings:
        check_template("eval.label_key", self.label_key)
        check_template("eval.caption_key", self.caption_key)
        for key, names in (("classes", self.classes), ("templates", self.templates)):
            for name in names:
                if name not in self.labeled:
                    known = ", ".join(self.labeled) or "no sets"
                    raise ValueError(
                        f"eval.{key}: there is no labeled set {name}; eval.labeled has {known}"
                    )
        return self


class Config(Settings):
    """A whole recipe."""

    name: str = Field(pattern=r"^[\w+=@][\w.+=@ -]*$", max_length=100)
    """Name of the run and of its folder in `runs`: letters, digits, spaces and . + = @ - _."""
    runs: Path = Path("runs")
    """Folder of all run folders. With several hosts it must be on a shared file system."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Random seed of the data order, the initial weights and everything else."""
    ranks: int | None = Field(None, gt=0)
    """World size that this recipe requires; a run with another one is refused. None: any."""
    global_batch: int = Field(gt=0)
    """Samples per optimizer step, summed over all ranks."""
    micro_batch: int = Field(gt=0)
    """Samples per forward pass of one rank."""
    steps: int | None = Field(None, gt=0)
    """Length of the run in steps. Give exactly one of `steps`, `samples` and `epochs`."""
    samples: int | None = Field(None, gt=0)
    """Length of the run in samples, rounded down to whole steps."""
    epochs: float | None = Field(None, gt=0)
    """Length of the run in epochs, rounded down to whole steps. One epoch has as many samples as
    the manifests of all sources together; they are counted when the run starts, which writes
    `steps` into its config.yaml."""
    pixels: Pixels = "device"
    """Where a step's images wait between the two passes of GradAccum: as uint8 on the device, as
    uint8 in pinned host memory, or compressed in the data workers, which then decode them
    twice."""
    timeout_s: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """The run ends if a collective or a phase of a step takes longer than this. The error names
    the rank or the GPU that is behind the others."""
    lost_after_s: float = Field(120.0, ge=1, le=MAX_SECONDS)
    """The run ends if a rank sends no heartbeat for this long (because it was killed or stopped,
    or its host is down)."""
    skip_nonfinite: int = Field(0, ge=0)
    """Number of consecutive batches with a non-finite loss or gradient that are skipped without
    any update; one more stops the run. 0: the first one stops it. Steps that fp16's loss
    scaler skips do not count."""
    on_spike: Literal["warn", "skip"] = "warn"
    """What to do with a batch whose loss or gradient norm is far above those of the last 64
    steps: warn, or skip it without any update, at any ZeRO stage. A level that lasts for 32
    steps no longer counts as a spike."""
    model: ModelSettings = ModelSettings()
    loss: LossSettings = LossSettings()
    data: DataSettings
    optim: OptimSettings = OptimSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()
    eval: EvalSettings = EvalSettings()
    deepspeed: dict[str, Any]
    """DeepSpeed's settings: a name in ds_configs/, a path, or a mapping (whose `base` names the
    file that it changes)."""

    @model_validator(mode="after")
    def _check_whole(self) -> Config:
        lengths = {"steps": self.steps, "samples": self.samples, "epochs": self.epochs}
        if sum(value is not None for value in lengths.values()) != 1:
            got = ", ".join(f"{name}={value}" for name, value in lengths.items())
            raise ValueError(
                f"give one of steps, samples and epochs, got {got}; NAME=null removes one"
            )
        if self.epochs is None:
            self._check_length()
        self._check_timeouts()
        locks = {
            "image": self.model.lock_image,
            "text": self.model.lock_text or self.model.two_views,
        }
        for tower, locked in locks.items():
            frozen = locked and not self.model.unlocked_layers
            if frozen and getattr(self.optim, tower) != TowerOptimSettings():
                raise ValueError(f"remove optim.{tower}: the {tower} tower is not trained")
        if self.model.two_views and self.data.augment == AugmentSettings():
            raise ValueError(
                "model.two_views needs data.augment; without it the two views are identical"
            )
        if self.model.two_views and self.eval.sets:
            raise ValueError(
                "model.two_views does not train the text tower, so evaluation by text is impossible; remove eval"
            )
        return self

    def _check_length(self) -> None:
        if self.num_steps < 1:
            raise ValueError(
                f"samples ({self.samples}) is less than one global_batch ({self.global_batch})"
            )
        if self.optim.warmup_steps + self.optim.cooldown_steps > self.num_steps:
            raise ValueError(
                f"optim.warmup_steps + optim.cooldown_steps ({self.optim.warmup_steps} + {self.optim.cooldown_steps}) "
                f"exceed the run's {self.num_steps} steps; set optim.warmup_steps={self.num_steps // 10}, for instance"
            )

    def _check_timeouts(self) -> None:
        if self.data.timeout_s >= self.timeout_s:
            raise ValueError(
                f"data.timeout_s ({self.data.timeout_s:g}) must be below timeout_s ({self.timeout_s:g}): otherwise the "
                "other ranks time out before the silent worker is named"
            )
        remote = self.data.remote
        if (remote.http or remote.pipe) and remote.longest_s >= self.timeout_s:
            raise ValueError(
                f"data.remote.tries ({remote.tries}) of data.remote.timeout_s ({remote.timeout_s:g}), their pauses and "
                f"one attempt ahead may take {remote.longest_s:g} s: keep them below timeout_s ({self.timeout_s:g}), "
                "otherwise the other ranks time out before the shard is named"
            )

    @property
    def num_steps(self) -> int:
        """Length of the run.

        Raises:
            ValueError: If the length is given in epochs; `with_steps` converts it.
        """
        if self.epochs is not None:
            raise ValueError("epochs can be converted to steps only once the samples are counted")
        return self.steps if self.steps is not None else (self.samples or 0) // self.global_batch

    def with_steps(self, num_samples: int) -> Config:
        """Return these settings with epochs, if given, converted to steps.

        Args:
            num_samples: Samples of one epoch.

        Raises:
            ValueError: If there is less than one step, or fewer steps than the schedule needs.
        """
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
        """The learning rate after warmup."""
        if self.optim.lr is not None:
            return self.optim.lr
        return self.optim.base_lr * self.global_batch / BASE_BATCH

    def num_micro_batches(self, ranks: int) -> int:
        """Return the number of micro-batches per rank and step.

        Args:
            ranks: World size.

        Raises:
            ValueError: If the recipe requires another world size, or if ranks x micro_batch does
                not divide global_batch; the message names the nearest batch that works.
        """
        if ranks < 1:
            raise ValueError(
                f"a run needs at least 1 rank, got {ranks}; does the hostfile have slots?"
            )
        if self.ranks is not None and ranks != self.ranks:
            raise ValueError(
                f"the recipe expects {self.ranks} ranks, but this run has {ranks}. Is the hostfile missing? deepspeed "
                f"then runs on this host alone. To run on {ranks} on purpose, pass ranks={ranks}."
            )
        samples = ranks * self.micro_batch
        rest = self.global_batch % samples
        if rest:
            below = self.global_batch - rest
            nearest = below if below and rest <= samples // 2 else below + samples
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of ranks x micro_batch "
                f"({ranks} x {self.micro_batch} = {samples}); nearest: global_batch={nearest}"
            )
        return self.global_batch // samples

    def describe(self, ranks: int) -> str:
        """Return the batch and the length of the run in words."""
        count = self.num_micro_batches(ranks)
        if self.epochs is not None:
            length = f"{self.epochs:g} epochs (steps are known once the samples are counted)"
        else:
            length = f"{self.num_steps:,} steps, {self.num_steps * self.global_batch:,} samples"
        derived = "" if self.optim.lr else ", from base_lr and the batch"
        return (
            f"global batch {self.global_batch:,} = {ranks} ranks x {self.micro_batch:,} micro-batch x {count} "
            f"micro-batches per rank\n"
            f"{length}, peak lr {self.peak_lr:g}{derived}, "
            f"warm-up {self.optim.warmup_steps:,} steps, then {self.optim.schedule}"
        )

    def to_yaml(self) -> str:
        """Return the settings as a recipe."""
        return yaml.dump(
            self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True
        )
