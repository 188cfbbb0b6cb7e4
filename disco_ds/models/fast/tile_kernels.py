"""Triton kernels for the attention of short sequences, forward and backward.

A tile is up to ROWS consecutive token rows that contain whole sequences: one image, or several texts. One program
computes one tile for one head. All scores of a tile are in registers at once, so the softmax needs a single pass, and
the backward recomputes it instead of reading the output or row sums. Each value is read and written once, and there are
no atomics, so results are bitwise reproducible. Only attention.py imports this file.
"""

# T token rows, H heads of width D. qkv is [T, 3, H, D]; `tiles` has the first row of each tile and, at the end, T.
# Triton interprets annotations of a kernel's arguments, so the kernels have no type annotations.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _find_rows(tiles, segments, length, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """Return the indices of this program's rows, the index after the tile's last row, and the sequence of each row."""
    tile = tl.program_id(0)
    if PACKED:
        start = tl.load(tiles + tile)
        end = tl.load(tiles + tile + 1)
    else:
        start = tile * length
        end = start + length
    rows = start + tl.arange(0, ROWS)
    segment = tl.zeros((ROWS,), tl.int32)
    if PACKED:
        segment = tl.load(segments + rows, mask=rows < end, other=-1)
    return rows, end, segment


@triton.jit
def _load(base, rows, columns, end, stride, D: tl.constexpr):
    mask = (rows[:, None] < end) & (columns[None, :] < D)
    return tl.load(base + rows[:, None].to(tl.int64) * stride + columns[None, :], mask, 0.0)


@triton.jit
def _store(base, values, rows, columns, end, stride, D: tl.constexpr):
    mask = (rows[:, None] < end) & (columns[None, :] < D)
    at = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask)


@triton.jit
def _probabilities(q, k, rows, end, segment, scale, CAUSAL: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
    visible = (segment[:, None] == segment[None, :]) & (rows[None, :] < end)
    if CAUSAL:
        visible = visible & (rows[:, None] >= rows[None, :])
    scores = tl.where(visible, scores, float("-inf"))
    largest = tl.max(scores, 1)
    # Rows after the end of the tile attend to nothing.
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(scores - largest[:, None])
    total = tl.sum(weights, 1)
    return weights / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def forward_kernel(
    qkv,
    tiles,
    segments,
    out,
    length,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write softmax(scale q k^T) v of one tile and head. WIDTH is D rounded up to a power of two, at least 16."""
    head = tl.program_id(1)
    rows, end, segment = _find_rows(tiles, segments, length, ROWS, PACKED)
    columns = tl.arange(0, WIDTH)
    base = qkv + head * D
    q = _load(base, rows, columns, end, 3 * H * D, D)
    k = _load(base + H * D, rows, columns, end, 3 * H * D, D)
    v = _load(base + 2 * H * D, rows, columns, end, 3 * H * D, D)
    p = _probabilities(q, k, rows, end, segment, scale, CAUSAL)
    values = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    _store(out + head * D, values, rows, columns, end, H * D, D)


@triton.jit
def backward_kernel(
    qkv,
    tiles,
    segments,
    grad,
    grad_qkv,
    length,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write the gradients of one tile's q, k and v, computed from `grad`, the gradient of the output."""
    head = tl.program_id(1)
    rows, end, segment = _find_rows(tiles, segments, length, ROWS, PACKED)
    columns = tl.arange(0, WIDTH)
    base = qkv + head * D
    q = _load(base, rows, columns, end, 3 * H * D, D)
    k = _load(base + H * D, rows, columns, end, 3 * H * D, D)
    v = _load(base + 2 * H * D, rows, columns, end, 3 * H * D, D)
    g = _load(grad + head * D, rows, columns, end, H * D, D)
    p = _probabilities(q, k, rows, end, segment, scale, CAUSAL)
    base = grad_qkv + head * D
    grad_v = tl.dot(tl.trans(p.to(g.dtype)), g, input_precision="ieee")
    _store(base + 2 * H * D, grad_v, rows, columns, end, 3 * H * D, D)
    grad_p = tl.dot(g, tl.trans(v), input_precision="ieee")
    grad_scores = p * (grad_p - tl.sum(p * grad_p, 1)[:, None]) * scale
    grad_scores = grad_scores.to(q.dtype)
    grad_q = tl.dot(grad_scores, k, input_precision="ieee")
    _store(base, grad_q, rows, columns, end, 3 * H * D, D)
    grad_k = tl.dot(tl.trans(grad_scores), q, input_precision="ieee")
    _store(base + H * D, grad_k, rows, columns, end, 3 * H * D, D)


def attend(
    qkv: Tensor, tiles: Tensor | None, segments: Tensor | None, length: int, causal: bool
) -> Tensor:
    """Compute the attention within each sequence.

    Args:
        qkv: [T, 3, H, D].
        tiles: [number of tiles + 1] int32: the first row of each tile and, at the end, T. None: every `length` rows are
            one sequence and one tile.
        segments: [T] int32: for each row, the index of its sequence. Used only with `tiles`.
        length: Rows of a sequence. With `tiles`: the largest number of rows of a tile.
        causal: Whether a row attends only to itself and to earlier rows.

    Returns:
        [T, H * D].
    """
    T, _, H, D = qkv.shape
    out = qkv.new_empty(T, H * D)
    _launch(forward_kernel, qkv, tiles, segments, (out,), length, causal)
    return out


def backpropagate(
    grad: Tensor,
    qkv: Tensor,
    tiles: Tensor | None,
    segments: Tensor | None,
    length: int,
    causal: bool,
) -> Tensor:
    """Compute the gradient of qkv from the gradient [T, H * D] of the output of `attend`."""
    grad_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    outputs = grad.contiguous(), grad_qkv
    _launch(backward_kernel, qkv, tiles, segments, outputs, length, causal)
    return grad_qkv


def _launch(kernel, qkv, tiles, segments, tensors, length, causal):
    T, _, H, D = qkv.shape
    count = T // length if tiles is None else len(tiles) - 1
    if not count:
        return
    qkv = qkv.contiguous()
    packed = tiles is not None
    layout = (tiles, segments) if packed else (qkv, qkv)  # not read, but must be pointers
    rows = max(16, triton.next_power_of_2(length))
    width = max(16, triton.next_power_of_2(D))
    # Measured on an H100 for tiles of 32 to 128 rows and heads of width 64.
    small = rows * width <= 64 * 64 or (kernel is backward_kernel and width <= 64)
    warps = 4 if small else 8
    kernel[(count, H)](
        qkv,
        *layout,
        *tensors,
        length,
        D**-0.5,
        H=H,
        D=D,
        WIDTH=width,
        ROWS=rows,
        CAUSAL=causal,
        PACKED=packed,
        num_warps=warps,
        num_stages=1,
    )
