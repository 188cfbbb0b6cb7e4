"""Predict the cost of each registered loss: memory, FLOPs, and bytes received from other ranks.

tests/plan/test_plan_losses.py compares the memory with measurements. Every registered loss must be
listed in this module. A custom loss predicts its cost in a method `cost`.
"""

# b: samples per rank; N: number of ranks; B = N b; D: width of the features, which are fp32

import math

import torch

from disco_ds.losses import Loss, LossCost, build_loss
from disco_ds.losses.blocks import Ring, TiledLoss, chunk_rows
from disco_ds.losses.fastclip import FastCLIPLoss
from disco_ds.losses.infonce import DisCoFusedLoss, DisCoLoss, FullMatrixLoss, InfCLLoss, NTXentLoss
from disco_ds.losses.kernels.torch_tiles import STRIP
from disco_ds.losses.siglip import SigLIPLoss


def loss_cost(
    name: str,
    options: dict[str, object],
    b: int,
    N: int,
    D: int,
    num_samples: int = 0,
    teacher_width: int = 0,
) -> LossCost:
    """Return the cost of a loss on a GPU.

    Args:
        name: loss.name of the recipe.
        options: loss.options of the recipe.
        b: Samples per rank.
        N: Number of ranks.
        D: Width of the features.
        num_samples: Number of samples in the data, for losses that keep state per sample; 0 if it is unknown.
        teacher_width: Width of the teacher's features; 0 if there is no teacher.

    Raises:
        ValueError: If the cost of the loss is unknown, the loss needs num_samples, or it does not accept an option.
    """
    loss = build_loss(name, **options)
    cost = loss.cost(b, N, D, num_samples)
    if cost is not None:
        return cost
    # A custom subclass of a known loss may cost more than its base class, so its cost counts as unknown.
    work = None if ":" in name else _count_work(loss, N)
    if work is None:
        raise ValueError(
            f"the cost of loss {name} is unknown: give the class a method cost(b, N, D, "
            "num_samples) -> LossCost (see disco_ds/losses/base.py), or plan the rest of the "
            "recipe with loss.name=disco_fused"
        )
    num_products, num_features, num_gradients = work
    T = teacher_width
    # A teacher adds four products: its similarities, computed twice (2 T); its targets times the student's columns (D);
    # and its targets times its own columns, for the entropy of the targets (T).
    products = num_products * D + (3 * T + D if T else 0)
    device = torch.device("cuda")
    sent, precision = 4, "fp32"
    if isinstance(loss, TiledLoss):
        precision = loss.tiling.on(device).precision
        _, sent = _itemsizes(loss, device)
    state, state_on_host = 0, False
    if isinstance(loss, FastCLIPLoss):
        if not num_samples:
            raise ValueError(
                f"loss {name} keeps state for every sample: pass the number of samples as --data-samples N"
            )
        state = (68 if loss.tau_step else 16) * -(-num_samples // N)
        state_on_host = loss.memory == "host"
    # A rank's own rows are not sent. In a ring, gradients make one more hop, back to the rank that they belong to.
    num_hops = N - 1 + in_ring(loss)
    received = b * (D + T) * num_features * sent * (N - 1) + b * D * num_gradients * 4 * num_hops
    return LossCost(
        peak=loss_peak(loss, b, N, D, device, T),
        state=state,
        state_on_host=state_on_host,
        flops=products * 2 * b * N * b,
        precision=precision,
        received_bytes=received if N > 1 else 0,
    )


def _count_work(loss: Loss, N: int) -> tuple[int, int, int] | None:
    """Count the matrix products and the received tensors of a loss.

    Returns:
        None for an unknown loss. Otherwise three numbers: the matrix products of size b x B x D, the B x D tensors of
        features that a rank receives, and the B x D tensors of gradients that it receives.
    """
    match loss:
        case FullMatrixLoss():
            return 3 * N, 2, 0
        case DisCoLoss():
            return 6, 2, 2
        case InfCLLoss():
            return 4, 2, 1
        case SigLIPLoss():
            return 3, 1, 1
        case DisCoFusedLoss() | FastCLIPLoss():
            return 4, 1, 1
        case NTXentLoss():
            return 10, 6 if in_ring(loss) else 2, 1
    return None


def in_ring(loss: Loss) -> bool:
    """Return whether the features of the other ranks pass through this rank block by block."""
    return isinstance(loss, SigLIPLoss) or getattr(loss, "make_blocks", None) is Ring


def loss_peak(
    loss: Loss, b: int, N: int, D: int, device: torch.device, teacher_width: int = 0
) -> int:
    """Return the peak memory of a loss of this package in bytes, without the features themselves.

    For tiled losses, the matrices are counted exactly, but the vectors are estimated. Each vector takes at most 8 bytes
    per row or column.

    Args:
        loss: The loss.
        b: Samples per rank.
        N: Number of ranks.
        D: Width of the features.
        device: Device on which the loss would run. The size of the tiles depends on it.
        teacher_width: Width of the teacher's features; 0 if there is no teacher.
    """
    B, T = N * b, teacher_width
    if isinstance(loss, FullMatrixLoss):
        # First the product, two softmaxes and two gradients, all B x B. Later one B x B gradient, the
        # gathered features of both sides, and their gradients.
        taught = 5 * B * B + 2 * B * T if T else 0
        return 4 * (max(5 * B * B + 2 * B * D, B * B + 4 * B * D) + taught)
    if isinstance(loss, DisCoLoss):
        # Forward: for each direction a product, logits and a softmax; and the gathered features of both sides.
        forward = 6 * b * B + 2 * B * D
        # Backward: the gathered features of both sides, their gradients, and one more gradient that is being added.
        backward = b * B + 5 * B * D + b * D
        taught = 6 * b * B + 2 * B * T if T else 0
        return 4 * (max(forward, backward) + taught)
    assert isinstance(loss, TiledLoss)
    tiling = loss.tiling.on(device)
    itemsize, sent = _itemsizes(loss, device)
    views = isinstance(loss, NTXentLoss)
    ring = in_ring(loss)
    # Bytes per element of the copies of the rows and of the columns; 0 if there is no copy. The features are fp32, so
    # they are copied only if they are rounded.
    rows = 0 if tiling.precision == "fp32" else itemsize
    columns = sent if rows or loss.comm_dtype else 0
    if ring:
        # Two blocks that are being received, and three gradients of blocks: one is computed, one
        # received and one sent.
        columns += min(N - 1, 2) * sent
        num_gradients = 3 if N > 1 else 1
    else:
        columns = N * sent * (1 + views) if N > 1 else columns
        num_gradients = N
    # After the gradient of the columns, NT-Xent computes a second gradient of the rows.
    num_gradients = max(1 + num_gradients, 2 + views)
    # Gradients that are summed over ranks after the tiles are freed. On a CPU, gloo sums them in a copy.
    num_summed = 0
    if N > 1 and not ring:
        num_summed = 1 + N * (device.type == "cpu")
    num_columns = b if ring else B
    shape = tiling.size(b, num_columns, D, device)
    tile = _tile_bytes(loss, math.prod(shape), device)
    if sent != itemsize:
        tile += shape[1] * D * itemsize
    # The products of positive pairs are computed in chunks, also after the tiles are freed.
    chunk = 4 * min(b, chunk_rows(D, device)) * D
    vectors = 8 * 8 * (b + num_columns)  # about eight vectors in float64
    held = b * D * (rows + columns + 4 * num_gradients) + vectors
    if T:
        # The teacher's features, with the same copies as the student's; the products of the targets with the columns of
        # both models; and a tile of targets.
        held += b * T * (rows + columns + 4) + 4 * b * D + vectors
        size = math.prod(shape)
        if isinstance(loss, SigLIPLoss):
            tile += 4 * size
            held += vectors  # its value is computed from the products of all pairs
        else:
            tile += _tile_bytes(loss, size, device)
    return held + max(tile, chunk, 4 * num_summed * b * D)


def _tile_bytes(loss: TiledLoss, size: int, device: torch.device) -> int:
    """Return the peak bytes of a tile with `size` elements, including temporary copies of it."""
    if device.type != "cpu" and loss.tiling.impl != "torch":
        # Triton keeps one copy of a tile's weights and makes no temporary copies.
        return size * _itemsizes(loss, device)[0]
    # torch computes in fp32 and, except for SigLIP, in strips on a CPU. With a scale per row, it makes two more copies
    # than with one scale for all rows.
    if isinstance(loss, SigLIPLoss):
        return 8 * size
    strip = min(size, STRIP) if device.type == "cpu" else size
    return 4 * size + (12 if isinstance(loss, FastCLIPLoss) and loss.tau_step else 4) * strip


def _itemsizes(loss: TiledLoss, device: torch.device) -> tuple[int, int]:
    """Return the bytes per element of features that are multiplied, and of features that are sent to other ranks."""
    itemsize = 2 if loss.tiling.on(device).precision in ("fp16", "bf16") else 4
    return itemsize, loss.comm_dtype.itemsize if loss.comm_dtype else itemsize
