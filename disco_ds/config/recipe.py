"""The settings of a run, as a recipe (a YAML file) contains them.

Settings are validated when the recipe is loaded and never change afterwards. A recipe controls the
batch, the loss, the model, the data, the optimizer and the logging. Its `deepspeed` entry names a
ds_config (a JSON file), which controls ZeRO, precision, offload and communication (see
ds_config.py).

Import-light: neither torch nor DeepSpeed is imported, so any module may import this file.
"""

import fractions
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, model_validator

from disco_ds.config.data import CropScale, DataSettings, Pixels, check_template
from disco_ds.config.ds_config import precision, zero_stage
from disco_ds.config.model import ModelSettings, OptimSettings
from disco_ds.config.recipe_yaml import dump
from disco_ds.config.settings import (
    MAX_COUNT,
    MAX_SECONDS,
    Count,
    Fraction,
    PositiveCount,
    ProperFraction,
    Settings,
    Tree,
)
from disco_ds.names import plural

PACKAGE = Path(__file__).parents[1]
BASE_BATCH = 32_768
"""The global batch size to which `optim.base_lr` refers (DisCo-CLIP, section 5.1)."""
MAX_EPOCHS = 1e6
"""Upper bound of settings in epochs. This many epochs of 10^11 samples each still fit into int64."""

TAUGHT = ("clip", "disco", "disco_fused", "inf_cl", "siglip")
"""Names of the losses that can learn from a teacher."""


StoredField = Annotated[str, Field(pattern=r"^[\w.-]+(\[[^\[\]]+\])*$")]
"""Name of a tar member, such as img.npy, or of an entry in a member, such as npz[image_emb]."""


class LossSettings(Settings):
    """The loss and its options."""

    name: str = "disco_fused"
    """Name of a registered loss (docs/losses.md compares them), or a custom loss as
    `package.module:Class`, which must be importable through PYTHONPATH."""
    options: dict[str, Any] = {}
    """Keyword arguments for the loss. The section loss.options of docs/settings.md lists them."""


