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
from disco_ds.config.ds_config import complete_ds_config, stage
from disco_ds.config.optim import OptimSettings, TowerOptimSettings
from disco_ds.config.own_code import PATTERN
from disco_ds.config.recipe_yaml import Dumper
from disco_ds.config.templates import check_template

PACKAGE = Path(__file__).parents[1]
BASE_BATCH = 32_768
"""The batch that `optim.base_lr` is stated for (DisCo-CLIP, section 5.1)."""


class ModelSettings(Settings):
    """The open_clip model that is trained."""

    name: str = "ViT-B-32"
    """An open_clip model name, a path of a model config (.json), or the name of one in disco_ds/assets/models."""
    factory: str | None = Field(None, pattern=rf"^{PATTERN}$")
    """`package.module:function` that returns a disco_ds.TwoTowers, in place of open_clip's model: docs/own_model.md."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of model.factory."""
    pretrained: Path | None = None
    """Local weights (.pt, .bin, .safetensors) that open_clip can load."""
    lock_image: bool = False
    """Freeze the image tower (LiT)."""
    lock_text: bool = False
    """Freeze the text tower."""
    two_views: bool = False
    """Self-supervised: pairs are two augmentations of one image, both through the image tower (DisCo-CLIP, 4.1)."""
    activation_checkpointing: bool = False
    """Recompute the blocks' activations in backward."""
    patch_dropout: float | None = Field(None, ge=0, lt=1)
    """Fraction of image patches dropped in training (FLIP); None: as the model's config says."""
    compile: bool = False
    """torch.compile both towers; refused where a forward is repeated and draws random numbers."""
    token_embedding_std: float | None = Field(None, gt=0)
    """Initial standard deviation of the token embedding; None: open_clip's 0.02."""
    max_scale: float = Field(100.0, gt=0, le=1e6)
    """Upper bound of the logit scale exp(t), held after every step."""

    @property
    def label(self) -> str:
        """What messages call the model."""
        return self.factory or self.name

    @model_validator(mode="after")
    def _own(self) -> ModelSettings:
        fields = ("name", "pretrained", "patch_dropout", "token_embedding_std") if self.factory else ("options",)
        for name in fields:
            if getattr(self, name) != ModelSettings.model_fields[name].default:
                why = "the function builds the model itself" if self.factory else "there is no model.factory"
                raise ValueError(f"leave out model.{name}: {why}")
        return self

    @model_validator(mode="after")
    def _one_tower_trains(self) -> ModelSettings:
        if self.two_views and (self.lock_image or self.lock_text):
            raise ValueError("model.two_views trains the image tower and leaves the text tower out: lock neither")
        if self.lock_image and self.lock_text:
            raise ValueError("model.lock_image and model.lock_text are both true: nothing is left to train")
        return self


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
    every_minutes: float = Field(0.0, ge=0, le=MAX_SECONDS / 60)
    """Save by the clock too, after so many minutes; 0: never. SIGTERM or SIGUSR1 to any rank saves as well, and ends
    the run."""
    keep_last: int = Field(3, gt=0)
    """Newest checkpoints to keep; older ones are removed, except as keep_every_steps says."""
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


class LogSettings(Settings):
    """What a run records, and how often."""

    every_steps: int = Field(10, gt=0)
    """Steps between two progress lines, metrics.jsonl records and TensorBoard points; only these steps are timed."""
    tensorboard: bool = True
    """Write TensorBoard points into the run folder."""
    peak_flops: float | None = Field(None, gt=0)
    """Floating-point operations per second of one device, which MFU is a part of; None: known GPUs' own, in 16 bits."""


