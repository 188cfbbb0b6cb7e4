"""The optimizers of a run, and the exponential moving average (EMA) of the trained weights.

The built-in optimizers come from torch, timm and this file, so DeepSpeed compiles no optimizer code.

`Muon` is Muon for the hidden matrices and AdamW for all other parameters, at every ZeRO stage. The momentum has one
number per element, so ZeRO divides it like any other state. Only the orthogonalization needs whole matrices. For it,
the ranks combine their parts of the update by an all-reduce, for matrices of one shape at a time. DeepSpeed's Muon
(0.19) is not used. It orthogonalizes the gradients before their norm is computed, which would change the meaning of
clipping, grad_norm and on_spike. Its momentum at ZeRO 1 and 2 cannot be resharded. Sources: Jordan et al. 2024
(https://kellerjordan.github.io/posts/muon). The learning rate is multiplied by the factor of Liu et al. 2025 (arXiv
2502.16982), so that values of learning rate and weight decay that suit AdamW also suit Muon.

The average is stored as an additional optimizer state. Therefore DeepSpeed shards and saves it, and a run that is
resumed with a different number of ranks or ZeRO stage restores it like every other state. Buffers are not averaged.
"""

# W: a matrix [m, n]. U: the update of W, with the same shape.

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine as Engine
from timm.optim import Lamb, Lion
from torch import Tensor

