"""Cost of each registered loss: memory that it needs, FLOPs, and bytes received.

tests/plan/test_plan_losses.py compares the memory with measurements. Every registered loss must be
listed here; custom losses have a method `cost`.
"""

# b: samples per rank; N: number of ranks; B = N b; D: width of the features, which are fp32

from __future__ import annotations

import math

import torch

from disco_ds.losses import build_loss
from disco_ds.losses.base import Loss, LossCost
from disco_ds.losses.blocks import GatheredBoth, TiledLoss
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
    # A custom subclass of a known loss may cost more than its base class.
    work = None if ":" in name else _count_work(loss, N)
    if work is None:
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
    )


def _count_work(loss: Loss, N: int) -> tuple[int, int, int] | None:
    """Count products of b x B x D, and how often B x D features and feature gradients arrive."""
    match loss:
        case ClipLoss():
            return 3 * N, 2, 0
        case DisCoLoss():
            return 6, 2, 2
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


def loss_peak(loss: Loss, b: int, N: int, D: int, device: torch.device) -> int:
    """Return the peak memory of a loss of this package in bytes, without the features themselves.

    For tiled losses, this is an upper bound that leaves out terms much smaller than the features.

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
        backward = b * B + 4 * B * D + 4 * b * D
        return 4 * max(forward, backward)
    assert isinstance(loss, TiledLoss)
    tiling = loss.tiling.on(device)
    itemsize = 2 if tiling.precision in HALF else 4
    sent_itemsize = _sent_itemsize(loss, tiling.precision)
    ring = isinstance(loss, InfCLLoss | SigLIPLoss) or getattr(loss, "ring", False)
    if ring:
        # Blocks in transit and a local copy; fp32 gradients of both sides, and those in transit.
        num_columns = b
        columns = min(N, 3) * b * D * sent_itemsize
        num_row_gradients = 4 if N > 1 else 2
    else:
        _, num_features, num_gradients = _count_work(loss, N) or (0, 0, 0)
        # gloo, on a CPU, reduces a copy of the gradients.
        num_copies = 2 if N > 1 and device.type == "cpu" else 1
        num_columns = B
        columns = B * D * (num_features * sent_itemsize + num_gradients * num_copies * 4)
        num_row_gradients = 2
    # The rows are rounded to the precision of the tiles.
    rows = b * D * (4 * num_row_gradients + itemsize)
    tile = math.prod(tiling.size(b, num_columns, D, device))
    # Triton writes the weights of a tile once. torch has two fp32 copies, and two more if each row
    # has its own scale.
    bytes_per_pair = itemsize
    if device.type == "cpu" or tiling.impl == "torch":
        bytes_per_pair = 16 if isinstance(loss, FastCLIPLoss) and loss.tau_step else 8
    stored = 2 * b * B if isinstance(loss, DisCoFusedLoss) and loss.store else 0
    return columns + rows + tile * bytes_per_pair + stored


def _sent_itemsize(loss: TiledLoss, precision: str) -> int:
    """Return bytes per number of the features that are sent to other ranks."""
    if loss.comm_dtype:
        return loss.comm_dtype.itemsize
    return 2 if precision in HALF else 4
