"""Settings for the buffers between a rank's data workers and its training step: how many, and in which memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disco_ds.config.data import Pixels

LEAST_AHEAD = 4
"""Minimum for the default number of micro-batches to prefetch. It applies if a step has fewer micro-batches."""


@dataclass(frozen=True)
class Staging:
    """Resources that a rank's data loading may use, and the device to which micro-batches are delivered."""

    pixels: Pixels = "device"
    """Where images are kept between GradAccum's two passes: "device" on the device, "host" in buffers on the host, or
    "compressed" in the workers, which decode them twice."""
    device: torch.device | str = "cpu"
    """Device to which micro-batches are delivered."""
    ranks_here: int | None = None
    """Number of ranks on this host. They share the host's cache of remote shards. None means that all ranks of the run
    are on this host."""
    cores: int = 2
    """Number of CPU cores available to this rank. It determines the default number of workers."""
    most_bytes: float = 2**40
    """Maximum total size in bytes of the prefetch buffers. Ignored if data.prefetch sets the number of buffers."""


def count_buffers(
    prefetch: int | None, num_micro_batches: int, pixels: Pixels, num_workers: int, most: int
) -> int:
    """Return the number of micro-batch buffers that a rank needs on the host.

    These are the buffers in use (all micro-batches of a step if pixels is "host", otherwise one) plus the buffers for
    prefetched micro-batches.

    Args:
        prefetch: Number of micro-batches to prefetch. None selects the number of micro-batches in a step, so that the
            workers are not idle during GradAccum's second pass, but at least LEAST_AHEAD and at most `most`.
        num_micro_batches: Number of micro-batches per rank in each step.
        pixels: Where images are kept between GradAccum's two passes.
        num_workers: Number of data workers. If it is 0, nothing is prefetched.
        most: Maximum number of micro-batches to prefetch if `prefetch` is None.
    """
    held = num_micro_batches if pixels == "host" else 1
    if not num_workers:
        return held
    if prefetch is None:
        prefetch = max(1, min(max(num_micro_batches, LEAST_AHEAD), most))
    return held + prefetch


def count_on_device(num_micro_batches: int, pixels: Pixels) -> int:
    """Return the number of micro-batch buffers that a rank needs on its device.

    These are the buffers in use (all micro-batches of a step if pixels is "device", otherwise one) plus one buffer for
    the micro-batch being copied.
    """
    return 1 + (num_micro_batches if pixels == "device" else 1)
