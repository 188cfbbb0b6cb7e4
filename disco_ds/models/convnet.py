"""A small convolutional image tower for 32-pixel images, registered with timm as `disco_convnet`.

Importing this file registers the tower with timm, and thereby with open_clip. Code that loads an exported model with
this tower must import this file first. The quickstart uses it because the small models of timm that were tried on its
emoji learn far less in the same time: at most 19% top-1, where this tower reaches 32%. The tower uses no batch
statistics, so its gradient does not depend on how a batch is split.
"""

from typing import Any

from timm.models import register_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class ConvNet(nn.Module):
    """Four convolutions, LayerNorm and a linear layer.

    The first convolution is 5x5 with stride 2; the others are 3x3. The output of each convolution is normalized
    separately for each image and channel. The last output, 4 x 4 x 128, is flattened for the LayerNorm.

    Args:
        num_classes: Width of the output embedding.
    """

    def __init__(self, num_classes: int):
        super().__init__()
        # At full resolution, a stride costs less than pooling, and the model learns equally well. Normalization with
        # one group per channel removes contrast and color, which differ between the vendors that drew the emoji of the
        # demo. Groups of 4 or 8 channels give worse results.
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=2, padding=2),
            nn.GroupNorm(32, 32),
            nn.ReLU(inplace=True),
            *_make_layer(32, 64, nn.MaxPool2d(2)),
            *_make_layer(64, 128, nn.MaxPool2d(2)),
            *_make_layer(128, 128),
        )
        self.norm = nn.LayerNorm(4 * 4 * 128)
        self.head = nn.Linear(4 * 4 * 128, num_classes)
        self.checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations in backward."""
        self.checkpointing = enable

    def forward(self, x: Tensor) -> Tensor:
        """Turn images x [b, 3, 32, 32] into [b, num_classes]."""
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointing else self.body(x)
        return self.head(self.norm(x.flatten(1)))


def _make_layer(num_inputs: int, num_outputs: int, *pooling: nn.Module) -> list[nn.Module]:
    return [
        nn.Conv2d(num_inputs, num_outputs, 3, padding=1),
        nn.GroupNorm(num_outputs, num_outputs),
        *pooling,
        nn.ReLU(inplace=True),
    ]


@register_model
def disco_convnet(pretrained: bool = False, num_classes: int = 128, **keywords: Any) -> ConvNet:
    """Build the tower for timm. Pretrained weights, dropout and a choice of pooling are not supported."""
    refused = [name for name in keywords if name.startswith("drop") or name == "patch_drop_rate"]
    if pretrained or refused:
        raise ValueError(
            f"disco_convnet has no pretrained weights and no {', '.join(refused) or 'dropout'}"
        )
    return ConvNet(num_classes)
