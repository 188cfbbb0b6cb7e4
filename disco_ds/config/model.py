"""The `model` section of a recipe: architecture, initial weights, and which parts are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from disco_ds.config.data import Settings
from disco_ds.names import CUSTOM_CODE

Positive = Annotated[float, Field(gt=0)]
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
"""Settings that apply to open_clip models only, not to model.factory."""


class ModelSettings(Settings):
    """The model: one of open_clip's, or a custom one."""

    name: str = "ViT-B-32"
    """An open_clip model name, the path of a model config (.json), or `quickstart`, a small
    model of this package."""
    factory: str | None = Field(None, pattern=rf"^{CUSTOM_CODE}$")
    """`package.module:function` that returns a disco_ds.TwoTowers, instead of an open_clip
    model; see docs/extending.md."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of model.factory."""
    pretrained: Path | None = None
    """Initial weights: an open_clip tag such as laion2b_s34b_b79k, which is downloaded from the
    hub; a local file (.pt, .bin, .safetensors); or a folder with such a file, whose
    preprocessing settings are used too. Not read when a run is resumed."""
    pretrained_image: Path | None = None
    """Initial weights of the image tower only: a local file, or `timm` for the pretrained
    weights of a timm tower."""
    lock_image: bool = False
    """Freeze the image tower (LiT)."""
    lock_text: bool = False
    """Freeze the text tower."""
    unlocked_layers: int = Field(0, ge=0)
    """Number of last layer groups of the locked tower that are still trained, counted as in
    open_clip's `lock`."""
    image_size: Annotated[int, Field(gt=0)] | None = None
    """Height and width of the images; None: the model config's."""
    image_mean: tuple[float, float, float] | None = None
    """Mean of each channel, for pixels in [0, 1]; None: the pretrained weights' mean if known,
    otherwise OpenAI's."""
    image_std: tuple[Positive, Positive, Positive] | None = None
    """Standard deviation of each channel; None: the pretrained weights' if known, otherwise OpenAI's."""
    interpolation: Literal["bicubic", "bilinear"] | None = None
    """Interpolation for resizing images; None: the pretrained weights' if known, otherwise bicubic."""
    resize_mode: Literal["shortest", "longest", "squash"] | None = None
    """How evaluation resizes images to the square input; None: the pretrained weights' mode if
    known, otherwise shortest."""
    quick_gelu: bool = False
    """Use QuickGELU regardless of the model config. OpenAI's weights were trained with it."""
    two_views: bool = False
    """Self-supervised training: a pair is two augmentations of one image, both encoded by the
    image tower (DisCo-CLIP, 4.1)."""
    activation_checkpointing: bool = False
    """Recompute activations in backward, to save memory."""
    patch_dropout: float | None = Field(None, ge=0, lt=1)
    """Fraction of image patches dropped in training (FLIP); None: the model config's."""
    compile: bool = False
    """Apply torch.compile to both towers. Refused if GradAccum would repeat a forward that draws
    random numbers."""
    token_embedding_std: float | None = Field(None, gt=0)
    """Initial standard deviation of the token embedding; None: open_clip's 0.02."""
    max_scale: float = Field(100.0, gt=0, le=1e6)
    """Upper bound of the logit scale exp(t), enforced after every step."""

    @property
    def label(self) -> str:
        """Name of the model for messages."""
        return self.factory or self.name

    @model_validator(mode="after")
    def _check_factory(self) -> ModelSettings:
        if self.factory is None:
            if self.options:
                raise ValueError(
                    "remove model.options: they are for model.factory, which is not given"
                )
            return self
        for name in OPEN_CLIP_ONLY:
            if getattr(self, name) != ModelSettings.model_fields[name].default:
                raise ValueError(f"remove model.{name}: model.factory builds the model itself")
        return self

    @model_validator(mode="after")
    def _check_locks(self) -> ModelSettings:
        if self.two_views and (self.lock_image or self.lock_text):
            raise ValueError(
                "model.two_views trains the image tower only: remove model.lock_image and model.lock_text"
            )
        if self.lock_image and self.lock_text:
            raise ValueError(
                "model.lock_image and model.lock_text are both true: nothing is left to train"
            )
        if self.unlocked_layers and not (self.lock_image or self.lock_text):
            raise ValueError(
                "model.unlocked_layers needs a locked tower: set model.lock_image or model.lock_text"
            )
        if self.pretrained and str(self.pretrained_image) == "timm":
            raise ValueError(
                "model.pretrained loads both towers: remove model.pretrained_image=timm"
            )
        return self
