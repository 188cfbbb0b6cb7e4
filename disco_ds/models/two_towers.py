"""Custom models: any two towers, built by a user's function that a recipe names as `model.factory`.

The function is called with `model.options` and returns a TwoTowers object, with or without pretrained weights. The
attributes and methods of TwoTowers have the same names as in open_clip's models, so that the trainer treats custom and
open_clip models alike. docs/extending.md has an example.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import open_clip
import torch
from timm.layers import freeze_batch_norm_2d
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from disco_ds.config import ModelSettings
from disco_ds.names import explain_errors, load_custom


def freeze_statistics(tower: nn.Module) -> nn.Module:
    """Freeze the statistics of every BatchNorm2d whose weights are frozen. Return the tower.

    This uses timm's freeze_batch_norm_2d, because some layers of timm contain an activation function, which open_clip's
    freeze_batch_norm_2d would remove.
    """
    if not any(parameter.requires_grad for parameter in tower.parameters()):
        return freeze_batch_norm_2d(tower)
    for name, child in tower.named_children():
        setattr(tower, name, freeze_statistics(child))
    return tower


class TwoTowers(nn.Module):
    """An image tower and a text tower, with a description of their inputs.

    The trainer normalizes the features to unit rows. It also adds the parameter logit_scale to the model and, if the
    loss has a bias, logit_bias.

    Args:
        visual: Turns normalized images [b, 3, H, W] into features [b, D].
        text: Turns tokens [b, L] int64 into features [b, D].
        tokenizer: Turns a list of n texts into tokens [n, L] int64. It is pickled for data workers.
        context_length: L, the number of tokens per text.
        vocab_size: All tokens are below this number.
        image_size: (H, W), or one number if H = W.
        mean: Mean of each color channel, for pixel values from 0 to 1.
        std: Standard deviation of each color channel, for pixel values from 0 to 1.
        interpolation: Interpolation method for resizing images, in training and evaluation.
        resize_mode: In evaluation, which side of an image is resized to image_size: "shortest", "longest", or both
            ("squash").
    """

    logit_scale: nn.Parameter
    logit_bias: nn.Parameter | None

    def __init__(
        self,
        visual: nn.Module,
        text: nn.Module,
        tokenizer: Callable[[list[str]], Tensor],
        context_length: int,
        vocab_size: int,
        image_size: int | tuple[int, int],
        mean: tuple[float, ...] = open_clip.OPENAI_DATASET_MEAN,
        std: tuple[float, ...] = open_clip.OPENAI_DATASET_STD,
        interpolation: Literal["bicubic", "bilinear"] = "bicubic",
        resize_mode: Literal["shortest", "longest", "squash"] = "shortest",
    ):
        super().__init__()
        self.visual = visual
        self.text = text
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.vocab_size = vocab_size
        preprocessing = {
            "size": image_size,
            "mean": mean,
            "std": std,
            "interpolation": interpolation,
            "resize_mode": resize_mode,
        }
        open_clip.set_model_preprocess_cfg(self, preprocessing)

    def encode_image(self, image: Tensor) -> Tensor:
        """Turn normalized images [b, 3, H, W] into features [b, D]."""
        return self.visual(image)

    def encode_text(self, text: Tensor) -> Tensor:
        """Turn tokens [b, L] into features [b, D]."""
        return self.text(text)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations in backward, if both towers come from timm, transformers or open_clip.

        Raises:
            ValueError: If a tower does not support this.
        """
        for name, tower in (("image", self.visual), ("text", self.text)):
            # A tower may wrap the library's model, so take the first module inside it that has such a method.
            module: Any
            for module in tower.modules():
                if hasattr(module, "set_grad_checkpointing"):  # timm or open_clip
                    module.set_grad_checkpointing(enable)
                    break
                if hasattr(module, "gradient_checkpointing_enable"):  # transformers
                    # Reentrant checkpointing drops the gradients if the input of a tower does not need a gradient.
                    module.gradient_checkpointing_enable({"use_reentrant": False})
                    break
            else:
                raise ValueError(
                    f"model.activation_checkpointing: the {name} tower has no method "
                    "set_grad_checkpointing or gradient_checkpointing_enable; add one, or set "
                    "model.activation_checkpointing=false"
                )


def build_two_towers(
    settings: ModelSettings, initial_scale: float, initial_bias: float | None
) -> TwoTowers:
    """Build the model with the user's function, in torch's default dtype.

    Raises:
        ValueError: If the function does not exist, fails, or does not return a TwoTowers object.
    """
    assert settings.factory is not None
    factory = load_custom(settings.factory, settings.options)
    # `disco-ds plan` traces with tensors that have no values, but the user's code may need values.
    with unset_fake_temporarily() as fake:
        with explain_errors(f"model.factory: {settings.factory} failed"):
            model = factory(**settings.options)
        if not isinstance(model, TwoTowers):
            raise ValueError(
                f"model.factory: {settings.factory} returned a {type(model).__name__}, "
                "not a TwoTowers"
            )
        model.logit_scale = nn.Parameter(torch.full((1,), math.log(initial_scale)))
        model.logit_bias = None
        if initial_bias is not None:
            model.logit_bias = nn.Parameter(torch.full((1,), initial_bias))
        model.to(torch.get_default_dtype())
    if isinstance(fake, FakeTensorMode):
        for module in model.modules():
            tensors: Any
            for tensors in (module._parameters, module._buffers):
                for name, value in tensors.items():
                    if value is not None:
                        tensors[name] = fake.from_tensor(value)
    return model
