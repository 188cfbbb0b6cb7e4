"""A small convolutional image tower for 32-pixel images, registered with timm as `disco_convnet`.

Importing this file registers it with timm, and so with open_clip; an export that uses it needs that import. It has no
batch statistics, so its gradient does not depend on how a batch is cut.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from timm.models import register_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTHS = (32, 64, 128, 128)
IMAGE_SIZE = 32


class ConvNet(nn.Module):
    """A 5x5 convolution of stride 2 and three 3x3 ones, each normalised by image and channel; then 4 x 4 x 128
    flattened, LayerNorm and linear.

    Args: num_classes: width of the output, the embedding.
    """

    def __init__(self, num_classes: int):
        super().__init__()
        blocks: list[nn.Module] = []
        for stage, (before, after) in enumerate(pairwise((3, *WIDTHS))):
            # On the full image a stride costs less than pooling; it learns as well here.
            blocks.append(nn.Conv2d(3, after, 5, 2, 2) if stage == 0 else nn.Conv2d(before, after, 3, padding=1))
            # One group per channel removes a vendor's contrast and colours; groups of 4 or 8 channels are worse.
            blocks.append(nn.GroupNorm(after, after))
            if 0 < stage < len(WIDTHS) - 1:
                blocks.append(nn.MaxPool2d(2))
            blocks.append(nn.ReLU(inplace=True))
        self.body = nn.Sequential(*blocks)
        side = IMAGE_SIZE // 2 ** (len(WIDTHS) - 1)
        self.norm = nn.LayerNorm(WIDTHS[-1] * side * side)
        self.head = nn.Linear(WIDTHS[-1] * side * side, num_classes)
        self.checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.checkpointing = enable

    def forward(self, x: Tensor) -> Tensor:
        """x [b, 3, 32, 32] -> [b, num_classes]."""
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointing else self.body(x)
        return self.head(self.norm(x.flatten(1)))


@register_model
def disco_convnet(pretrained: bool = False, num_classes: int = 128, **keywords: Any) -> ConvNet:
    """The constructor for timm. There are no pretrained weights, one kind of pooling, and no dropout."""
    refused = [name for name in keywords if name.startswith("drop") or name == "patch_drop_rate"]
    if pretrained or refused:
        raise ValueError(f"disco_convnet has no pretrained weights and no {', '.join(refused) or 'dropout'}")
    return ConvNet(num_classes)
