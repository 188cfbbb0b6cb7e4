"""The `model` and `optim` sections of a recipe: the model, its initial weights, and how it is optimized."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from disco_ds.config.settings import (
    Count,
    FunctionName,
    PositiveCount,
    PositiveFraction,
    ProperFraction,
    Settings,
)

OPEN_CLIP_ONLY = (
    "name",
    "pretrained",
    "pretrained_image",
    "unlocked_layers",
    "image_size",
    "image_mean",
    "image_std",
    "interpolation",
    "resize_mode",
    "quick_gelu",
    "patch_dropout",
    "token_embedding_std",
)
"""Settings that apply only to open_clip models, not to custom models from model.factory."""


class ModelSettings(Settings):
    """The model: an open_clip model or a custom model."""

    name: str = "ViT-B-32"
    """Name of an open_clip model; path of a model config (.json); a folder in the layout of the
    Hugging Face Hub, with open_clip_config.json and the tokenizer; or `quickstart`, a small model in
    this package that trains on a CPU."""
    factory: FunctionName | None = None
    """Custom model to use instead of an open_clip model, as `package.module:function`. The function
    returns a disco_ds.TwoTowers; see docs/extending.md."""
    options: dict[str, Any] = {}
    """Keyword arguments for the function model.factory."""
    pretrained: Path | None = None
    """Initial weights of both towers: an open_clip tag such as laion2b_s34b_b79k, whose weights are
    downloaded; a local file (.pt, .bin, .safetensors); or a folder with such a file. The folder's
    preprocessing settings are used too. Null: random weights. Ignored when a run is resumed."""
    pretrained_image: Path | None = None
    """Initial weights of the image tower only: a local file; or, if the image tower is a timm model,
    `timm` for timm's pretrained weights."""
    lock_image: bool = False
    """Freeze the image tower (LiT), usually in combination with pretrained weights."""
    lock_text: bool = False
    """Freeze the text tower."""
    unlocked_layers: Count = 0
    """Number of layer groups at the end of the locked tower that are trained anyway. Layer groups
    are counted as in open_clip's lock functions. 0: the whole tower is frozen."""
    image_size: PositiveCount | None = None
    """Height and width of the model's input images, in pixels. Null: the size in the model
    config."""
    image_mean: tuple[float, float, float] | None = None
    """Mean of each color channel for input normalization, with pixels in [0, 1]. Null: the mean
    used for the pretrained weights if it is known, otherwise OpenAI's mean."""
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = None
    """Standard deviation of each color channel for input normalization, with pixels in [0, 1].
    Null: the value used for the pretrained weights if it is known, otherwise OpenAI's value."""
    interpolation: Literal["bicubic", "bilinear"] | None = None
    """Interpolation method for resizing images. Null: the method used for the pretrained weights if
    it is known, otherwise bicubic."""
    resize_mode: Literal["shortest", "longest", "squash"] | None = None
    """How evaluation makes images square. `shortest`: resize the shortest side and crop. `longest`:
    resize the longest side and pad. `squash`: resize both sides, which distorts the image. Null:
    the mode used for the pretrained weights if it is known, otherwise shortest."""
    quick_gelu: bool | None = None
    """True: use QuickGELU even if the model config does not. False: follow the model config. Null: follow the
    pretrained weights if it is known whether they need QuickGELU, as for open_clip's tags; otherwise follow the model
    config. A value that contradicts the weights is refused. OpenAI's weights need QuickGELU."""
    two_views: bool = False
    """Self-supervised training: a positive pair consists of two augmentations of the same image,
    and the image tower encodes both (DisCo-CLIP, section 4.1). data.augment must be set."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory but takes time. Enable it if a
    micro-batch does not fit into memory."""
    patch_dropout: ProperFraction | None = None
    """Fraction of image patches that are dropped in training (FLIP). Null: the value in the model
    config."""
    towers: Literal["auto", "open_clip"] = "auto"
    """`auto`: replace parts of the towers with faster implementations, which have the same parameters and compute the
    same function up to rounding; text towers then skip padding that has no effect on the features. `open_clip`: leave
    the towers as open_clip builds them."""
    compile: bool | Literal["auto"] = "auto"
    """Apply torch.compile to each block of both towers, or to a whole tower if its blocks are unknown. `auto`: compile
    on a GPU, unless Triton cannot run there or the run uses ZeRO 3; the log then contains the reason. With activation
    checkpointing, a tower whose blocks are unknown is not compiled. `true`: compile, and refuse to start where `auto`
    would not compile because of ZeRO 3 or activation checkpointing."""
    token_embedding_std: PositiveFloat | None = None
    """Initial standard deviation of the token embedding. Null: open_clip's 0.02."""
    max_scale: float = Field(100.0, gt=0, le=1e6)
    """Upper bound of the logit scale (the inverse of the temperature), enforced after every step. If
    the scale starts above this bound, as with some pretrained weights, it is not lowered to the bound,
    but it cannot rise."""

    @property
    def label(self) -> str:
        """Name of the model in messages."""
        return self.factory or self.name

    @model_validator(mode="after")
    def _check_factory(self) -> Self:
        if self.options and self.factory is None:
            raise ValueError(
                "remove model.options: it applies only to model.factory, which is not set"
            )
        given = self.model_dump(include=set(OPEN_CLIP_ONLY), exclude_defaults=True)
        if self.factory and given:
            raise ValueError(f"remove model.{min(given)}: model.factory builds the model itself")
        return self

    @model_validator(mode="after")
    def _check_locks(self) -> Self:
        locked = self.lock_image or self.lock_text
        if self.two_views and locked:
            raise ValueError(
                "model.two_views trains the image tower only: remove model.lock_image and "
                "model.lock_text"
            )
        if self.lock_image and self.lock_text:
            raise ValueError(
                "model.lock_image and model.lock_text are both true, so nothing would be trained: "
                "remove one of them"
            )
        if self.unlocked_layers and not locked:
            raise ValueError(
                "model.unlocked_layers needs a locked tower: set model.lock_image or model.lock_text"
            )
        if self.pretrained and str(self.pretrained_image) == "timm":
            raise ValueError(
                "model.pretrained loads both towers: remove model.pretrained_image=timm"
            )
        return self


