"""State that a loss keeps for every sample of the data: FastCLIP's estimates u, and temperatures per sample.

Each rank owns the samples with id % N == rank. A forward fetches values from their owners and stages new ones; `commit`
applies them. A sample takes 16 bytes, 68 with temperatures, divided by the ranks. Only losses import this file.
"""

# b local batch, B global = N b, N ranks; side 0 has images as anchors, side 1 texts

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from disco_ds.distributed import comm

Memory = Literal["device", "host"]
BETAS, EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class TauStep:
    """How a sample's temperatures learn, by Adam with that sample's own count of steps."""

    start: float
    lr: float
    low: float
    high: float
    clamp: float = 5.0
    """Largest absolute value of the gradient."""


class SampleState:
    """log u, and with `step` a temperature, for both sides of each sample.

    Args: num_samples: ids are below it; memory: where the values are kept; step: None: there are no temperatures.
    """

    def __init__(self, num_samples: int, memory: Memory, step: TauStep | None, group: Any):
        self.num_samples, self.step, self.group = num_samples, step, group
        self.samples = 0
        """Samples committed so far."""
        device = comm.local_device() if memory == "device" else torch.device("cpu")
        num_own = len(range(comm.rank(group), num_samples, comm.size(group)))
        shape: dict[str, Any] = {"size": (num_own, 2), "dtype": torch.float64, "device": device}
        self.values = {"log_u": torch.full(fill_value=-math.inf, **shape)}
        """By name [own samples, 2] float64; log u of a sample that was never seen is -inf."""
        if step is not None:
            self.values["tau"] = torch.full(fill_value=step.start, **shape)
            self.values |= {name: torch.zeros(**shape) for name in ("exp_avg", "exp_avg_sq")}
            self.values["steps"] = torch.zeros(num_own, dtype=torch.int32, device=device)
        self._ids: Tensor | None = None
        self._staged: dict[str, Tensor] = {}

    def fetch(self, index: Tensor) -> dict[str, Tensor]:
        """log_u and tau of these samples, [b, 2] float64 each; forgets what is staged. Collective.

        Raises: AgreedError for an id outside of the data.
        """
        self._staged = {}
        self._ids = comm.gather(index.detach(), group=self.group)
        wrong = (self._ids < 0) | (self._ids >= self.num_samples)
        if bool(wrong.any()):
            ids, ranks = self._ids[wrong], wrong.nonzero()[:, 0] // len(index)
            raise comm.AgreedError(
                f"sample id {ids[0].item()} of rank {ranks[0].item()} is not in [0, {self.num_samples}), the data of "
                f"set_num_samples ({len(ids)} such ids); ids and num_samples must be of one data set"
            )
        mine, slots = self._own()
        names = [name for name in ("log_u", "tau") if name in self.values]
        held = torch.cat([self.values[name][slots] for name in names], 1)
        # Each row is its owner's value, and zero on the other ranks, so that the sum over ranks is the value.
        out = torch.zeros(len(self._ids), held.shape[1], dtype=torch.float64, device=index.device)
        out[mine] = held.to(index.device)
        own = comm.reduce_scatter_in_place(out, self.group)
        return dict(zip(names, own.split(2, 1), strict=True))

    def stage(self, name: Literal["log_u", "tau_gradient"], value: Tensor) -> None:
        """Stage a new value, or a gradient, of the fetched samples, [b, 2] float64. Collective."""
        self._staged[name] = comm.gather(value.detach(), group=self.group)

    @torch.no_grad()
    def commit(self) -> None:
        """Apply what is staged. A sample that is in the batch several times gets the mean."""
        assert self._ids is not None, "nothing is staged"
        mine, slots = self._own()
        unique, inverse, counts = torch.unique(slots, return_inverse=True, return_counts=True)
        where, counts = inverse[:, None].expand(-1, 2), counts[:, None]
        staged = {name: value[mine].to(slots.device) for name, value in self._staged.items()}
        empty = self.values["log_u"].new_zeros(len(unique), 2)
        log_u = staged["log_u"]
        # The mean of u is taken through its logarithms, against the largest of each sample.
        top = (empty - math.inf).scatter_reduce_(0, where, log_u, "amax")
        total = empty.clone().scatter_add_(0, where, (log_u - top[inverse]).exp())
        self.values["log_u"][unique] = top + (total / counts).log()
        if self.step is not None:
            gradient = empty.clone().scatter_add_(0, where, staged["tau_gradient"]) / counts
            self._step(unique, gradient, self.step)
        self.samples += len(self._ids)
        self._ids, self._staged = None, {}

    def _step(self, slots: Tensor, gradient: Tensor, step: TauStep) -> None:
        """One step of Adam on the temperatures of these samples, with that sample's own bias correction."""
        gradient = gradient.clamp(-step.clamp, step.clamp)
        # A sample is stepped only when it is in a batch, so each has its own moments and its own count of steps.
        first = self.values["exp_avg"][slots].lerp(gradient, 1 - BETAS[0])
        second = BETAS[1] * self.values["exp_avg_sq"][slots] + (1 - BETAS[1]) * gradient.square()
        steps = self.values["steps"][slots] + 1
        corrected = [m / (1 - beta ** steps.double())[:, None] for m, beta in zip((first, second), BETAS, strict=True)]
        tau = self.values["tau"][slots] - step.lr * corrected[0] / (corrected[1].sqrt() + EPS)
        new = {"exp_avg": first, "exp_avg_sq": second, "steps": steps, "tau": tau.clamp(step.low, step.high)}
        for name, value in new.items():
            self.values[name][slots] = value

    def _own(self) -> tuple[Tensor, Tensor]:
        """Masks the gathered ids that this rank owns, [B] bool, and gives their indices into its values."""
        assert self._ids is not None
        N = comm.size(self.group)
        mine = self._ids % N == comm.rank(self.group)
        return mine, (self._ids[mine] // N).to(self.values["log_u"].device)

    def state_dict(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "samples": self.samples, "values": self.values}

    def load_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        """Restore from every rank's state_dict, in rank order, whatever their number.

        Raises: ValueError for parts that are not of this state or of a data set of another size.
        """
        N, n, M = comm.size(self.group), comm.rank(self.group), len(parts)
        # Rank m of M owned the ids m, m + M, ...; this rank owns those with id % N == n, of which rank m had some if
        # m and n are equal modulo the greatest common divisor. A part that has none of them is not read.
        for m in range(n % math.gcd(M, N), M, math.gcd(M, N)):
            part = parts[m]
            if part.keys() != self.state_dict().keys() or part["values"].keys() != self.values.keys():
                raise ValueError(f"the checkpoint has no state per sample as this loss keeps it (of rank {m})")
            if part["num_samples"] != self.num_samples:
                raise ValueError(
                    f"the checkpoint's loss has the state of {part['num_samples']:,} samples, the data have "
                    f"{self.num_samples:,} now; resume with the data the run began with"
                )
            ids = torch.arange(m, self.num_samples, M)
            mine = ids % N == n
            for name, value in self.values.items():
                value[(ids[mine] // N).to(value.device)] = part["values"][name][mine].to(value.device)
            self.samples = part["samples"]
