"""The `model` part of a recipe: its architecture, the weights it starts from, what of it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from disco_ds.config.data import Settings
from disco_ds.config.own_code import PATTERN

Positive = Annotated[float, Field(gt=0)]
OF_OPEN_CLIP = (
    *("name", "pretrained", "pretrained_image", "unlocked_layers", "image_size", "image_mean", "image_std"),
    *("interpolation", "resize_mode", "quick_gelu", "patch_dropout", "token_embedding_std"),
)
"""Settings that only a model of open_clip's takes."""


class ModelSettings(Settings):
    """The open_clip model that is trained."""

    name: str = "ViT-B-32"
    """An open_clip model name, a path of a model config (.json), or `quickstart`, a small model of the package."""
    factory: str | None = Field(None, pattern=rf"^{PATTERN}$")
    """`package.module:function` that returns a disco_ds.TwoTowers, in place of open_clip's model: docs/own_model.md."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of model.factory."""
    pretrained: Path | None = None
    """Weights that open_clip can load: one of its tags, such as laion2b_s34b_b79k, which is fetched from the hub; a
    local file (.pt, .bin, .safetensors); or a folder with one, whose preprocessing is taken as well. A run that is
    resumed does not read them."""
    pretrained_image: Path | None = None
    """Weights of the image tower alone: a local file, or `timm` for those that timm has for its own towers."""
    lock_image: bool = False
    """Freeze the image tower (LiT)."""
    lock_text: bool = False
    """Freeze the text tower."""
    unlocked_layers: int = Field(0, ge=0)
    """Last groups of layers of the locked tower that are trained, counted as open_clip's `lock` counts them."""
    image_size: Annotated[int, Field(gt=0)] | None = None
    """Height and width of the images; None: as the model's config says."""
    image_mean: tuple[float, float, float] | None = None
    """Mean of the channels, with pixels in [0, 1]; None: that of the pretrained weights, else OpenAI's."""
    image_std: tuple[Positive, Positive, Positive] | None = None
    """Standard deviation of the channels; None: that of the pretrained weights, else OpenAI's."""
    interpolation: Literal["bicubic", "bilinear"] | None = None
    """How images are resized; None: as the pretrained weights say, else bicubic."""
    resize_mode: Literal["shortest", "longest", "squash"] | None = None
    """How evaluation fits images into the size; None: as the pretrained weights say, else shortest."""
    quick_gelu: bool = False
    """Use QuickGELU, with which OpenAI's weights were trained, whatever the model's config says."""
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
        """Name of the model in messages."""
        return self.factory or self.name

    @model_validator(mode="after")
    def _own(self) -> ModelSettings:
        for name in OF_OPEN_CLIP if self.factory else ("options",):
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
        if self.unlocked_layers and not (self.lock_image or self.lock_text):
            raise ValueError("model.unlocked_layers is of a locked tower: set model.lock_image or model.lock_text")
        if self.pretrained and str(self.pretrained_image) == "timm":
            raise ValueError("model.pretrained loads both towers: leave model.pretrained_image=timm out")
        return self