class TowerOptimSettings(Settings):
    """Optimizer settings of one tower."""

    lr_factor: PositiveFloat = 1.0
    """Factor by which the learning rate is multiplied for this tower. Lower it for a pretrained
    tower."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of this tower. Null: optim.weight_decay."""
    layer_decay: PositiveFraction = 1.0
    """Ratio of each layer's learning rate to the learning rate of the next layer. The last layer of
    the tower has the full rate. 1: all layers have the same rate."""


class EmaSettings(Settings):
    """The exponential moving average (EMA) of the weights."""

    decay: float = Field(0.9999, gt=0, lt=1)
    """Factor by which the old average is multiplied in every step. After n steps, the factor is at
    most (1 + n) / (10 + n), so that the average soon forgets the first weights."""
    every_steps: PositiveCount = 1
    """Number of steps between two updates of the average. Each update uses decay to the power of this
    number."""


class OptimSettings(Settings):
    """The optimizer and its learning rate schedule."""

    name: Literal["adamw", "lamb", "lion", "muon", "sgd"] = "adamw"
    """Name of the optimizer. lamb requires ZeRO stage 0. muon applies Muon to the weight matrices and
    convolution filters of layers with a number in their name (such as `resblocks.0`), and AdamW to
    all other parameters."""
    factory: FunctionName | None = None
    """Custom optimizer to use instead of `name`, as `package.module:function`, which must be importable
    through PYTHONPATH. The function takes parameter groups and returns a torch optimizer. ZeRO 1 to 3
    need `elementwise`."""
    elementwise: bool = False
    """True: the optimizer that `factory` builds updates each element independently of all others. ZeRO
    1 to 3 require such an optimizer, because they call `step()` once for each parameter group, with flat parts of its
    parameters. An optimizer that counts steps in its parameter groups works up to ZeRO 2."""
    lr: float | None = Field(None, gt=0, lt=1e38)
    """Peak learning rate. Null: it follows from base_lr, lr_rule and the global batch."""
    base_lr: float = Field(5e-4, gt=0, lt=1e38)
    """Peak learning rate for a global batch of 32,768 samples. It is used only if `lr` is null."""
    lr_rule: Literal["linear", "sqrt", "none"] = "linear"
    """How the peak learning rate follows from base_lr if `lr` is null. With r = global_batch /
    32,768: `linear`: base_lr x r (DisCo-CLIP, section 5.1). `sqrt`: base_lr x the square root of r.
    `none`: base_lr."""
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.98)
    """Betas of AdamW, LAMB, Lion and the AdamW part of muon."""
    eps: PositiveFloat = 1e-6
    """Epsilon of AdamW, LAMB and the AdamW part of muon."""
    momentum: ProperFraction = 0.9
    """Momentum of SGD and Muon. Muon is usually trained with 0.95."""
    muon_precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision in which Muon orthogonalizes updates. On CPUs, fp32 may be faster."""
    weight_decay: NonNegativeFloat = 0.2
    """Weight decay of the weight matrices. The following have no weight decay: biases, normalization parameters and
    other vectors; position embeddings (absolute or relative); parameters that a module's `no_weight_decay()` names; the
    logit scale and the logit bias."""
    clip_norm: NonNegativeFloat = 0.0
    """Maximum norm of the gradient of all parameters together. Larger gradients are scaled down to
    this norm. 0: no clipping. If the gradient norm has spikes, set a value such as 1."""
    schedule: Literal["cosine", "constant", "cooldown"] = "cosine"
    """Learning rate schedule after warmup. `cosine`: cosine decay to lr_min. `constant`: no change.
    `cooldown`: constant, then a linear decay to lr_min over the last cooldown_steps."""
    warmup_steps: Count = 2000
    """Number of steps over which the learning rate rises linearly to its peak. Lower it for short
    runs."""
    cooldown_steps: Count = 0
    """Number of steps of the linear decay at the end of the run, if schedule is cooldown."""
    lr_min: NonNegativeFloat = 0.0
    """Learning rate at the end of the run, if schedule is cosine or cooldown."""
    tau_lr: PositiveFloat | None = None
    """Constant learning rate of the logit scale and the logit bias, without warmup. Null: they have
    the same learning rate as the other parameters."""
    tau_slow: NonNegativeFloat = 0.0
    """While the temperature is at or below this value (0.03 in FastCLIP), tau_lr is divided by 3.
    0: off."""
    ema: EmaSettings | None = None
    """Also keep a moving average of the weights, and evaluate both the weights and the average. The
    average takes 4 bytes per parameter, which ZeRO 1 to 3 divide among the ranks. Null: off."""
    image: TowerOptimSettings = TowerOptimSettings()
    text: TowerOptimSettings = TowerOptimSettings()

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.tau_slow and self.tau_lr is None:
            raise ValueError(
                f"optim.tau_slow={self.tau_slow:g} has no effect without optim.tau_lr: set both or "
                "neither"
            )
        if (self.schedule == "cooldown") != (self.cooldown_steps > 0):
            raise ValueError(
                "optim.schedule=cooldown and optim.cooldown_steps above 0 must be set together, got "
                f"optim.schedule={self.schedule} and optim.cooldown_steps={self.cooldown_steps}"
            )
        return self
