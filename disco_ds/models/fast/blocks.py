"""Faster versions of open_clip's residual block and patch embedding, with the same parameters.

They replace open_clip's modules in a model that has been built (replace.py). The initialization, the names of
parameters and all other modules are therefore open_clip's.
"""

# B images of S tokens, or T packed tokens; C is the width of the tower

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.models.fast.attention import Packing


class Block(nn.Module):
    """A residual block with the same children as open_clip's, except that its attention is attention.Attention."""

    ln_1: nn.Module
    attn: nn.Module
    ls_1: nn.Module
    ln_2: nn.Module
    mlp: nn.Sequential
    ls_2: nn.Module
    ln_attn: nn.Module

    def forward(
        self,
        x: Tensor,
        k_x: None = None,
        v_x: None = None,
        attn_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Run the block on x: [B, S, C] or, with `packing`, [T, C]. open_clip passes k_x and v_x, which are None."""
        attended = self.attn(self.ln_1(x), attn_mask, packing)
        if hasattr(self, "ln_attn"):
            attended = self.ln_attn(attended)
        x = x + self.ls_1(attended)
        return x + self.ls_2(self.mlp(self.ln_2(x)))

    def get_weight_dtype(self) -> torch.dtype:
        """Return the dtype of the weights. open_clip calls this function."""
        return next(self.mlp.parameters()).dtype


class Patches(nn.Conv2d):
    """A convolution whose kernel size equals its stride, computed as a matrix product of the patches.

    If it were computed as a convolution, the weight's gradient would take 9 to 18 ms of a step of ViT-B/32 (H200,
    2,048 images).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, c, H, W] to [B, C, H // p, W // q], where patches have p x q pixels.

        Pixels after the last whole patch are not used.
        """
        p, q = self.kernel_size
        B, c, height, width = x.shape
        h, w = height // p, width // q
        if not h * w:
            return super().forward(x)  # raises torch's error
        x = x[:, :, : h * p, : w * q].reshape(B, c, h, p, w, q)
        patches = x.permute(0, 2, 4, 1, 3, 5).reshape(B, h * w, c * p * q)
        out = F.linear(patches, self.weight.flatten(1), self.bias)
        return out.transpose(1, 2).unflatten(2, (h, w))
