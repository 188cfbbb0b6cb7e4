"""Inputs for the MFU metric: floating-point operations per sample, and the peak rate of the devices."""

from __future__ import annotations

import logging
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from disco_ds.distributed import comm
from disco_ds.models.clip import forward_on_meta, trained_sides
from disco_ds.models.gpus import recognize

logger = logging.getLogger(__name__)


def peak_samples_per_s(model: Any, peak_flops: float | None) -> float | None:
    """Return how many samples per second all ranks together would process at the devices' peak rate.

    Args:
        model: The model, before an engine wraps it.
        peak_flops: Peak FLOP/s of one device. None: look it up in gpus.py.

    Returns:
        Samples per second; None if the device is unknown or the operations cannot be counted.
    """
    accelerator = get_accelerator()
    if peak_flops is None and accelerator.device_name() == "cuda":
        gpu = recognize(torch.cuda.get_device_name())
        peak_flops = 1e12 * gpu.half if gpu else None
    if peak_flops is None:
        return None
    try:
        return comm.size() * peak_flops / count_flops(model)
    except Exception as error:  # a module may need real data, not only shapes
        if comm.rank() == 0:
            logger.warning(
                "MFU is not logged, because counting the model's operations failed: %s: %s",
                type(error).__name__,
                error,
            )
        return None


def count_flops(model: Any) -> int:
    """Count the floating-point operations of one sample's forward and backward.

    Only matrix multiplications and convolutions are counted. Operations that are recomputed in backward count only
    once. The model runs on tensors without data and is not changed.
    """
    from torch.utils.flop_counter import FlopCounterMode

    total = 0
    for side, trains in trained_sides(model).items():
        with FlopCounterMode(display=False) as counter:
            forward_on_meta(model, side)
        total += counter.get_total_flops() * (3 if trains else 1)
    return total
