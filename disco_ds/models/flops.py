"""Inputs for the MFU metric: floating-point operations per sample, and the peak rate of the devices."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch.func import functional_call

from disco_ds.distributed import comm
from disco_ds.models.clip import read_preprocessing, read_text_size, trained_sides
from disco_ds.models.gpus import recognize


def peak_samples_per_s(
    model: Any, peak_flops: float | None
) -> Callable[[float | None], float] | None:
    """Return a function that computes the samples per second of all ranks together at the devices' peak rate.

    Args:
        model: The model, before an engine wraps it.
        peak_flops: Peak FLOP/s of one device. None: look it up in gpus.py.

    Returns:
        A function that takes the mean number of tokens of a text, or None for the context length. It returns samples
        per second. None, instead of a function, if the device is unknown or the operations cannot be counted.
    """
    accelerator = get_accelerator()
    if peak_flops is None and accelerator.device_name() == "cuda":
        gpu = recognize(torch.cuda.get_device_name())
        peak_flops = 1e12 * gpu.half if gpu else None
    if peak_flops is None:
        return None
    rate = comm.size() * peak_flops
    try:
        whole, one = count_flops(model), count_flops(model, 1)
        context = read_text_size(model)[0]
    except Exception as error:  # a module may need real data, not only shapes
        comm.warn(
            "MFU is not logged, because counting the model's operations failed: "
            f"{type(error).__name__}: {error}"
        )
        return None

    def at(num_tokens: float | None) -> float:
        missing = 0 if num_tokens is None else context - num_tokens
        return rate / (whole - (whole - one) * missing / max(context - 1, 1))

    return at


def count_flops(model: Any, num_tokens: int | None = None) -> int:
    """Count the floating-point operations of one sample's forward and backward.

    Only matrix multiplications and convolutions are counted, without the attention of packed texts, which is about 1%
    of a text tower. Operations that are recomputed in backward count only once. The model runs on meta tensors, without
    compiling, and is not changed.

    Args:
        model: The model.
        num_tokens: Number of tokens of the text, for towers that do not compute padding. None: the context length.
    """
    from torch.utils.flop_counter import FlopCounterMode

    tensors = {
        name: each.detach().to("meta")
        for name, each in chain(model.named_parameters(), model.named_buffers())
    }
    image = torch.empty(1, 3, *read_preprocessing(model).size, device="meta")
    context = read_text_size(model)[0]
    text = torch.zeros(1, context, dtype=torch.long, device="meta")
    inputs = {"image": image, "text": image if model.two_views else text}
    total = 0
    for side, trains in trained_sides(model).items():
        given = {side: inputs[side], "lengths": np.array([num_tokens or context])}
        with (
            FlopCounterMode(display=False) as counter,
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            functional_call(model, tensors, args=(), kwargs=given)
        total += counter.get_total_flops() * (3 if trains else 1)
    return total
