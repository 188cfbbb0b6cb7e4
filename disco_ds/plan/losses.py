"""Cost of each registered loss: memory of its code, FLOPs, and bytes received.

The formulas follow the code of the losses, and tests/plan/test_plan_losses.py compares them with
measurements. Every registered loss must be listed here; custom losses have a method `cost`.
"""

# b samples of this rank, N ranks, B = N b, D width of the features, which are fp32

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
        num_samples: Samples in the data, for losses with state per sample.

    Raises:
        ValueError: If the loss is unknown here or does not have one of the options.
    """
    loss = build_loss(name, **options)
    cost = loss.cost(b, N, D, num_samples)
    if cost is not None:
        return cost
    # A custom subclass of a known loss may cost more than its base class.
    if ":" in name:
        raise ValueError(
            f"the cost of loss {name} is unknown: give the class a method cost(b, N, D, "
            "num_samples) -> LossCost (see disco_ds/losses/base.py), or plan the rest of the "
            "recipe with loss.name=disco_fused"
        )
    B = N * b
    device = torch.device("cuda")
    num_products, num_features, num_gradients = _count_work(loss, N)
    sent_itemsize, precision = 4, "fp32"
    if isinstance(loss, TiledLoss):
        sent_itemsize = _sent_itemsize(loss, device)
        precision = loss.tiling.on(device).precision
    state, state_on_host = 0, False
    if isinstance(loss, FastCLIPLoss):
        per_sample = 68 if loss.tau_step else 16
        state = per_sample * -(-num_samples // N)
        state_on_host = loss.memory == "host"
    received = B * D * (num_features * sent_itemsize + num_gradients * 4)
    return LossCost(
        peak=loss_peak(loss, b, N, D, device),
        state=state,
        state_on_host=state_on_host,
        flops=num_products * 2 * b * B * D,
        precision=precision,
        received_bytes=received if N > 1 else 0,
        while_computing=_is_ring(loss),
    )


def _count_work(loss: Loss, N: int) -> tuple[int, int, int]:
    """Count products of b x B x D, and how often B x D features and feature gradients arrive."""
    if isinstance(loss, ClipLoss):
        return 3 * N, 2, 0
    if isinstance(loss, DisCoLoss):
        return 6, 2, 2 if loss.reduction == "reduce_scatter" else 4
    if isinstance(loss, DisCoFusedLoss):
        return 3 if loss.store else 4, 1, 1
    if isinstance(loss, InfCLLoss):
        return 4, 2, 1
    if isinstance(loss, SigLIPLoss):
        return 3, 1, 1
    if isinstance(loss, FastCLIPLoss):
        return (5, 2, 0) if loss.blocks is GatheredBoth else (4, 1, 1)
    if isinstance(loss, NTXentLoss):
        return 10, 6 if loss.ring else 2, 1
    raise ValueError(
        f"the work of loss {type(loss).__name__} is unknown; add it to disco_ds/plan/losses.py"
    )


def _is_ring(loss: Loss) -> bool:
    return isinstance(loss, InfCLLoss | SigLIPLoss) or getattr(loss, "ring", False)


def loss_peak(loss: Loss, b: int, N: int, D: int, device: torch.device) -> int:
    """Return the loss's peak memory in bytes, without the features themselves.

    Args:
        loss: The loss.
        b: Samples per rank.
        N: Number of ranks.
        D: Width of the features.
        device: Where the loss would run, which decides the tiles.

    Raises:
        ValueError: If the loss is unknown here.
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
    if isinstance(loss, TiledLoss):
        return _tiled_peak(loss, b, N, D, device)
    raise ValueError(
        f"the memory of loss {type(loss).__name__} is unknown; add it to disco_ds/plan/losses.py"
    )


def _tiled_peak(loss: TiledLoss, b: int, N: int, D: int, device: torch.device) -> int:
    """Return the peak memory of a tiled loss: the maximum of tiles, reduction and final copies."""
    ring = _is_ring(loss)
    gathers_both = getattr(loss, "blocks", None) is GatheredBoth
    num_columns = b if ring else N * b
    # Gradients are fp32: those of this rank's rows, and those of all columns in reach.
    row_gradient = 4 * b * D
    column_gradient = 4 * num_columns * D
    rounded = _rounded_itemsize(loss, device)
    sent = num_columns * D * _sent_itemsize(loss, device)
    # The features are copied to the dtype in which they are sent.
    copied = rounded > 0 or loss.comm_dtype is not None
    reduced = 0
    if ring:
        # Feature blocks in transit and a local copy; gradients of rows; gradients of columns in
        # transit.
        features = sent * (min(N - 1, 2) + copied)
        blocks = features + row_gradient + row_gradient * (3 if N > 1 else 1)
    else:
        num_gathered = 2 if gathers_both or isinstance(loss, NTXentLoss) else 1
        features = sent * num_gathered if N > 1 or copied else 0
        blocks = features + row_gradient + (row_gradient if gathers_both else column_gradient)
        if N > 1 and not gathers_both:
            reduced = blocks + row_gradient
            if device.type == "cpu":  # gloo reduces a copy
                reduced += column_gradient
    if isinstance(loss, NTXentLoss):
        blocks = max(blocks, features + 3 * row_gradient)
    chunk = 4 * min(chunk_rows(D, device), b) * D * (2 if rounded == 2 else 1)
    if isinstance(loss, SigLIPLoss):
        # The gradients still exist while autograd copies them.
        finished = max(blocks + chunk, 4 * row_gradient)
    else:
        finished = 2 * row_gradient + chunk + sent * copied
    stored = 2 * b * N * b if isinstance(loss, DisCoFusedLoss) and loss.store else 0
    rounded_rows = b * D * rounded
    vectors = 8 * (8 * num_columns + 12 * b)
    tile = _tile(loss, b, num_columns, D, device)
    return rounded_rows + stored + vectors + max(blocks + tile, reduced, finished)


def _rounded_itemsize(loss: TiledLoss, device: torch.device) -> int:
    """Return bytes per number of the features' copies in `precision`; 0 if there are no copies."""
    return {"fp32": 0, "tf32": 4}.get(loss.tiling.on(device).precision, 2)


def _sent_itemsize(loss: TiledLoss, device: torch.device) -> int:
    """Return bytes per number of the features that are sent to other ranks."""
    if loss.comm_dtype:
        return loss.comm_dtype.itemsize
    return _rounded_itemsize(loss, device) or 4


def _tile(loss: TiledLoss, n: int, m: int, D: int, device: torch.device) -> int:
    """Return the bytes that one tile of an n x m block needs."""
    tiling = loss.tiling.on(device)
    max_rows, max_columns = tiling.size(device)
    rows, columns = min(max_rows, n), min(max_columns, m)
    on_gpu = device.type == "cuda"
    itemsize = 2 if on_gpu and tiling.precision in ("fp16", "bf16") else 4
    if on_gpu and tiling.impl != "torch":
        # Triton writes the weights once, in the dtype in which they are multiplied.
        per_pair = itemsize
    else:
        # torch has the weights in fp32 and a copy, and more if each row has its own scale.
        has_row_scales = isinstance(loss, FastCLIPLoss) and bool(loss.tau_step)
        per_pair = 4 * (4 if has_row_scales else 2)
        if itemsize == 2:
            per_pair += 2
    converted = 0
    if loss.comm_dtype and loss.comm_dtype.itemsize != itemsize:
        converted = itemsize * columns * D
    return per_pair * rows * columns + converted
