"""Where and how many of a rank's micro-batches wait on their way from the workers to the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disco_ds.config.data import DataSettings, Pixels

LEAST_AHEAD = 4
"""Number of micro-batches prepared ahead even if a step has fewer."""


@dataclass(frozen=True)
class Staging:
    """What a rank's data may use of its host, and where they are delivered."""

    pixels: Pixels = "device"
    """Where images wait between GradAccum's passes: on the device, in the host's buffers, or compressed in the workers,
    which then decode them twice."""
    device: torch.device | str = "cpu"
    """Where micro-batches are delivered."""
    ranks_here: int | None = None
    """Number of ranks on this host, which share the cache of remote shards; None: all."""
    cores: int = 2
    """CPU cores of this rank, which determine the default number of workers."""
    most_bytes: float = 2**40
    """Limit on the size of the buffers ahead, unless data.prefetch sets their number."""


def count_workers(settings: DataSettings, cores: int) -> int:
    """Number of decoding processes of a rank; by default one core is left to the trainer."""
    return max(cores - 1, 1) if settings.workers is None else settings.workers


def count_buffers(
    prefetch: int | None, num_micro_batches: int, pixels: Pixels, num_workers: int, most: int
) -> int:
    """Number of micro-batches that a rank holds on the host: the one in use or all of the step, and those ahead.

    Args:    prefetch: number of those ahead; None: a whole step, since GradAccum's second pass reads none, but no more
             than `most`.
    """
    held = num_micro_batches if pixels == "host" else 1
    ahead = max(1, min(max(num_micro_batches, LEAST_AHEAD), most)) if prefetch is None else prefetch
    return held + (ahead if num_workers else 0)


def count_on_device(num_micro_batches: int, pixels: Pixels) -> int:
    """Number of micro-batches that a device holds: the one in use or all of the step, and the one being copied."""
    return 1 + (num_micro_batches if pixels == "device" else 1)
