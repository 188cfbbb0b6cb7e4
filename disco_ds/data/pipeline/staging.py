"""Where, and how many of, a rank's micro-batches wait on their way from the workers to the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disco_ds.config.data import Pixels

LEAST_AHEAD = 4
"""Number of micro-batches that are prefetched even if a step has fewer."""


@dataclass(frozen=True)
class Staging:
    """Resources that a rank's data may use, and where micro-batches are delivered."""

    pixels: Pixels = "device"
    """Where images wait between GradAccum's two passes: on the device, in buffers on the host, or compressed in the
    workers, which decode them twice."""
    device: torch.device | str = "cpu"
    """Where micro-batches are delivered."""
    ranks_here: int | None = None
    """Number of ranks on this host, which share the cache of remote shards; None: all ranks of the run."""
    cores: int = 2
    """CPU cores of this rank, which determine the default number of workers."""
    most_bytes: float = 2**40
    """Maximum size of the prefetch buffers, unless data.prefetch sets their number."""


def count_buffers(
    prefetch: int | None, num_micro_batches: int, pixels: Pixels, num_workers: int, most: int
) -> int:
    """Count the micro-batches that a rank holds on the host: the one in use, or a whole step, and the prefetched ones.

    Args:
        prefetch: Number of prefetched micro-batches. None: a whole step, because the workers would otherwise be idle
            during GradAccum's second pass.
        num_micro_batches: Micro-batches per rank and step.
        pixels: Where images wait between the passes.
        num_workers: Data workers; without any, nothing is prefetched.
        most: Maximum number of prefetched micro-batches if `prefetch` is None.
    """
    held = num_micro_batches if pixels == "host" else 1
    if not num_workers:
        return held
    if prefetch is None:
        prefetch = max(1, min(max(num_micro_batches, LEAST_AHEAD), most))
    return held + prefetch


def count_on_device(num_micro_batches: int, pixels: Pixels) -> int:
    """Count the micro-batches that a device holds: the one in use, or a whole step, and the one being copied."""
    return 1 + (num_micro_batches if pixels == "device" else 1)