class EvalSettings(Settings):
    """What a model is evaluated on, and when."""

    every_steps: int = Field(0, ge=0)
    """Steps between two evaluations; 0: only at the end."""
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
    """Name -> captioned images to find by text and the other way round: shards, or clip_benchmark's layout."""
    caption_key: str = "{txt}"
    """Template of a sample's captions in shards, one per line."""

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
    """Length of the run in steps; or `samples`."""
    samples: int | None = Field(None, gt=0)
    """Length of the run in samples, rounded down to whole steps; or `steps`."""
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
    """What to do with a batch whose loss or gradient norm is far above those of the last 64 steps: warn, or skip it
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
        if (self.steps is None) == (self.samples is None):
            raise ValueError(f"give either steps or samples, got steps={self.steps}, samples={self.samples}")
        if self.num_steps < 1:
            raise ValueError(f"samples ({self.samples}) is less than one global_batch ({self.global_batch})")
        if self.data.timeout_s >= self.timeout_s:
            raise ValueError(
                f"data.timeout_s ({self.data.timeout_s:g}) must be below timeout_s ({self.timeout_s:g}): else the "
                "other ranks give up before the silent worker is named"
            )
        for side, locked in (("image", self.model.lock_image), ("text", self.model.lock_text or self.model.two_views)):
            if locked and getattr(self.optim, side) != TowerOptimSettings():
                raise ValueError(f"optim.{side} is of a tower that is not trained; leave it out")
        if self.model.two_views:
            if self.data.augment == AugmentSettings():
                raise ValueError("model.two_views needs data.augment: without it the two views are one")
            if self.eval.labelled or self.eval.retrieval:
                raise ValueError("model.two_views trains no text tower, so there is nothing to evaluate by text")
        if self.optim.warmup_steps + self.optim.cooldown_steps > self.num_steps:
            raise ValueError(
                f"optim.warmup_steps + optim.cooldown_steps ({self.optim.warmup_steps} + {self.optim.cooldown_steps}) "
                f"exceed the run's {self.num_steps} steps"
            )
        return self

    @property
    def num_steps(self) -> int:
        return self.steps if self.steps is not None else (self.samples or 0) // self.global_batch

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
                f"({ranks} x {self.micro_batch} = {part}); nearest: {nearest}"
            )
        return self.global_batch // part

    def describe(self, ranks: int) -> str:
        """The batch algebra, in words."""
        count = self.num_micro_batches(ranks)
        return (
            f"global batch {self.global_batch:,} = {ranks} ranks x {self.micro_batch:,} micro-batch x {count} "
            f"micro-batches per rank\n"
            f"{self.num_steps:,} steps, {self.num_steps * self.global_batch:,} samples, peak lr {self.peak_lr:g}, "
            f"warm-up {self.optim.warmup_steps:,} steps, then {self.optim.schedule}"
        )

    def to_yaml(self) -> str:
        return yaml.dump(self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def render_ds_config(config: Config, ranks: int, run_folder: Path | None = None) -> dict[str, Any]:
    """The complete ds_config of a run. Raises: ValueError, see complete_ds_config and Config.num_micro_batches."""
    if config.model.compile and stage(config.deepspeed) == 3:
        raise ValueError(
            "model.compile at ZeRO 3 is refused: torch.compile reads parameters that ZeRO has not gathered (those of "
            "nn.MultiheadAttention); use ZeRO 0 to 2"
        )
    if config.optim.name == "lamb" and stage(config.deepspeed) > 0:
        raise ValueError(
            f"optim.name=lamb at ZeRO {stage(config.deepspeed)} is refused: its trust ratio is of a parameter's norm, "
            "and ZeRO's optimizer sees flat parts of many (its updates would be half off); use deepspeed=zero0"
        )
    owned: dict[str, Any] = {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.num_micro_batches(ranks),
        "gradient_clipping": config.optim.clip_norm,
        # DeepSpeed's own progress lines and monitor points are off: metrics.py writes ours.
        "steps_per_print": 2**31,
    }
    if run_folder is not None and config.log.tensorboard:
        owned["tensorboard"] = {"enabled": True, "output_path": str(run_folder), "job_name": "tensorboard"}
    return complete_ds_config(config.deepspeed, owned)
