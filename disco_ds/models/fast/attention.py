"""Faster versions of open_clip's self-attention, residual block and patch embedding, with the same parameters.

replace.py puts them into a model that open_clip has built. Initialization and names of parameters are therefore
open_clip's. The attention computes q, k and v with one matrix product, for sequences of equal length and packed texts.
The parameters are those of nn.MultiheadAttention and of open_clip's Attention, with the same names. Packed texts are
the tokens of many texts in one tensor, without padding; texts.py packs them. Attention is a custom operator, so that
torch.compile does not trace into it, and compiles one graph for any number of tokens.
"""

# B images of S tokens, or T packed tokens; H heads of width D, H * D = C.

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

MAX_ROWS = 128
"""The Triton kernels take sequences of at most this many tokens, and heads of at most this width."""
HALVES = (torch.bfloat16, torch.float16)


class Packing(NamedTuple):
    """The positions of texts in a packed tensor. The texts are sorted by length."""

    groups: Tensor
    """[2 n] int64 on the CPU, n pairs: a length, and the number of consecutive texts of this length."""
    tiles: Tensor
    """[number of tiles + 1] int32: the first row of each tile of the Triton kernels. The last number is the number of
    rows of all texts. Tiles contain whole texts."""
    segments: Tensor
    """[T] int32: for each of the T rows, the index of its text."""


class Attention(nn.Module):
    """Multi-head self-attention with the parameters of nn.MultiheadAttention. replace.py puts it into towers."""

    num_heads: int
    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    out_proj: nn.Module
    causal: bool
    """If True, any mask that forward gets is the causal mask: a token attends only to itself and to earlier tokens."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            x: [B, S, C] or, with `packing`, [T, C].
            mask: [S, S] or [B * H, S, S], added to the scores.
            packing: The positions of the texts in x. Their attention is causal.
        """
        *shape, width = x.shape
        heads = 3, self.num_heads, width // self.num_heads
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).view(*shape, *heads)
        if packing is not None:
            return self.out_proj(sequence_attention(qkv, 0, True, *packing))
        # In a block that both towers share, images come without a mask, so their attention is not causal.
        causal = self.causal and mask is not None
        if causal:
            mask = None
        if mask is None and is_fast(qkv):
            out = sequence_attention(qkv.flatten(0, 1), x.shape[1], causal)
            return self.out_proj(out.view(x.shape))
        if mask is not None and mask.ndim == 3:
            mask = mask.unflatten(0, (-1, self.num_heads))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out_proj(out.transpose(1, 2).reshape(x.shape))


def is_fast(qkv: Tensor) -> bool:
    """Return whether the Triton kernel is faster than torch's for qkv, [B, S, 3, H, D]."""
    fits = qkv.shape[1] <= MAX_ROWS and qkv.shape[-1] <= MAX_ROWS and qkv.dtype in HALVES
    return fits and has_fast_kernel(qkv.device)


@torch.compiler.assume_constant_result
def has_fast_kernel(device: torch.device) -> bool:
    """Return whether the Triton kernels are faster on this device: an H100, where this was measured, or newer."""
    return has_kernel(device) and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def has_kernel(device: torch.device) -> bool:
    """Return whether the Triton kernels run on this device.

    Before 3.7.1, Triton may compute wrong matrix products on GPUs newer than the H200 (triton issue 9610).
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    import triton

    capability = torch.cuda.get_device_capability(device)
    is_fenced = capability < (10, 0) or Version(triton.__version__) >= Version("3.7.1")
    return capability >= (8, 0) and is_fenced


# The operator defines its backward explicitly, because autograd records nothing inside a custom operator.


@torch.library.custom_op("disco_ds::sequence_attention", mutates_args=())
def sequence_attention(
    qkv: Tensor,
    length: int,
    causal: bool,
    groups: Tensor | None = None,
    tiles: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Attend within each sequence, with a Triton kernel or, for packed texts on a CPU, with torch.

    Args:
        qkv: [T, 3, H, D].
        length: Number of rows of each sequence, at most MAX_ROWS; 0 for packed texts.
        causal: Whether a token attends only to itself and to earlier tokens. Packed texts are always causal.
        groups: Packing.groups; None for sequences of equal length.
        tiles: Packing.tiles. The Triton kernel takes no text that is longer than MAX_ROWS.
        segments: Packing.segments.

    Returns:
        [T, C].
    """
    if groups is None or qkv.is_cuda:
        from disco_ds.models.fast import tile_kernels

        return tile_kernels.attend(qkv, tiles, segments, length or MAX_ROWS, causal)
    T, _, H, D = qkv.shape
    out = qkv.new_empty(T, H * D)
    for rows, (count, length) in _split(groups):
        q, k, v = qkv[rows].view(count, length, 3, H, D).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out[rows].view(count, length, H, D).copy_(attended.transpose(1, 2))
    return out


@torch.library.custom_op("disco_ds::sequence_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    qkv: Tensor,
    length: int,
    causal: bool,
    groups: Tensor | None,
    tiles: Tensor | None,
    segments: Tensor | None,
) -> Tensor:
    if groups is None or qkv.is_cuda:
        from disco_ds.models.fast import tile_kernels

        return tile_kernels.backpropagate(grad, qkv, tiles, segments, length or MAX_ROWS, causal)
    _, _, H, D = qkv.shape
    grad_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    for rows, (count, length) in _split(groups):
        # 16-bit values are multiplied in fp32, as in torch's kernels.
        exact = torch.promote_types(qkv.dtype, torch.float32)
        q, k, v = qkv[rows].view(count, length, 3, H, D).permute(2, 0, 3, 1, 4).to(exact)
        g = grad[rows].reshape(count, length, H, D).transpose(1, 2).to(exact)
        future = torch.ones(length, length, dtype=torch.bool, device=qkv.device).triu_(1)
        p = (q @ k.transpose(2, 3) * D**-0.5).masked_fill_(future, -torch.inf).softmax(-1)
        grad_p = g @ v.transpose(2, 3)
        grad_scores = p * (grad_p - (p * grad_p).sum(-1, keepdim=True)) * D**-0.5
        grads = grad_scores @ k, grad_scores.transpose(2, 3) @ q, p.transpose(2, 3) @ g
        into = grad_qkv[rows].view(count, length, 3, H, D).permute(2, 0, 3, 1, 4)
        for part, value in zip(into, grads, strict=True):
            part.copy_(value)
    return grad_qkv


def _split(groups: Tensor) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yield (range of rows, (number of texts, their length)) for each group of texts of equal length."""
    start = 0
    for length, count in groups.view(-1, 2).tolist():
        yield slice(start, start + length * count), (count, length)
        start += length * count


@sequence_attention.register_fake
def _(qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[2] * qkv.shape[3])


@_backward.register_fake
def _(grad: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, ctx.length, ctx.causal, *packing = inputs
    ctx.save_for_backward(qkv, *packing)


def _backpropagate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    qkv, *packing = ctx.saved_tensors
    return _backward(grad, qkv, ctx.length, ctx.causal, *packing), None, None, None, None, None


sequence_attention.register_autograd(_backpropagate, setup_context=_keep)


# The operations of packed texts, whose length is 0 here, are not counted.
@register_flop_formula(torch.ops.disco_ds.sequence_attention)
def _(qkv: Any, length: int, *_: Any, **__: Any) -> int:
    T, _, H, D = qkv
    return 4 * T * length * H * D


@register_flop_formula(torch.ops.disco_ds.sequence_attention_backward)
def _(grad: Any, qkv: Any, length: int, *_: Any, **__: Any) -> int:
    T, _, H, D = qkv
    return 10 * T * length * H * D


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
