"""State that a loss keeps for every sample: FastCLIP's estimates u, and temperatures per sample.

Each rank owns the samples with id % N == rank. A loss's forward fetches values from the ranks that own them and
stages new values; `commit` applies the staged values. The state takes 16 bytes per sample, or 68 with temperatures,
and each rank stores 1/N of the samples. Only losses import this file.
"""

# b local batch, B global = N b, N ranks; [..., 2]: first the image side (image anchors), then the text side

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from disco_ds.distributed import comm

Memory = Literal["device", "host"]
BETA1 = 0.9
"""Adam's decay rate for the first moments of the temperatures' gradients."""
BETA2 = 0.999
"""Adam's decay rate for the second moments of the temperatures' gradients."""
EPS = 1e-8
"""Epsilon in Adam's update of the temperatures."""
CLAMP = 5.0
"""A temperature's gradient is clamped to at most this absolute value."""


@dataclass(frozen=True)
class TauStep:
    """Settings with which Adam updates the temperatures of the samples."""

    start: float
    """Initial temperature."""
    lr: float
    low: float
    """Lower bound of a temperature."""
    high: float
    """Upper bound of a temperature."""


class SampleState:
    """FastCLIP's estimates log u: one for the image and one for the text of every sample.

    If `step` is given, each image and each text also has a temperature.

    Args:
        num_samples: Number of samples in the data; ids are below this number.
        memory: Where the values are stored: "device" or "host".
        step: Adam's settings for the temperatures. None: no temperatures are stored.
        group: The process group; None: all ranks.
    """

    def __init__(self, num_samples: int, memory: Memory, step: TauStep | None, group: Any):
        self.num_samples = num_samples
        self.step = step
        self.group = group
        self.samples = 0
        """Number of samples in all batches committed so far, counting repetitions."""
        device = comm.local_device() if memory == "device" else torch.device("cpu")
        num_local = len(range(comm.rank(group), num_samples, comm.size(group)))
        never_seen = torch.full((num_local, 2), -math.inf, dtype=torch.float64, device=device)
        self.values = {"log_u": never_seen}
        """Values of the samples that this rank owns, by name: [number of owned samples, 2] float64.

        Only `steps`, Adam's step counts, is [number of owned samples] int32. log_u is -inf for a sample that has not
        been seen.
        """
        if step is not None:
            self.values["tau"] = torch.full_like(never_seen, step.start)
            self.values["exp_avg"] = torch.zeros_like(never_seen)
            self.values["exp_avg_sq"] = torch.zeros_like(never_seen)
            self.values["steps"] = torch.zeros(num_local, dtype=torch.int32, device=device)
        self._fetched: tuple[Tensor, Tensor] | None = None
        """Which samples of the last fetched global batch this rank owns, [B] bool, and their indices in `values`."""
        self._staged: dict[str, Tensor] = {}

    def fetch(self, index: Tensor) -> dict[str, Tensor]:
        """Fetch log_u and, if it is stored, tau of these samples. Discard all staged values. Collective.

        Args:
            index: [b] int64 ids.

        Returns:
            The values by name, [b, 2] float64 each.

        Raises:
            AgreedError: If an id is not in [0, num_samples).
        """
        self._staged = {}
        ids = comm.gather(index.detach(), group=self.group)
        wrong = (ids < 0) | (ids >= self.num_samples)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise comm.AgreedError(
                f"sample id {int(ids[first])} of rank {first // len(index)} is not in [0, "
                f"{self.num_samples}), the range given to set_num_samples; take ids and "
                "num_samples from the same data set"
            )
        N = comm.size(self.group)
        local = ids % N == comm.rank(self.group)
        slots = (ids[local] // N).to(self.values["log_u"].device)
        self._fetched = local, slots
        names = [name for name in ("log_u", "tau") if name in self.values]
        held = torch.cat([self.values[name][slots] for name in names], 1)
        # Only the rank that owns a sample fills in its row. The row is zero on all other ranks, so the sum over
        # ranks is the owner's value.
        out = torch.zeros(len(ids), held.shape[1], dtype=torch.float64, device=index.device)
        out[local] = held.to(index.device)
        values = comm.reduce_scatter_in_place(out, self.group)
        return dict(zip(names, values.split(2, 1), strict=True))

    def stage(self, name: Literal["log_u", "tau_gradient"], value: Tensor) -> None:
        """Stage new values or gradients, [b, 2] float64, for the samples of the last `fetch`. Collective."""
        self._staged[name] = comm.gather(value.detach(), group=self.group)

    @torch.no_grad()
    def commit(self) -> None:
        """Apply what was staged. If a sample occurs several times in the batch, use the mean of its u or gradients."""
        assert self._fetched is not None, "nothing is staged"
        local, slots = self._fetched
        unique, inverse, counts = torch.unique(slots, return_inverse=True, return_counts=True)
        where = inverse[:, None].expand(-1, 2)
        counts = counts[:, None]
        staged = {name: value[local].to(slots.device) for name, value in self._staged.items()}
        zeros = self.values["log_u"].new_zeros(len(unique), 2)
        log_u = staged["log_u"]
        # Compute the mean of u from logarithms. Subtract each sample's largest log u, so that exp does not overflow.
        top = (zeros - math.inf).scatter_reduce_(0, where, log_u, "amax")
        total = zeros.scatter_add(0, where, (log_u - top[inverse]).exp())
        self.values["log_u"][unique] = top + (total / counts).log()
        if self.step is not None:
            gradient = zeros.scatter_add(0, where, staged["tau_gradient"]) / counts
            self._step_tau(unique, gradient, self.step)
        self.samples += len(local)
        self._fetched = None
        self._staged = {}

    def _step_tau(self, slots: Tensor, gradient: Tensor, step: TauStep) -> None:
        """Take one step of Adam on the temperatures of these samples.

        A sample's temperatures are updated only when the sample is in a batch. Moments, step count and bias correction
        are therefore separate for each sample.
        """
        values = self.values
        gradient = gradient.clamp(-CLAMP, CLAMP)
        first = values["exp_avg"][slots].lerp(gradient, 1 - BETA1)
        second = BETA2 * values["exp_avg_sq"][slots] + (1 - BETA2) * gradient.square()
        steps = values["steps"][slots] + 1
        mean = first / (1 - BETA1 ** steps.double())[:, None]
        variance = second / (1 - BETA2 ** steps.double())[:, None]
        tau = values["tau"][slots] - step.lr * mean / (variance.sqrt() + EPS)
        values["exp_avg"][slots] = first
        values["exp_avg_sq"][slots] = second
        values["steps"][slots] = steps
        values["tau"][slots] = tau.clamp(step.low, step.high)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the samples that this rank owns."""
        return {"num_samples": self.num_samples, "samples": self.samples, "values": self.values}

    def load_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        """Restore the state from the state_dicts of all ranks that saved it, in rank order.

        The number of ranks may have changed since then, but neither the loss nor the data.
        """
        N, n, M = comm.size(self.group), comm.rank(self.group), len(parts)
        # When the state was saved, rank m of M owned the ids m, m + M, m + 2M and so on. Now this rank owns the ids
        # with id % N == n. Rank m owned some of this rank's ids only if m and n are equal modulo the greatest common
        # divisor of M and N. Parts without any of this rank's ids are not read.
        step = math.gcd(M, N)
        for m in range(n % step, M, step):
            part = parts[m]
            ids = torch.arange(m, self.num_samples, M)
            local = ids % N == n
            slots = ids[local] // N
            for name, value in self.values.items():
                value[slots.to(value.device)] = part["values"][name][local].to(value.device)
            self.samples = part["samples"]
