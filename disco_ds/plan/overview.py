"""The plan of a run as one value: memory, time of a step, and both at other numbers of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from disco_ds.config import Config
from disco_ds.models.gpus import Gpu, find_gpu
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.fit import fit
from disco_ds.plan.interval import SaveInterval, plan_interval
from disco_ds.plan.memory import GIB, Memory, plan_memory
from disco_ds.plan.speed import Rates, Speed, plan_speed
from disco_ds.plan.towers import Towers, trace


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a step at one number of GPUs."""

    ranks: int
    num_micro_batches: int
    memory: Memory
    speed: Speed | None
    """None where the GPU's rates are not known."""


@dataclass(frozen=True)
class Plan:
    """What a run will need; the figures are of a step, with `assumed` for what cannot be counted."""

    config: Config
    """The recipe, with `largest` the one that was found."""
    gpu: Gpu
    assumed: Assumptions
    towers: Towers
    now: Estimate
    """At the number of GPUs that was asked for."""
    scaling: tuple[Estimate, ...]
    """At that number and at powers of two from an eighth of it to eight times as many, where they divide the batch."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory of the GPU."""
        return self.now.memory.total <= self.gpu.gib * GIB

    @property
    def interval(self) -> SaveInterval | None:
        """How often to save; None unless a time between failures is assumed."""
        if self.assumed.failure_hours is None:
            return None
        return plan_interval(self.config, self.now.ranks, self.towers, self.assumed)

    @property
    def ranks_per_host(self) -> int:
        return min(self.now.ranks, self.assumed.per_host)

    @property
    def host_bytes(self) -> int:
        """Memory of a host for all its ranks, beside Python and its libraries."""
        return self.ranks_per_host * sum(self.now.memory.host.values())


def plan_run(
    config: Config,
    ranks: int | None = None,
    gpu: str | Gpu = "A100-80G",
    assumed: Assumptions | None = None,
    largest: bool = False,
    host_gib: float | None = None,
) -> Plan:
    """Plan the memory and the speed of a run, without a GPU: its towers are traced on tensors that have no memory.

    Args:   ranks: number of GPUs (default: the recipe's ranks, else 1); gpu: a name or GiB, as `disco-ds plan` takes
            it; assumed: what can be neither traced nor counted; largest: search the largest global batch that fits,
            over micro-batches, activation checkpointing and, with host_gib, where the pixels wait; host_gib: GiB of
            memory of a host.
    Raises: ValueError for a batch that the ranks do not divide, a model that cannot be traced, a loss whose cost is
            not known, or with `largest` where nothing fits.

    Example:
        >>> from disco_ds import load_config, plan_run
        >>> plan = plan_run(load_config("quickstart"), ranks=2, gpu="RTX-4090")
        >>> plan.fits, plan.now.num_micro_batches, plan.now.memory.peak
        (True, 1, 'backward')
    """
    chosen = find_gpu(gpu) if isinstance(gpu, str) else gpu
    ranks, assumed = ranks or config.ranks or 1, assumed or Assumptions()
    if largest:
        config = fit(config, ranks, chosen.gib, host_gib, assumed)
    known = config.data.num_samples if config.data.source == "synthetic" else assumed.num_samples
    config = config.with_steps(known) if known else config
    config.num_micro_batches(ranks)  # raises where the batch does not divide, before the trace
    towers = trace(config, config.micro_batch)
    # The recipe may fix its ranks, which would refuse all other numbers.
    free, rates = config.model_copy(update={"ranks": None}), Rates(chosen, assumed)

    def estimate(n: int) -> Estimate:
        memory, speed = plan_memory(free, n, towers, assumed), plan_speed(free, n, towers, rates)
        return Estimate(n, free.num_micro_batches(n), memory, speed)

    # Up to 1,024 GPUs.
    others = {n for n in (2**i for i in range(11)) if ranks / 8 <= n <= 8 * ranks}
    possible = [n for n in sorted({ranks, *others}) if config.global_batch % (n * config.micro_batch) == 0]
    scaling = tuple(estimate(n) for n in possible)
    return Plan(config, chosen, assumed, towers, scaling[possible.index(ranks)], scaling)
