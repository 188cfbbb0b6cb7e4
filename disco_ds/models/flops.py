"""The two sides of MFU: floating-point operations per sample, and the peak rate of the devices."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.func import functional_call

from disco_ds.distributed import comm
from disco_ds.models.clip import read_preprocessing, read_text_size, trained_sides
from disco_ds.models.gpus import recognise

logger = logging.getLogger(__name__)


def peak_samples_per_s(model: Any, peak_flops: float | None) -> float | None:
    """Samples per second of all ranks if their devices did nothing but the model's operations, at their peak rate.

    Args:    model: open_clip's, before an engine has it; peak_flops: of one device, None: from gpus.py.
    Returns: None if the device is not known, or the operations cannot be counted.
    """
    accelerator = get_accelerator()
    if peak_flops is None and accelerator.device_name() == "cuda":
        gpu = recognise(torch.cuda.get_device_name())
        peak_flops = 1e12 * gpu.half if gpu else None
    if peak_flops is None:
        return None
    try:
        return comm.size() * peak_flops / count_flops(model)
    except Exception as error:  # a module may need real data, not only shapes
        if comm.rank() == 0:
            logger.warning("no MFU: the model's operations could not be counted: %s: %s", type(error).__name__, error)
        return None


def count_flops(model: Any) -> int:
    """Floating-point operations of one sample's forward and backward, without those that are recomputed.

    Counts matrix products and convolutions, on tensors without data; the model is not changed.
    """
    from torch.utils.flop_counter import FlopCounterMode

    total = 0
    for side, trains in trained_sides(model).items():
        counter = FlopCounterMode(display=False)
        with counter:
            forward_on_meta(model, side)
        total += counter.get_total_flops() * (3 if trains else 1)
    return total


def forward_on_meta(model: Any, side: str) -> None:
    """Run one sample through one side, "image" or "text", on tensors without data; nothing is compiled."""
    tensors = {name: each.detach().to("meta") for name, each in chain(model.named_parameters(), model.named_buffers())}
    image = torch.empty(1, 3, *read_preprocessing(model).size, device="meta")
    text = torch.zeros(1, read_text_size(model)[0], dtype=torch.long, device="meta")
    inputs = {"image": image, "text": image if model.two_views else text}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        functional_call(model, tensors, args=(), kwargs={side: inputs[side]})
