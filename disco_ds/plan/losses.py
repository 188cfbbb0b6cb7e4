"""What a loss costs: memory beside the features as its code allocates it, FLOPs, and bytes received.

Every registered loss must be known here; tests/plan/test_plan_losses.py measures each. Other losses have a
method `cost`.
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


def loss_cost(name: str, options: dict[str, object], b: int, N: int, D: int, num_samples: int = 0) -> LossCost:
    """Cost of a loss on a GPU. Raises: ValueError for a loss that is not known here, or options that it lacks."""
    loss = build_loss(name, **options)
    if (own := loss.cost(b, N, D, num_samples)) is not None:
        return own
    # Nor is it known by a class it derives from, for it may do more.
    if ":" in name:
        raise ValueError(
            f"plan does not know what loss {name} costs: give the class a method cost(b, N, D, num_samples) -> LossCost"
            " (see disco_ds/losses/base.py), or plan the rest of the recipe with loss.name=disco_fused"
        )
    B = N * b
    units, of_features, of_gradients = _work(loss, N)
    device, sent = torch.device("cuda"), 4
    if isinstance(loss, TiledLoss):
        sent = loss.comm_dtype.itemsize if loss.comm_dtype else _held_itemsize(loss, device) or 4
    per_sample = 0
    if isinstance(loss, FastCLIPLoss):
        per_sample = 68 if loss.tau_step else 16
    return LossCost(
        peak=loss_peak(loss, b, N, D, device),
        state=per_sample * -(-num_samples // N),
        state_on_host=isinstance(loss, FastCLIPLoss) and loss.memory == "host",
        flops=units * 2 * b * B * D,
        precision=loss.tiling.on(device).precision if isinstance(loss, TiledLoss) else "fp32",
        received_bytes=B * D * (of_features * sent + of_gradients * 4) if N > 1 else 0,
        while_computing=_is_ring(loss),
    )


def _work(loss: Loss, N: int) -> tuple[int, int, int]:
    """Number of products of b x B x D, and how often B x D features and gradients of features are received."""
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
    raise ValueError(f"plan does not know the work of loss {type(loss).__name__}; see disco_ds/plan/losses.py")


def _is_ring(loss: Loss) -> bool:
    return isinstance(loss, InfCLLoss | SigLIPLoss) or getattr(loss, "ring", False)


def loss_peak(loss: Loss, b: int, N: int, D: int, device: torch.device) -> int:
    """Bytes at the loss's peak, beside the features. Args: device: where it would run, which decides the tiles."""
    B = N * b
    if isinstance(loss, ClipLoss):
        # The product, two softmaxes and two gradients at a time; the features of both sides, gathered and local.
        return 4 * max(5 * B * B + 2 * B * D, B * B + 4 * B * D)
    if isinstance(loss, DisCoLoss):
        # Forward: two products, logits and softmaxes each, and both sides gathered. Backward: their gradients.
        return 4 * max(6 * b * B + 2 * B * D, b * B + 4 * B * D + (2 + (N > 1)) * b * D)
    if not isinstance(loss, TiledLoss):
        raise ValueError(f"plan does not know the memory of loss {type(loss).__name__}; see disco_ds/plan/losses.py")
    return _tiled_peak(loss, b, N, D, device)


def _tiled_peak(loss: TiledLoss, b: int, N: int, D: int, device: torch.device) -> int:
    ring = _is_ring(loss)
    gather_both = getattr(loss, "blocks", None) is GatheredBoth
    num_columns = b if ring else N * b
    own, columns = 4 * b * D, 4 * num_columns * D
    rounded = _held_itemsize(loss, device)
    held = b * D * (rounded or 0)
    sent_itemsize = loss.comm_dtype.itemsize if loss.comm_dtype else rounded or 4
    sent = num_columns * D * sent_itemsize
    copied = bool(rounded or loss.comm_dtype)  # features are copied to the dtype that is sent
    if ring:
        # The gradient of the rows, gradients of columns on the ring, blocks of features, and a copy of one's own.
        gathered, reduced = sent * (min(N - 1, 2) + copied), 0
        blocks = gathered + own + own * (3 if N > 1 else 1)
    else:
        gathered = sent * (N > 1 or copied) * (2 if gather_both or isinstance(loss, NTXentLoss) else 1)
        blocks = gathered + own + (own if gather_both else columns)
        # On a CPU gloo reduces a copy.
        reduced = 0 if gather_both or N == 1 else blocks + own + (columns if device.type == "cpu" else 0)
    if isinstance(loss, NTXentLoss):
        blocks = max(blocks, gathered + 3 * own)
    chunk = 4 * min(chunk_rows(D, device), b) * D * (1 + (rounded == 2))
    finished = blocks + chunk if isinstance(loss, SigLIPLoss) else 2 * own + chunk + sent * copied
    if isinstance(loss, SigLIPLoss):
        finished = max(finished, 4 * own)  # gradients are still held while autograd copies them
    kept = 2 * b * N * b if isinstance(loss, DisCoFusedLoss) and loss.store else 0
    vectors = 8 * (8 * num_columns + 12 * b)
    return held + kept + vectors + max(blocks + _tile(loss, b, num_columns, D, device), reduced, finished)


def _held_itemsize(loss: TiledLoss, device: torch.device) -> int | None:
    """Bytes per number of the features' copies that are rounded to the precision; None where there are no copies."""
    return {"fp32": None, "tf32": 4}.get(loss.tiling.on(device).precision, 2)


def _tile(loss: TiledLoss, n: int, m: int, D: int, device: torch.device) -> int:
    """Bytes that the work on one tile of an n x m block takes."""
    tiling = loss.tiling.on(device)
    rows, columns = (min(side, length) for side, length in zip(tiling.size(device), (n, m), strict=True))
    on_gpu = device.type == "cuda"
    factor = 2 if on_gpu and tiling.precision in ("fp16", "bf16") else 4
    if on_gpu and tiling.impl != "torch":
        tile = factor  # Triton writes weights once, as they are multiplied
    else:  # torch has them in fp32, with a copy, and several where each row has its own scale
        tile = 4 * (4 if isinstance(loss, FastCLIPLoss) and loss.tau_step else 2) + factor * (factor == 2)
    sent_otherwise = factor * columns * D if loss.comm_dtype and loss.comm_dtype.itemsize != factor else 0
    return tile * rows * columns + sent_otherwise
