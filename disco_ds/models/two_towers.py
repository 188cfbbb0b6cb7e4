"""A model of any two towers, which a function of the user's builds: `model.factory` of a recipe.

The function is called with `model.options` and returns a TwoTowers, with pretrained weights or without. What the
trainer asks of a model is asked of open_clip's by the same names; docs/own_model.md has an example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import open_clip
import torch
from open_clip.utils import freeze_batch_norm_2d
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from disco_ds.config import ModelSettings
from disco_ds.config.own_code import find_own


class TwoTowers(nn.Module):
    """An image and a text tower, and what must be known of their inputs.

    The trainer makes unit rows of the features, and adds logit_scale and, where the loss has one, logit_bias.

    Args: visual: images [b, 3, H, W], normalised -> features [b, D]; text: tokens [b, L] int64 -> features [b, D];
          tokenizer: list of n texts -> tokens [n, L] int64, sent to the data workers by pickle; context_length: L;
          vocab_size: tokens are below it; image_size: H = W, or (H, W); mean, std: of pixels in [0, 1], per channel;
          interpolation, resize_mode: of images that are evaluated.
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
        **preprocessing: Any,
    ):
        super().__init__()
        self.visual, self.text, self.tokenizer = visual, text, tokenizer
        self.context_length, self.vocab_size = context_length, vocab_size
        open_clip.set_model_preprocess_cfg(self, _preprocess_cfg(image_size, **preprocessing))

    def encode_image(self, image: Tensor) -> Tensor:
        return self.visual(image)

    def encode_text(self, text: Tensor) -> Tensor:
        return self.text(text)

    def set_scale(self, initial_scale: float, initial_bias: float | None) -> None:
        """Add the parameters that a loss learns, [1] each. Args: initial_scale: exp of the initial logit_scale."""
        self.logit_scale = nn.Parameter(torch.full((1,), math.log(initial_scale)))
        self.logit_bias = None if initial_bias is None else nn.Parameter(torch.full((1,), initial_bias))

    def lock_image_tower(self, **_: Any) -> None:
        self.visual = freeze_batch_norm_2d(self.visual.requires_grad_(False))  # whose statistics must stay as well

    def lock_text_tower(self, *_: Any) -> None:
        self.text.requires_grad_(False)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations in towers of timm, transformers or open_clip. Raises: ValueError for another tower."""
        for name, tower in (("image", self.visual), ("text", self.text)):
            # The first module inside that can do it: a tower may wrap the library's model.
            modules = list(tower.modules())
            timms: list[Any] = [module for module in modules if hasattr(module, "set_grad_checkpointing")]
            transformers: list[Any] = [module for module in modules if hasattr(module, "gradient_checkpointing_enable")]
            if timms:
                timms[0].set_grad_checkpointing(enable)
            elif transformers:  # reentrant checkpointing drops the gradient where a tower's input needs none
                transformers[0].gradient_checkpointing_enable({"use_reentrant": False})
            else:
                raise ValueError(f"model.activation_checkpointing: the {name} tower has no method that switches it on")


def _preprocess_cfg(
    image_size: int | tuple[int, int],
    mean: tuple[float, ...] = open_clip.OPENAI_DATASET_MEAN,
    std: tuple[float, ...] = open_clip.OPENAI_DATASET_STD,
    interpolation: Literal["bicubic", "bilinear"] = "bicubic",
    resize_mode: Literal["shortest", "longest", "squash"] = "shortest",
) -> dict[str, Any]:
    """open_clip's preprocess_cfg."""
    return {"size": image_size, "mean": mean, "std": std, "interpolation": interpolation, "resize_mode": resize_mode}


def build_two_towers(settings: ModelSettings, initial_scale: float, initial_bias: float | None) -> TwoTowers:
    """The model that the user's function returns, in torch's default dtype. Raises: ValueError."""
    assert settings.factory is not None
    try:
        factory = find_own(settings.factory, settings.options)
    except ValueError as error:
        raise ValueError(f"model.factory: {error}") from None
    # `disco-ds plan` traces tensors without values, and the user's code may look at values.
    with unset_fake_temporarily() as fake:
        try:
            model = factory(**settings.options)
        except Exception as error:  # whatever the user's code raises
            raise ValueError(f"model.factory: {settings.factory} failed: {type(error).__name__}: {error}") from error
        if not isinstance(model, TwoTowers):
            raise ValueError(f"model.factory: {settings.factory} returned a {type(model).__name__}, not a TwoTowers")
        model.set_scale(initial_scale, initial_bias)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.get_default_dtype())
    if isinstance(fake, FakeTensorMode):
        for module in model.modules():
            tensors: Any
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: fake.from_tensor(value) for name, value in tensors.items() if value is not None})
    return model
