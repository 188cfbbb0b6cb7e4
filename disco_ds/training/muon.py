"""Muon for the hidden matrices and AdamW for all other parameters, at every ZeRO stage.

The momentum has one number per element, so ZeRO divides it like any other state. Whole matrices are needed only to
orthogonalize the update: the ranks then join the parts that they hold, one matrix at a time.

DeepSpeed 0.19 has a Muon too, but it is not used. It orthogonalizes the gradients before their norm is computed, which
would change the meaning of clipping, grad_norm and on_spike. The momentum that it keeps at ZeRO 1 and 2 cannot be
resharded.

Sources: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon). The learning rate is multiplied by the factor
of Liu et al. 2025 (arXiv 2502.16982), so that values of learning rate and weight decay that suit AdamW also suit Muon.
"""

# W: a matrix [m, n]. U: the update of W, with the same shape.

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from deepspeed import DeepSpeedEngine as Engine
from torch import Tensor

from disco_ds.checkpoints.reshard import find_place
from disco_ds.config import OptimSettings
from disco_ds.distributed import comm

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration."""


class Muon(torch.optim.AdamW):
    """Muon for the groups in which `muon` is True, and AdamW for the other groups. Call `attach` before the first step.

    Args:
        groups: Parameter groups.
        settings: Settings of the optimizer.
        dtype: Precision of the orthogonalization.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: OptimSettings, dtype: torch.dtype):
        super().__init__(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
        self.momentum = settings.momentum
        self.dtype = dtype
        self.parts: dict[Tensor, list[tuple[torch.Size, int, int, int]]] = defaultdict(list)
        """Maps each tensor that the optimizer updates to the matrices in it, in the same order on every rank.

        Each entry describes one matrix by four values: the shape of the whole matrix; the index, within the matrix, of
        the first element that this rank holds; the position of that element in the tensor; and the number of elements
        that this rank holds.
        """

    def attach(self, engine: Engine, matrices: list[Any]) -> None:
        """Find the parts of the matrices that this rank holds.

        Args:
            engine: The engine that uses this optimizer.
            matrices: The parameters of the groups in which `muon` is True.
        """
        for matrix in matrices:
            held, *part = find_place(engine, matrix)
            self.parts[held].append((getattr(matrix, "ds_shape", matrix.shape), *part))

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
            # torch's AdamW expects the entry "step" in every state that it loads.
            state["step"] = torch.zeros(())
            state["momentum_buffer"] = torch.zeros_like(weight)
        state["momentum_buffer"].lerp_(gradient, 1 - self.momentum)
        update = gradient.lerp(state["momentum_buffer"], self.momentum).view(-1)
        weight.mul_(1 - lr * weight_decay)
        for shape, start, place, numel in self.parts[weight]:
            whole = update.new_zeros(shape.numel(), device=comm.local_device())
            whole.narrow(0, start, numel).copy_(update.narrow(0, place, numel))
            # At ZeRO 1 to 3 the weight is flat. In `whole`, other ranks have zeros where this rank has its part, so
            # the sum over ranks is the whole update.
            if weight.dim() == 1:
                whole = comm.all_reduce_sum(whole)
            if numel:
                matrix = whole.view(shape).flatten(1)  # filters of a convolution: [out, in x h x w]
                direction = orthogonalize(matrix, self.dtype).reshape(-1)
                mine = direction.narrow(0, start, numel).to(weight)
                rate = 0.2 * lr * math.sqrt(max(matrix.shape))
                weight.view(-1).narrow(0, place, numel).sub_(mine, alpha=rate)


def orthogonalize(U: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix with the singular vectors of U and singular values between about 0.7 and 1.2.

    This runs five Newton-Schulz iterations.

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
