"""The plan of a run: memory and time of a step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from disco_ds.config import Config
from disco_ds.data import Source, count_epoch, load_sources
from disco_ds.models.gpus import Gpu, find_gpu
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.fit import Batch, fit, with_stage
from disco_ds.plan.memory import GIB, Memory, known_samples, plan_memory
from disco_ds.plan.speed import Speed, plan_speed
from disco_ds.plan.text_tokens import read_text_tokens
from disco_ds.plan.towers import Towers, trace


@dataclass(frozen=True)
class Plan:
    """Memory and time that one step of a run will need."""

    config: Config
    """The recipe, including the settings that the search of plan_run has found."""
    ranks: int
    gpu: Gpu
    assumed: Assumptions
    memory: Memory
    speed: Speed | None
    """Times of a step; None if the GPU's FLOP/s or the bandwidth of its link is unknown."""
    towers: Towers
    """What the towers need for a micro-batch."""

    @property
    def fits(self) -> bool:
        """Whether the predicted peak memory fits in the memory of the GPU."""
        return self.memory.total <= self.gpu.gib * GIB

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on a host: one for each of its GPUs, but not more than the run has."""
        return min(self.ranks, self.assumed.per_host)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the ranks on one host need together, without Python and its libraries."""
        return self.ranks_per_host * sum(self.memory.host.values())


def plan_run(
    config: Config,
    ranks: int | None = None,
    gpu: str | Gpu = "A100-80G",
    assumed: Assumptions | None = None,
    search: Batch | None = None,
    host_gib: float | None = None,
) -> Plan:
    """Plan the memory and speed of a run without a GPU, by tracing its towers on fake tensors.

    Args:
        config: The recipe.
        ranks: Number of GPUs; by default the recipe's ranks, or 1.
        gpu: A GPU, its name, or its memory in GiB, as for `disco-ds plan --gpu-memory`.
        assumed: Assumptions of the plan. None: the defaults of Assumptions.
        search: None plans the recipe as it is. "same" searches for the fastest settings for the recipe's global batch.
            "largest" searches for the largest global batch that fits, or for a slightly smaller one that is faster.
        host_gib: Memory of a host in GiB. If it is given, the search also varies image_staging.

    Raises:
        ValueError: If the batch cannot be divided evenly among the ranks, the model cannot be traced,
            the cost of the loss is unknown, or, with `search`, nothing fits.

    Example:
        >>> from disco_ds import load_config, plan_run
        >>> plan = plan_run(load_config("quickstart"), ranks=2, gpu="RTX-4090")
        >>> plan.fits, plan.memory.peak
        (True, 'backward')
    """
    chosen = find_gpu(gpu) if isinstance(gpu, str) else gpu
    ranks = ranks or config.ranks or 1
    if search != "largest":
        config.num_micro_batches(ranks)  # raises before the trace if the batch is invalid
    assumed = assumed or Assumptions()
    is_complete = assumed.num_samples is not None and assumed.text_tokens is not None
    sources = [] if is_complete else find_sources(config)
    epoch_samples = 0
    if sources and assumed.num_samples is None:
        epoch_samples = count_epoch(config.data, sources)
        assumed = replace(assumed, num_samples=sum(source.num_samples for source in sources))
    assumed = read_text_tokens(config, assumed, sources)
    if search:
        config, towers = fit(config, ranks, chosen, host_gib, assumed, search)
    else:
        towers = trace(config, config.micro_batch, assumed=assumed)
    if epoch_samples := epoch_samples or known_samples(config, assumed.num_samples):
        config = config.with_samples(epoch_samples)
    memory = plan_memory(config, ranks, towers, assumed)
    speed = plan_speed(config, ranks, towers, chosen, assumed)
    return Plan(config, ranks, chosen, assumed, memory, speed, towers)


def lowest_stage(made: Plan) -> tuple[int, float | None] | None:
    """Find the lowest ZeRO stage at which the recipe fits. Lower stages have fewer collectives and fewer kernels.

    Returns:
        None if the recipe fits at no stage. Otherwise the stage, and a ratio: the time of the recipe's step divided by
        the time of a step at that stage. The ratio is None if the times are unknown.
    """
    for level in range(4):
        config = with_stage(made.config, level)
        with suppress(ValueError):  # the recipe has settings that this stage does not support
            memory = plan_memory(config, made.ranks, made.towers, made.assumed)
            if memory.total <= made.gpu.gib * GIB:
                speed = plan_speed(config, made.ranks, made.towers, made.gpu, made.assumed)
                factor = made.speed.step_s / speed.step_s if made.speed and speed else None
                return level, factor
    return None


def find_sources(config: Config) -> list[Source]:
    """Load the sources of the recipe. Return an empty list if this machine cannot read the data."""
    # The manifest of remote shards is a local file. Without it, the bucket would have to be listed.
    if any("://" in str(part.shards) and not part.manifest for part in config.data.parts):
        return []
    with suppress(ValueError, OSError):
        return load_sources(config.data)
    return []