class TeacherSettings(Settings):
    """A teacher, whose similarities are soft targets for the loss: a frozen model, or stored embeddings."""

    model: str | None = None
    """Name of an open_clip model, or the path of a model config or folder, as in model.name."""
    pretrained: Path | None = None
    """The teacher's weights, as in model.pretrained."""
    image: StoredField | None = None
    """Tar member that contains the stored embeddings of a sample's image, such as img.npy, or an array in a member,
    such as npz[image_emb] or pth.gz[image_emb]. Set teacher.image and teacher.text instead of teacher.model. D is the
    width of an embedding. An array of shape [D] is used for every augmentation of the image. An array of shape [n, D]
    has a row for each of n augmentations. In epoch e, the run uses row e mod n, and gives the image the augmentation
    that belongs to this row (see teacher.replay)."""
    text: StoredField | None = None
    """Tar member that contains the stored embeddings of a sample's captions, such as txt.npy, or an array in a member.
    D is the width of an embedding. An array of shape [D] belongs to a single caption. An array of shape [m, D] has a
    row for each of the m captions that data.captions can produce. The rows are in the order of the templates and, for a
    template with `[*]`, in the order of the list's items."""
    replay: StoredField | None = None
    """Tar member that records the augmentation of each row of teacher.image in DataCompDR's format, such as
    paug.json[param_aug]. The run repeats the augmentation with torchvision's operations. Null: the
    rows belong to the augmentations that `disco-ds embed` makes."""
    widths: tuple[PositiveCount, ...] | None = None
    """Widths of several teachers' embeddings if each stored row concatenates them, such as [768, 768]. The embeddings
    of each teacher are normalized, and the target is the mean of the teachers' softmaxes. Null: one teacher.
    The width is then that of the first sample's embedding."""
    scale: tuple[PositiveFloat, ...] | PositiveFloat = 100.0
    """Logit scale of stored embeddings, or a list with the logit scale of each teacher. A frozen model
    uses the logit scale that it has learned."""
    bias: float | None = None
    """Logit bias of stored embeddings. loss.name=siglip needs it."""
    weight: Fraction = 1.0
    """Weight of the teacher's soft targets in the loss. The targets that the data's pairs give have the weight
    1 - weight."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        # Not model_fields_set: a run folder's config.yaml sets all fields, also those with defaults.
        given = self.model_dump(exclude_defaults=True).keys() - {"weight"}
        if self.model and self.pretrained and given <= {"model", "pretrained"}:
            return self
        if not (self.image and self.text) or given & {"model", "pretrained"}:
            raise ValueError(
                "a teacher has either model and pretrained, or image and text, which name stored embeddings"
            )
        if len(self.scales) != len(self.widths or (0,)):
            raise ValueError(
                "set one teacher.scale for all teachers, or one for each of teacher.widths"
            )
        return self

    @property
    def scales(self) -> tuple[float, ...]:
        """The logit scale of each teacher."""
        if isinstance(self.scale, tuple):
            return self.scale
        return (self.scale,) * len(self.widths or (0,))

    @property
    def settings(self) -> ModelSettings | None:
        """The model settings of the teacher; None if its embeddings are stored."""
        if self.model is None:
            return None
        return ModelSettings(name=self.model, pretrained=self.pretrained)


def _check_copy_command(command: str) -> str:
    if "{path}" not in command:
        raise ValueError(
            f"expected a command with {{path}} and optionally {{name}}, got {command!r}"
        )
    shlex.split(command)  # raises ValueError if a quote is not closed
    return command


class CheckpointSettings(Settings):
    """When checkpoints are saved, which ones are kept, and where they are copied."""

    every_steps: Count = 1000
    """Number of steps between checkpoints. 0: no checkpoints at fixed steps. A checkpoint is always
    saved at the end of the run."""
    every_epochs: float = Field(0.0, ge=0, le=MAX_EPOCHS)
    """Number of epochs between checkpoints. If it is set, every_steps is ignored. 0: not set."""
    every_minutes: float = Field(0.0, ge=0, le=MAX_SECONDS / 60)
    """Also save a checkpoint when this many minutes have passed since the last one. 0: off.
    Regardless of this setting, sending SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) to any rank saves a
    checkpoint and ends the run."""
    asynchronous: bool = True
    """Write checkpoints in the background. Training then pauses only while each rank copies its
    state to host memory. The copy takes as much host memory as the checkpoint files of that rank.
    False: training pauses until the files are written. Use false if host memory is short."""
    keep_last: PositiveCount | None = 3
    """Number of most recent checkpoints to keep. Older checkpoints are removed, except those that
    keep_every_steps protects. Null: keep all."""
    keep_every_steps: Count = 0
    """Never remove a checkpoint whose step is a multiple of this number. 0: off."""
    copy_command: Annotated[str, AfterValidator(_check_copy_command)] | None = None
    """Command that copies each checkpoint after it is saved, for example `aws s3 cp --recursive
    {path} s3://bucket/run/{name}`. {path} is replaced by the path of the checkpoint and {name} by
    its name. The command runs in the background and without a shell. Only one copy runs at a time.
    If several checkpoints are saved during a copy, only the newest of them is copied next. A failed
    copy is logged and does not stop the run. An unfinished copy is repeated when the run is
    resumed, so it must be safe to run the command twice. At its end, the run waits at most timeout_s for
    unfinished copies."""


class WandbSettings(Settings):
    """Logging to Weights & Biases, which needs the wandb package.

    The API key is not a setting. Set the environment variable WANDB_API_KEY, or run `wandb login`. W&B's
    other variables work too, such as WANDB_NAME, WANDB_RUN_GROUP and WANDB_ENTITY.
    """

    project: str | None = None
    """W&B project to which the run is logged. Null: nothing is logged to W&B."""


class LogSettings(Settings):
    """What is logged, how often and where."""

    every_steps: PositiveCount = 10
    """Number of steps between two log records. Each record is a log line, a line of metrics.jsonl
    and a TensorBoard point. The times of a step's phases are measured in the logged steps only."""
    tensorboard: bool = True
    """Write TensorBoard points into the run folder."""
    wandb: WandbSettings = WandbSettings()
    peak_flops: PositiveFloat | None = None
    """Peak floating-point operations per second of one device, used to compute MFU (model FLOPs
    utilization). Null: the 16-bit peak of the GPU, if this GPU model is known. For any other
    device, MFU is logged only if peak_flops is set."""


Template = Annotated[str, AfterValidator(check_template)]


class ProbeSettings(Settings):
    """Labeled images for the probes of the image tower, in any layout that eval.labeled accepts."""

    train: str
    """Images that the probes learn from."""
    test: str
    """Images that the probes classify."""


