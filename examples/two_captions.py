"""A custom loss for several captions per image, and a `forward` for contrastive_step that runs both towers once.

The loss is the mean of K losses, one per caption, which share the image features. On the bundled data, training with
two captions per step was not better than with one caption, chosen at random.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from disco_ds.losses import Embeddings, Loss, LossOutput, build_loss


class CaptionsLoss(Loss):
    """The mean of K losses. Both sides have shape [b, K D], as `join_captions` returns them."""

    def __init__(self, captions: int = 2, base: str = "disco_fused"):
        super().__init__()
        self.captions, self.base = captions, build_loss(base)

    def forward(self, embeddings: Embeddings) -> LossOutput:
        sides = (x.chunk(self.captions, 1) for x in (embeddings.image, embeddings.text))
        root = self.captions**0.5
        outs = [
            self.base(Embeddings(root * image, root * text, embeddings.scale))
            for image, text in zip(*sides, strict=True)
        ]
        loss = torch.stack([out.loss for out in outs]).mean()
        return LossOutput(
            loss,
            {name: torch.stack([x.metrics[name] for x in outs]).mean() for name in outs[0].metrics},
        )


def join_captions(image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Join the features of each image's captions: [m, D] and [m, K, D] become two sides of unit rows, [m, K D]."""
    root = text.shape[1] ** 0.5
    return image.repeat(1, text.shape[1]) / root, text.flatten(1) / root


def encode(model: Callable[..., Any], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The `forward` of contrastive_step for open_clip's models: images [m, 3, H, W] and tokens [m, K, L].

    All captions are one batch of the text tower. If `disco_ds.models.fast.replace_parts` has been applied to the
    model, the tower packs them and computes no padding.
    """
    image, text, scale = model(batch["image"], batch["text"].flatten(0, 1))[:3]
    return *join_captions(image, text.view(len(image), -1, text.shape[1])), scale
