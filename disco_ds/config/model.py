"""The `model` section of a recipe: the architecture, the initial weights, and which parts are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from disco_ds.config.settings import Count, PositiveCount, Settings
from disco_ds.names import CUSTOM_CODE

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
    factory: str | None = Field(None, pattern=rf"^{CUSTOM_CODE}$")
    """Custom model to use instead of an open_clip model, as `package.module:function`. The function
    returns a disco_ds.TwoTowers; see docs/extending.md."""
    options: dict[str, Any] = Field({})
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
    patch_dropout: float | None = Field(None, ge=0, lt=1)
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
    def _check_factory(self) -> ModelSettings:
        if self.options and self.factory is None:
            raise ValueError(
                "remove model.options: it applies only to model.factory, which is not set"
            )
        for name in OPEN_CLIP_ONLY if self.factory else ():
            if getattr(self, name) != ModelSettings.model_fields[name].default:
                raise ValueError(f"remove model.{name}: model.factory builds the model itself")
        return self

    @model_validator(mode="after")
    def _check_locks(self) -> ModelSettings:
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