class EvalSettings(Settings):
    """Which data the model is evaluated on, and when."""

    every_steps: Count = 0
    """Number of steps between evaluations. 0: evaluate only at the end of the run."""
    every_epochs: float = Field(0.0, ge=0, le=MAX_EPOCHS)
    """Number of epochs between evaluations. If it is set, every_steps is ignored. 0: not set."""
    labeled: dict[str, str] = {}
    """Name of an evaluation set -> its labeled images, for zero-shot classification among the
    labels of that set. The images are a folder of .tar shards, a bundled set such as
    `bundled:emoji/unseen`, a folder with one sub-folder per class, or a folder in clip_benchmark's
    webdataset layout. Sub-folders are named after their classes (`tabby_cat`) or, as in ImageNet val, by ImageNet ids
    (wnids such as `n02123045`), whose class names come from open_clip."""
    label_key: Template = "{json[label]}"
    """Template for the label of a sample. It is used for labeled sets in shards."""
    classes: dict[str, Path] = {}
    """Name of a labeled set -> file with its class names. A text file has one class name per line,
    or a label, a tab and a class name per line. A JSON file contains a list of class names, or a
    mapping from label to class name."""
    templates: dict[str, str] = {}
    """Name of a labeled set -> file of prompt templates, in which {} or {c} stands for the class
    name; or `imagenet` for open_clip's 80 ImageNet templates. Default for a folder in
    clip_benchmark's layout: the templates in that folder, or the 80 ImageNet templates if there are
    none. Default for class folders: the 80 ImageNet templates. Default for shards: the class name
    alone."""
    retrieval: dict[str, str] = {}
    """Name of an evaluation set -> its captioned images, for image-to-text and text-to-image
    retrieval. The images are a folder of .tar shards, a csv, or a folder in clip_benchmark's layout."""
    validation: dict[str, str] = {}
    """Name of an evaluation set -> its held-out image-text pairs, for the validation loss. The
    pairs are a folder of .tar shards, a csv, or a folder in clip_benchmark's layout."""
    probes: dict[str, ProbeSettings] = {}
    """Name of an evaluation set -> its `train` and `test` images. A k-nearest-neighbors classifier and
    a linear classifier learn from the image features of `train`; their accuracy on `test` is reported.
    The text tower is not used, so probes also work for a model trained with model.two_views. Probes
    need scikit-learn (`pip install 'disco_ds[probes]'`)."""
    validation_batch: int = Field(1024, gt=1, le=MAX_COUNT)
    """Batch size of the validation loss. The value of the loss depends on the batch size, so the
    name of the metric contains the batch size."""
    caption_key: Template = "{txt}"
    """Template for the captions of a sample. It may produce several captions, one per line. The
    validation loss uses only the first. In a csv, {txt} stands for the column `title`, and the
    column of image paths may also be named `filepath`."""

    @property
    def sets(self) -> list[str]:
        """Locations of all evaluation sets: folders, csv files or bundled sets."""
        sets = [*self.labeled.values(), *self.retrieval.values(), *self.validation.values()]
        for probe in self.probes.values():
            sets += [probe.train, probe.test]
        return sets

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if unknown := (self.classes.keys() | self.templates) - self.labeled.keys():
            raise ValueError(
                f"eval.classes and eval.templates: eval.labeled has no set named {', '.join(sorted(unknown))}"
            )
        return self


class StageSettings(Settings):
    """A stage of a run. A setting that is null keeps the recipe's value."""

    until: PositiveCount
    """Number of samples that the run has seen when the stage ends. The stage must consist of whole
    steps. The run ends with its last stage."""
    global_batch: PositiveCount | None = None
    """Global batch of this stage."""
    micro_batch: PositiveCount | None = None
    """Micro-batch of this stage."""
    image_size: PositiveCount | None = None
    """Image size of this stage. The position embedding of an open_clip ViT is resized; other image
    towers must not have parameters that depend on the image size."""
    patch_dropout: ProperFraction | None = None
    """Patch dropout of this stage."""
    crop_scale: CropScale | None = None
    """data.crop_scale of this stage."""


