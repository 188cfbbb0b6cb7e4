"""Where a rank's micro-batches wait on their way from the workers to the step, and how many may."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disco_ds.config.data import DataSettings, Pixels

LEAST_AHEAD = 4
"""Micro-batches that are prepared ahead however few a step has."""


@dataclass(frozen=True)
class Staging:
    """What a rank may take of its host for its data, and where they go."""

    pixels: Pixels = "device"
    """Where images wait between GradAccum's passes: on the device, in the buffers on the host, or compressed in the
    workers, which decode them twice."""
    device: torch.device | str = "cpu"
    """Where micro-batches are given out."""
    cores: int = 2
    """They decide how many workers there are by default."""
    most_bytes: float = 2**40
    """Limit of the buffers ahead, unless the settings say how many they are."""


def count_workers(settings: DataSettings, cores: int) -> int:
    """Decoding processes of a rank that has so many cores: one core is left to the trainer."""
    return max(cores - 1, 1) if settings.workers is None else settings.workers


def count_buffers(prefetch: int | None, num_micro_batches: int, pixels: Pixels, num_workers: int, most: int) -> int:
    """How many micro-batches a rank holds on the host: the one in use or the step's, and what is prepared ahead.

    Args:    prefetch: None: a whole step ahead, since GradAccum's second pass reads none, but no more than `most`.
    """
    held = num_micro_batches if pixels == "host" else 1
    ahead = max(1, min(max(num_micro_batches, LEAST_AHEAD), most)) if prefetch is None else prefetch
    return held + (ahead if num_workers else 0)


def count_on_device(num_micro_batches: int, pixels: Pixels) -> int:
    """How many micro-batches of images a device holds: the one in use or the step's, and the one under way."""
    return 1 + (num_micro_batches if pixels == "device" else 1)