from disco_ds.checkpoints.state import AVERAGE, LocalPart, find_local
from disco_ds.config import EmaSettings, OptimSettings
from disco_ds.distributed import comm, deepspeed_quirks
from disco_ds.names import load_custom

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration."""
MAX_BATCH = 2**25
"""Matrices of one shape are orthogonalized in batches of at most this many elements, and at least one matrix."""
STEPS = "ema_steps"
"""Name of the optimizer state that counts the updates since the average began."""
CHUNK = 2**24
"""Number of rows of a tensor that are swapped at a time. A row of a flat tensor is one element."""


def build_optimizer(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    """Build the optimizer. AdamW and SGD use torch's fused implementation, on the CPU too.

    Args:
        groups: Parameter groups.
        settings: Settings of the optimizer. The learning rate is set later, by set_rates.

    Raises:
        ValueError: If optim.factory cannot be imported or does not return a torch optimizer for these groups.
    """
    if settings.factory:
        optimizer = load_custom(settings.factory)(groups)
        names = [group.get("name") for group in getattr(optimizer, "param_groups", ())]
        if names != [group["name"] for group in groups]:
            raise ValueError(
                f"optim.factory={settings.factory} must return a torch.optim.Optimizer with unchanged parameter "
                f"groups, but returned a {type(optimizer).__name__} with the groups {names}"
            )
        if settings.elementwise and isinstance(optimizer, torch.optim.Adagrad):
            raise ValueError(
                "at ZeRO 1 to 3, DeepSpeed 0.19 rebuilds Adagrad without the settings of its groups: use "
                "deepspeed=zero0, and remove optim.elementwise"
            )
        return optimizer
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    if settings.name == "muon":
        return Muon(groups, settings, comm.DTYPES[settings.muon_precision])
    if settings.name == "lion":
        return Lion(groups, lr=1.0, betas=settings.betas)
    if settings.name == "lamb":
        # The engine already clips the gradient, so LAMB's built-in clipping is turned off.
        return Lamb(groups, lr=1.0, betas=settings.betas, eps=settings.eps, max_grad_norm=None)
    return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, fused=True)


class Part(NamedTuple):
    """The part of a matrix that this rank holds. It has 0 elements if only other ranks hold the matrix."""

    weight: Tensor
    """[number of elements in this part], a view of the weight."""
    update: Tensor
    """[number of elements in this part], a view of the update."""
    start: int
    """Index, within the matrix, of the first element that this rank holds."""


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
        self.is_sharded = False
        """True at ZeRO 1 to 3, where a matrix may be divided among the ranks. `attach` sets this."""
        self.parts: dict[Tensor, list[tuple[torch.Size, LocalPart]]] = defaultdict(list)
        """Maps each tensor that the optimizer updates to the matrices in it, in the same order on every rank.

        Each entry is the shape of the whole matrix and the part of it that this rank holds.
        """

    def attach(self, engine: Engine, matrices: list[Any]) -> None:
        """Find the parts of the matrices that this rank holds.

        Args:
            engine: The engine that uses this optimizer.
            matrices: The parameters of the groups in which `muon` is True.
        """
        self.is_sharded = engine.zero_optimization_stage() > 0
        for matrix in matrices:
            part = find_local(engine, matrix)
            self.parts[part.tensor].append((getattr(matrix, "ds_shape", matrix.shape), part))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. Collective at ZeRO 1 to 3."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step()
        self.param_groups = groups
        for group in groups:
            # The gradients of a skipped step are None.
            if group["muon"] and any(weight.grad is not None for weight in group["params"]):
                self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group. Matrices of the same shape are processed in one operation."""
        weights = [weight for weight in group["params"] if weight.grad is not None]
        gradients = [weight.grad for weight in weights]
        for weight in weights:
            state = self.state[weight]
            if "momentum_buffer" not in state:
                # torch's AdamW expects the entry "step" in every state that it loads.
                state["step"] = torch.zeros(())
                state["momentum_buffer"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        updates = torch._foreach_lerp(gradients, momenta, self.momentum)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        by_shape: dict[torch.Size, list[Part]] = defaultdict(list)
        for weight, update in zip(weights, updates, strict=True):
            for shape, part in self.parts[weight]:
                held = slice(part.position, part.position + part.numel)
                by_shape[shape].append(
                    Part(weight.view(-1)[held], update.view(-1)[held], part.start)
                )
        for shape, parts in by_shape.items():
            most = max(MAX_BATCH // shape.numel(), 1)
            for first in range(0, len(parts), most):
                self._apply(shape, parts[first : first + most], group["lr"])

    def _apply(self, shape: torch.Size, parts: list[Part], lr: float) -> None:
        """Orthogonalize the updates of matrices of one shape, and subtract them from the weights.

        Collective if the matrices are divided among the ranks.
        """
        whole = parts[0].update.new_zeros(len(parts), shape.numel(), device=comm.local_device())

        def narrow(rows: Iterable[Tensor], parts: list[Part]) -> list[Tensor]:
            return [
                row.narrow(0, part.start, part.weight.numel())
                for row, part in zip(rows, parts, strict=True)
            ]

        torch._foreach_copy_(narrow(whole, parts), [part.update for part in parts])
        # In `whole`, other ranks have zeros where this rank has its part, so the sum over ranks is the whole update.
        if self.is_sharded:
            whole = comm.all_reduce_sum(whole)
        held = [number for number, part in enumerate(parts) if part.weight.numel()]
        if not held:
            return
        # The filters of a convolution, [out, in, h, w], count as a matrix [out, in x h x w].
        matrices = whole[held].view(len(held), shape[0], -1)
        directions = orthogonalize(matrices, self.dtype).flatten(1)
        mine = [parts[number] for number in held]
        directions = directions.to(mine[0].weight)
        rate = 0.2 * lr * math.sqrt(max(matrices.shape[1:]))
        torch._foreach_sub_([part.weight for part in mine], narrow(directions, mine), alpha=rate)


def orthogonalize(U: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices with the singular vectors of U and singular values between about 0.7 and 1.2.

    This runs five Newton-Schulz iterations.

    Args:
        U: [k, m, n], k matrices.
        dtype: Precision of the iterations.
    """
    a, b, c = COEFFICIENTS
    X = (U / torch.linalg.matrix_norm(U, keepdim=True).clamp(min=1e-7)).to(dtype)
    is_tall = X.shape[1] > X.shape[2]
    if is_tall:
        X = X.mT
    for _ in range(5):
        A = X @ X.mT
        # Each baddbmm rounds once, like addmm in torch.optim.Muon.
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if is_tall else X


@torch.no_grad()
def update_average(engine: Engine, settings: EmaSettings) -> None:
    """Update the average. Call this after each step that has updated the weights.

    The first call sets the average to the weights. Later calls change it every settings.every_steps steps, with a decay
    that is low at first and rises to settings.decay.
    """
    weights = _find_weights(engine)
    states = [engine.basic_optimizer.state[weight] for weight in weights]
    step = states[0].get(STEPS, 0) + 1
    if AVERAGE not in states[0]:
        for weight, state in zip(weights, states, strict=True):
            state[AVERAGE] = weight.clone()
    elif step % settings.every_steps == 0:
        decay = min(settings.decay, (1 + step) / (10 + step)) ** settings.every_steps
        torch._foreach_lerp_([state[AVERAGE] for state in states], weights, 1 - decay)
    for state in states:
        state[STEPS] = step


def has_average(engine: Engine) -> bool:
    """Return whether the engine has an average."""
    return any(AVERAGE in state for state in engine.basic_optimizer.state.values())


def drop_average(engine: Engine) -> None:
    """Remove the average, if the loaded checkpoint contained one."""
    for state in engine.basic_optimizer.state.values():
        state.pop(AVERAGE, None)
        state.pop(STEPS, None)


@contextmanager
def averaged(engine: Engine) -> Iterator[None]:
    """Give the model the averaged weights during the `with` block. Collective.

    After an error on a single rank, the weights are not restored. Restoring them is a collective operation, which that
    rank would start alone, and the error ends the run anyway.
    """
    _swap(engine)
    try:
        yield
    except comm.AgreedError:
        _swap(engine)
        raise
    _swap(engine)


@torch.no_grad()
def _swap(engine: Engine) -> None:
    """Swap the weights with their average in place, in small pieces. Collective."""
    for weight in _find_weights(engine):
        average = engine.basic_optimizer.state[weight][AVERAGE]
        for mine, other in zip(weight.split(CHUNK), average.split(CHUNK), strict=True):
            kept = mine.clone()
            mine.copy_(other)
            other.copy_(kept)
    deepspeed_quirks.refresh_weights(engine)


def _find_weights(engine: Engine) -> list[Tensor]:
    """Return the tensors that the optimizer of this rank updates. They are the keys of its states."""
    if engine.zero_optimization_stage() == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [weight for group in engine.basic_optimizer.param_groups for weight in group["params"]]