class Config(Settings):
    """All settings of a run."""

    name: str = Field(pattern=r"^[\w+=@][\w.+=@ -]*$", max_length=100)
    """Name of the run and of its folder inside `runs`. It may contain letters, digits, spaces and the
    characters `.+=@-_`, but must not begin with a space, a dot or a hyphen."""
    runs: Path = Path("runs")
    """Folder that contains the run folders. With several hosts it must be on a shared file
    system."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Random seed for the data order, the initial weights and all other random numbers."""
    ranks: PositiveCount | None = None
    """Number of ranks (world size) that this recipe requires. A run with a different number of
    ranks is refused. Null: any number."""
    global_batch: PositiveCount
    """Number of samples per optimizer step, summed over all ranks. It must be a multiple of ranks x
    micro_batch."""
    micro_batch: PositiveCount
    """Number of samples per forward pass on one rank. It affects memory use and speed but not the
    gradient, which is always the gradient of the global batch. Choose the largest value that fits
    into memory (see `disco-ds plan`)."""
    steps: PositiveCount | None = None
    """Length of the run in optimizer steps. Set exactly one of `steps`, `samples`, `epochs` and
    `stages`."""
    samples: PositiveCount | None = None
    """Length of the run in samples, rounded down to whole steps."""
    epochs: float | None = Field(None, gt=0, le=MAX_EPOCHS)
    """Length of the run in epochs, rounded down to whole steps. One epoch has as many samples as
    all sources together. The samples are counted when the run starts, and the resulting number of
    `samples` is written into the run's config.yaml."""
    stages: tuple[StageSettings, ...] = ()
    """Stages of the run, which may differ in batch sizes, image size, patch dropout and crops. The
    last stage's `until` is the length of the run."""
    image_staging: Pixels = "device"
    """Where the images of a step are kept between the first and the second forward pass of their micro-batches.
    `device` keeps them as uint8 in device memory. `host` keeps them as uint8 in pinned host memory; choose it if device
    memory is short."""
    timeout_s: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """The run ends with an error if a collective operation or a phase of a step takes longer than
    this many seconds. If the process of one rank is behind, the error names this rank. Raise the
    timeout if a healthy step, evaluation or startup takes longer."""
    lost_after_s: float = Field(120.0, ge=1, le=MAX_SECONDS)
    """The run ends with an error if a rank sends no heartbeat for this many seconds. Such a rank
    was killed or suspended, or its host is down."""
    skip_nonfinite: Count = 0
    """Number of consecutive batches with a non-finite loss or gradient that may be skipped without
    an update. One more such batch stops the run. Steps that fp16's loss scaler skips do not
    count."""
    on_spike: Literal["warn", "skip"] = "warn"
    """What to do with a batch whose loss or gradient norm is far above the values of the last 64
    steps. `warn`: only log a warning. `skip`: skip the batch without an update. If the values stay
    high for 32 steps, they no longer count as a spike."""
    model: ModelSettings = ModelSettings()
    loss: LossSettings = LossSettings()
    teacher: TeacherSettings | None = None
    """Train with soft targets from a frozen model or from stored embeddings; see docs/teachers.md. The loss must be
    clip, disco, disco_fused, inf_cl or siglip. Null: no teacher."""
    data: DataSettings
    optim: OptimSettings = OptimSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()
    eval: EvalSettings = EvalSettings()
    deepspeed: dict[str, Any]
    """DeepSpeed's settings: the name of a file in ds_configs/, the path of a JSON file, or a
    mapping of settings. A mapping may contain `base`, the name or path of a file whose settings the
    mapping overrides. DeepSpeed's settings control ZeRO, precision, offload and communication."""

    @property
    def precision(self) -> str:
        """The precision that the DeepSpeed settings enable: autocast, bf16, fp16 or fp32."""
        return precision(self.deepspeed)

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return zero_stage(self.deepspeed)

    @property
    def loss_options(self) -> Tree:
        """The options of the loss, including the weight of the teacher."""
        weight = {"teacher_weight": self.teacher.weight} if self.teacher else {}
        return self.loss.options | weight

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        if "teacher_weight" in self.loss.options:
            raise ValueError(
                "remove loss.options.teacher_weight: teacher.weight sets it, and teacher.model names the teacher"
            )
        if self.teacher is None:
            return self
        if self.loss.name not in TAUGHT:
            raise ValueError(
                f"a teacher needs loss.name={' or '.join(TAUGHT)}, but loss.name is {self.loss.name}"
            )
        if self.model.two_views or self.data.source == "synthetic":
            raise ValueError(
                "a teacher needs captions: model.two_views and synthetic data have none"
            )
        if self.teacher.image:
            if self.loss.name == "siglip" and self.teacher.bias is None:
                raise ValueError(
                    "set teacher.bias: loss.name=siglip needs the teacher's logit bias"
                )
            if self.teacher.replay and self.data.augment.is_random:
                raise ValueError(
                    "remove data.augment: the stored embeddings include only the augmentations in teacher.replay"
                )
        return self

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        lengths = self.model_dump(include={"steps", "samples", "epochs"}, exclude_none=True)
        given = [f"{name}={value}" for name, value in lengths.items()]
        if self.stages:
            given.append("stages")
        if len(given) != 1:
            raise ValueError(
                "set exactly one of steps, samples, epochs and stages, got "
                f"{' and '.join(given) or 'none'}; to remove a setting, pass NAME=null or stages=[]"
            )
        self.check_stages()
        by_epoch = self.epochs or self.checkpoint.every_epochs or self.eval.every_epochs
        if by_epoch and self.data.index == "none":
            raise ValueError(
                "with data.index=none, the length of an epoch is unknown: set samples and every_steps instead of "
                "epochs and every_epochs"
            )
        if self.samples and self.samples < self.global_batch:
            raise ValueError(
                f"samples={self.samples} is less than one step of global_batch={self.global_batch}: "
                "make the run longer or lower global_batch"
            )
        return self

    def check_stages(self, samples: int = 0) -> None:
        """Check that every stage ends after a whole step.

        Args:
            samples: Number of samples that the run has seen already. Stages that have ended are not checked.

        Raises:
            ValueError: If a stage is invalid. If it ends in the middle of a step, the message suggests the nearest
                valid end.
        """
        before = samples
        for number, stage in enumerate(self.stages):
            if stage.until <= samples:
                continue
            name = f"stages.{number}.until={stage.until}"
            if self.model.factory and (stage.image_size or stage.patch_dropout is not None):
                raise ValueError(
                    f"remove image_size and patch_dropout from stages.{number}: model.factory builds the model itself"
                )
            length = stage.until - before
            if length <= 0:
                raise ValueError(f"{name} must be above {before}, the end of the previous stage")
            batch = stage.global_batch or self.global_batch
            if length % batch:
                nearest = before + batch * max(round(length / batch), 1)
                raise ValueError(
                    f"{name} is in the middle of a step (global_batch={batch}); nearest: until={nearest}"
                )
            before = stage.until

    @model_validator(mode="after")
    def _derive_timeouts(self) -> Self:
        # These timeouts are shorter than timeout_s, so that the error that names a stuck worker or shard is raised
        # before the other ranks time out.
        remote = self.data.remote.replace(timeout_s=self.timeout_s / 10)
        data = self.data.replace(worker_timeout_s=self.timeout_s / 2, remote=remote)
        self.__dict__["data"] = data
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        same_group = self.loss.options.get("same_group", "negatives")
        if same_group != "negatives" and self.data.group_by is None:
            raise ValueError(
                f"loss.options.same_group={same_group} needs data.group_by: set it to caption, image or a template "
                "such as '{json[label]}'"
            )
        two_views = self.model.two_views
        if two_views and not self.data.augment.is_random:
            raise ValueError(
                "model.two_views needs random changes in data.augment: without them the two views are identical"
            )
        if two_views and (self.eval.labeled or self.eval.retrieval or self.eval.validation):
            raise ValueError(
                "model.two_views does not train the text tower, which these evaluations need: use "
                "eval.probes instead"
            )
        return self

    def find_end(self, step: int = 0, samples: int = 0) -> tuple[int, int]:
        """Return the number of steps and the number of samples after which the run ends.

        Args:
            step: Number of steps that the run has completed.
            samples: Number of samples that the run has seen in these steps. It does not follow from `step`,
                because earlier stages may have had another global batch.

        Raises:
            ValueError: If the length is given in epochs. `with_samples` converts epochs to samples.
        """
        if self.epochs is not None:
            raise ValueError("epochs can be converted to steps only after the samples are counted")
        if self.steps is not None:
            return self.steps, samples + (self.steps - step) * self.global_batch
        configs = self.stage_configs
        left = [stage for stage in configs if (stage.samples or 0) > samples]
        for stage in left or configs[-1:]:
            num_steps = ((stage.samples or 0) - samples) // stage.global_batch
            step += num_steps
            samples += num_steps * stage.global_batch
        return step, samples

    def at_sample(self, number: int) -> Self:
        """Return the settings of the stage that contains sample `number`, as settings of a run without stages.

        The length in the returned settings is the end of the stage. If this run has no stages, its settings are
        returned unchanged.

        Args:
            number: Number of the sample in the whole run, from 0.
        """
        if not self.stages:
            return self
        stage = next((each for each in self.stages if number < each.until), self.stages[-1])

        def given(*names: str) -> Tree:
            return stage.model_dump(include=set(names), exclude_none=True)

        return self.replace(
            stages=(),
            samples=stage.until,
            model=self.model.replace(**given("image_size", "patch_dropout")),
            data=self.data.replace(**given("crop_scale")),
            **given("global_batch", "micro_batch"),
        )

    @property
    def stage_configs(self) -> list[Self]:
        """The settings of each stage. If the run has no stages, the list contains only the settings of the run."""
        return [self.at_sample(stage.until - 1) for stage in self.stages] or [self]

    def with_samples(self, num_samples: int) -> Self:
        """Return the settings. If they give the length of the run in epochs, convert it to samples.

        Args:
            num_samples: Number of samples in one epoch.

        Raises:
            ValueError: If the run has less than one step.
        """
        if self.epochs is None:
            return self
        # Floats such as 1.15 are not exact.
        samples = int(fractions.Fraction(str(self.epochs)) * num_samples)
        if samples < self.global_batch:
            raise ValueError(
                f"global_batch={self.global_batch} is larger than the whole run: epochs={self.epochs:g}, and the data "
                f"has {num_samples:,} samples; lower global_batch, or raise epochs"
            )
        return self.replace(samples=samples, epochs=None)

    @property
    def peak_lr(self) -> float:
        """The learning rate after warmup."""
        if self.optim.lr is not None:
            return self.optim.lr
        powers = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}
        return self.optim.base_lr * (self.global_batch / BASE_BATCH) ** powers[self.optim.lr_rule]

    def num_micro_batches(self, ranks: int) -> int:
        """Return the number of micro-batches per rank and step.

        Args:
            ranks: World size.

        Raises:
            ValueError: If the recipe requires a different world size, or if global_batch is not a
                multiple of ranks x micro_batch. In the second case, the message suggests the nearest
                valid global_batch.
        """
        if self.ranks is not None and ranks != self.ranks:
            raise ValueError(
                f"the recipe expects {plural(self.ranks, 'rank')}, but this run has {ranks}. Is the hostfile missing? "
                "Without it, deepspeed uses this host alone. To change the number on purpose, pass "
                f"ranks={ranks}."
            )
        samples = ranks * self.micro_batch
        if self.global_batch % samples:
            nearest = samples * max(round(self.global_batch / samples), 1)
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of ranks x micro_batch "
                f"({ranks} x {self.micro_batch} = {samples}); nearest: global_batch={nearest}"
            )
        return self.global_batch // samples

    def describe(self, ranks: int, step: int = 0, samples: int = 0) -> str:
        """Return a description of the batch, the length of the run and the learning rate.

        Args:
            ranks: World size.
            step: Number of completed steps.
            samples: Number of samples that the run has seen. The description omits stages that have ended.
        """
        length = f"{self.epochs} epochs (the number of steps is known once the samples are counted)"
        if self.epochs is None:
            length = "{:,} steps, {:,} samples".format(*self.find_end(step, samples))
        rule = f" (from optim.base_lr, scaling rule: {self.optim.lr_rule})"
        if self.optim.lr:
            rule = ""
        lines = []
        for config in self.stage_configs:
            if not self.stages or (config.samples or 0) > samples:
                until = f"until {config.samples:,} samples: " if self.stages else ""
                lines.append(
                    f"{until}global batch {config.global_batch:,} = {plural(ranks, 'rank')} x micro-batch "
                    f"{config.micro_batch:,} x {config.num_micro_batches(ranks)} per step, "
                    f"peak learning rate {config.peak_lr:g}{rule}"
                )
        lines.append(
            f"{length}, {self.optim.warmup_steps:,} warmup steps, then {self.optim.schedule}"
        )
        return "\n".join(lines)

    def to_yaml(self) -> str:
        """Return the settings as the YAML text of a recipe."""
        return dump(self.model_dump(mode="json"))
