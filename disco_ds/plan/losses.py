"""Cost of each registered loss: memory that it needs, FLOPs, and bytes received.

The formulas follow the code of the losses, and tests/plan/test_plan_losses.py compares them with
measurements. Every registered loss must be listed here; custom losses have a method `cost`.
"""

# b: samples per rank; N: number of ranks; B = N b; D: width of the features, which are fp32

from __future__ import annotations

import torch

from disco_ds.losses import build_loss
from disco_ds.losses.base import Loss, LossCost
from disco_ds.losses.blocks import GatheredBoth, TiledLoss, chunk_rows
from disco_ds.losses.clip import ClipLoss
from disco_ds.losses.disco import DisCoLoss
from disco_ds.losses.disco_fused import DisCoFusedLoss
from disco_ds.losses.fastclip import FastCLIPLoss
from disco_ds.losses.inf_cl import InfCLLoss
from disco_ds.losses.nt_xent import NTXentLoss
from disco_ds.losses.siglip import SigLIPLoss

HALF = ("fp16", "bf16")


def loss_cost(
    name: str, options: dict[str, object], b: int, N: int, D: int, num_samples: int = 0
) -> LossCost:
    """Return the cost of a loss on a GPU.

    Args:
        name: loss.name of the recipe.
        options: loss.options of the recipe.
        b: Samples per rank.
        N: Number of ranks.
        D: Width of the features.
        num_samples: Number of samples in the data, for losses that keep state per sample.

    Raises:
        ValueError: If the loss is unknown here or does not have one of the options.
    """
    loss = build_loss(name, **options)
    cost = loss.cost(b, N, D, num_samples)
    if cost is not None:
        return cost
    work = _count_work(loss, N)
    # A custom subclass of a known loss may cost more than its base class.
    if work is None or ":" in name:
        raise ValueError(
            f"the cost of loss {name} is unknown: give the class a method cost(b, N, D, "
            "num_samples) -> LossCost (see disco_ds/losses/base.py), or plan the rest of the "
            "recipe with loss.name=disco_fused"
        )
    num_products, num_features, num_gradients = work
    device = torch.device("cuda")
    sent_itemsize, precision = 4, "fp32"
    if isinstance(loss, TiledLoss):
        precision = loss.tiling.on(device).precision
        sent_itemsize = _sent_itemsize(loss, precision)
    state, state_on_host = 0, False
    if isinstance(loss, FastCLIPLoss):
        state = (68 if loss.tau_step else 16) * -(-num_samples // N)
        state_on_host = loss.memory == "host"
    received = N * b * D * (num_features * sent_itemsize + num_gradients * 4)
    return LossCost(
        peak=loss_peak(loss, b, N, D, device),
        state=state,
        state_on_host=state_on_host,
        flops=num_products * 2 * b * N * b * D,
        precision=precision,
        received_bytes=received if N > 1 else 0,
        while_computing=_is_ring(loss),
    )


def _count_work(loss: Loss, N: int) -> tuple[int, int, int] | None:
    """Count products of b x B x D, and how often B x D features and feature gradients arrive."""
    match loss:
        case ClipLoss():
            return 3 * N, 2, 0
        case DisCoLoss():
            return 6, 2, 2 if loss.reduction == "reduce_scatter" else 4
        case DisCoFusedLoss():
            return 3 if loss.store else 4, 1, 1
        case InfCLLoss():
            return 4, 2, 1
        case SigLIPLoss():
            return 3, 1, 1
        case FastCLIPLoss():
            return (5, 2, 0) if loss.blocks is GatheredBoth else (4, 1, 1)
        case NTXentLoss():
            return 10, 6 if loss.ring else 2, 1
    return None


def _is_ring(loss: Loss) -> bool:
    return isinstance(loss, InfCLLoss | SigLIPLoss) or getattr(loss, "ring", False)


def loss_peak(loss: Loss, b: int, N: int, D: int, device: torch.device) -> int:
    """Return the peak memory of a loss of this package in bytes, without the features themselves.

    Args:
        loss: The loss.
        b: Samples per rank.
        N: Number of ranks.
        D: Width of the features.
        device: Where the loss would run, which decides the tiles.
    """
    B = N * b
    if isinstance(loss, ClipLoss):
        # The product, two softmaxes and two gradients at the same time; later the features of both
        # sides, gathered and local.
        return 4 * max(5 * B * B + 2 * B * D, B * B + 4 * B * D)
    if isinstance(loss, DisCoLoss):
        # Forward: two products, logits and softmaxes each, and both gathered sides.
        forward = 6 * b * B + 2 * B * D
        # Backward: the gradients of both sides.
        backward = b * B + 4 * B * D + (2 + (N > 1)) * b * D
        return 4 * max(forward, backward)
    assert isinstance(loss, TiledLoss)
    return _tiled_peak(loss, b, N, D, device)


def _tiled_peak(loss: TiledLoss, b: int, N: int, D: int, device: torch.device) -> int:
    """Return the peak memory of a tiled loss: the maximum of tiles, reduction and final copies."""
    ring = _is_ring(loss)
    gathers_both = getattr(loss, "blocks", None) is GatheredBoth
    precision = loss.tiling.on(device).precision
    num_columns = b if ring else N * b
    # Gradients are fp32: those of this rank's rows, and those of all columns in reach.
    row_gradient = 4 * b * D
    column_gradient = 4 * num_columns * D
    sent = num_columns * D * _sent_itemsize(loss, precision)
    # The features are copied to the dtype in which they are sent.
    copied = precision != "fp32" or loss.comm_dtype is not None
    reduced = 0
    if ring:
        # Feature blocks in transit and a local copy; gradients of rows; gradients of columns in
        # transit.
        features = sent * (min(N - 1, 2) + copied)
        blocks = features + row_gradient * (4 if N > 1 else 2)
    elif gathers_both:
        features = 2 * sent if N > 1 or copied else 0
        blocks = features + 2 * row_gradient
    else:
        num_gathered = 2 if isinstance(loss, NTXentLoss) else 1
        features = num_gathered * sent if N > 1 or copied else 0
        blocks = features + row_gradient + column_gradient
        if N > 1:
            # gloo, on a CPU, reduces a copy.
            reduced = blocks + row_gradient + (column_gradient if device.type == "cpu" else 0)
    if isinstance(loss, NTXentLoss):
        blocks = max(blocks, features + 3 * row_gradient)
    chunk = 4 * min(chunk_rows(D, device), b) * D * (2 if precision in HALF else 1)
    if isinstance(loss, SigLIPLoss):
        # The gradients still exist while autograd copies them.
        finished = max(blocks + chunk, 4 * row_gradient)
    else:
        finished = 2 * row_gradient + chunk + sent * copied
    stored = 2 * b * N * b if isinstance(loss, DisCoFusedLoss) and loss.store else 0
    rounded_rows = 0 if precision == "fp32" else b * D * _itemsize(precision)
    vectors = 8 * (8 * num_columns + 12 * b)
    tile = _tile(loss, b, num_columns, D, device)
    return rounded_rows + stored + vectors + max(blocks + tile, reduced, finished)


def _itemsize(precision: str) -> int:
    return 2 if precision in HALF else 4


def _sent_itemsize(loss: TiledLoss, precision: str) -> int:
    """Return bytes per number of the features that are sent to other ranks."""
    return loss.comm_dtype.itemsize if loss.comm_dtype else _itemsize(precision)


def _tile(loss: TiledLoss, n: int, m: int, D: int, device: torch.device) -> int:
    """Return the bytes that one tile of an n x m block needs."""
    tiling = loss.tiling.on(device)
    rows, columns = tiling.size(n, m, D, device)
    on_gpu = device.type == "cuda"
    itemsize = _itemsize(tiling.precision) if on_gpu else 4
    # Triton writes the weights once, in the dtype in which they are multiplied.
    per_pair = itemsize
    if not on_gpu or tiling.impl == "torch":
        # torch has the weights in fp32 and a copy, and more if each row has its own scale.
        has_row_scales = isinstance(loss, FastCLIPLoss) and loss.tau_step
        per_pair = 16 if has_row_scales else 8
        if itemsize == 2:
            per_pair += 2
    converted = 0
    if loss.comm_dtype and loss.comm_dtype.itemsize != itemsize:
        converted = itemsize * columns * D
    return per_pair * rows * columns + converted
