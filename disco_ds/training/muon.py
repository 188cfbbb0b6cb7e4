"""Muon: AdamW with orthogonalized updates for the hidden matrices, at every ZeRO stage.

The momentum has one number per element, so ZeRO divides it like any other state. Whole matrices are needed only to
orthogonalize the update: the ranks then join the parts that they hold, a few matrices at a time.

DeepSpeed 0.19 also has a Muon. It orthogonalizes gradients before their norm is computed, so clipping, grad_norm and
on_spike would have another meaning, and the momentum that it keeps at ZeRO 1 and 2 cannot be resharded.

Sources: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); the factor of the learning rate is that of
Liu et al. 2025 (arXiv 2502.16982), with which AdamW's learning rate and weight decay suit Muon too.
"""

# W matrix [m, n], U its update, as large as W

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine as Engine
from torch import Tensor

from disco_ds.checkpoints.reshard import find_place
from disco_ds.config import OptimSettings
from disco_ds.distributed import comm

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration."""
BUCKET = 2**25
"""Number of elements that the ranks join at a time, unless a single matrix is larger."""


class Part(NamedTuple):
    """The part of a matrix that this rank holds, in the flat tensor that the optimizer updates."""

    shape: torch.Size
    """Shape of the whole matrix."""
    start: int
    """Index of the first element within the matrix."""
    place: int
    """Index of the first element within the flat tensor."""
    numel: int
    """Number of elements, which may be 0."""


class Muon(torch.optim.AdamW):
    """AdamW, and Muon for the groups in which `muon` is True. Call `attach` before the first step."""

    def __init__(self, groups: list[dict[str, Any]], settings: OptimSettings):
        super().__init__(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
        self.momentum = settings.momentum
        self.dtype = DTYPES[settings.muon_precision]
        self.parts: dict[Tensor, list[Part]] = {}
        """Maps each tensor that the optimizer updates to the matrices in it, in the same order on every rank."""
        self.is_sharded = False

    def attach(self, engine: Engine, matrices: list[Any]) -> None:
        """Find the parts of the matrices that this rank holds.

        Args:
            engine: The engine that uses this optimizer.
            matrices: The parameters of the groups in which `muon` is True.
        """
        self.is_sharded = engine.zero_optimization_stage() > 0
        for matrix in matrices:
            held, *part = find_place(engine, matrix)
            shape = getattr(matrix, "ds_shape", matrix.shape)
            self.parts.setdefault(held, []).append(Part(shape, *part))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. Collective at ZeRO 1 to 3."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step()
        self.param_groups = groups
        for group in groups:
            for weight in group["params"] if group["muon"] else []:
                if weight.grad is not None:  # the gradients of a skipped step are None
                    self._update(weight, weight.grad, group["lr"], group["weight_decay"])

    def _update(self, weight: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            # torch's AdamW expects a step in every state that it loads.
            state["step"] = torch.zeros(())
            state["momentum_buffer"] = torch.zeros_like(weight)
        state["momentum_buffer"].lerp_(gradient, 1 - self.momentum)
        update = gradient.lerp(state["momentum_buffer"], self.momentum).view(-1)
        weight.mul_(1 - lr * weight_decay)
        for part, matrix in self._join(update, self.parts[weight]):
            if part.numel:
                direction = orthogonalize(matrix, self.dtype).reshape(-1)
                direction = direction.narrow(0, part.start, part.numel).to(weight)
                rate = 0.2 * lr * math.sqrt(max(part.shape))
                weight.view(-1).narrow(0, part.place, part.numel).sub_(direction, alpha=rate)

    def _join(self, update: Tensor, parts: list[Part]) -> Iterator[tuple[Part, Tensor]]:
        """Yield each part with the update of its whole matrix. Collective at ZeRO 1 to 3."""
        rest = list(parts)
        while rest:
            size, count = rest[0].shape.numel(), 1
            while count < len(rest) and size + rest[count].shape.numel() <= BUCKET:
                size += rest[count].shape.numel()
                count += 1
            bucket, rest = rest[:count], rest[count:]
            joined = update.new_zeros(size, device=comm.local_device())
            pieces = joined.split([part.shape.numel() for part in bucket])
            for part, piece in zip(bucket, pieces, strict=True):
                mine = update.narrow(0, part.place, part.numel)
                piece.narrow(0, part.start, part.numel).copy_(mine)
            if self.is_sharded:  # the other ranks have zeros where this rank has its part
                pieces = comm.all_reduce_sum(joined).split([len(piece) for piece in pieces])
            for part, piece in zip(bucket, pieces, strict=True):
                yield part, piece.view(part.shape)


def orthogonalize(U: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix with the singular vectors of U and singular values between about 0.7 and 1.2.

    Five Newton-Schulz iterations.

    Args:
        U: [m, n].
        dtype: Precision of the iterations.
    """
    a, b, c = COEFFICIENTS
    X = (U / U.norm().clamp(min=1e-7)).to(dtype)
    is_tall = len(X) > X.shape[1]
    if is_tall:
        X = X.T
    for _ in range(5):
        A = X @ X.T
        # Each addmm rounds once, as in torch.optim.Muon.
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.T if is_tall else X
