"""Known GPUs: their memory as torch reports it, and their rates from the data sheets."""

import re
from dataclasses import dataclass, replace

from disco_ds.config import PACKAGE
from disco_ds.config.recipe_yaml import read_settings
from disco_ds.names import did_you_mean


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    gib: float
    """Memory in GiB, as torch reports it."""
    device: str = ""
    """Regular expression for the name that torch reports, without "NVIDIA" and "GeForce"."""
    half: float = 0.0
    """TFLOP/s of dense matrix multiplications in bf16 or fp16 with fp32 accumulation; 0: unknown."""
    fp32: float = 0.0
    """TFLOP/s of dense matrix multiplications in fp32."""
    link: float = 0.0
    """GB/s that the GPU can receive from the other GPUs of its host."""


_TABLE = read_settings(PACKAGE / "assets" / "gpus.yaml", "table")
GPUS = {name: Gpu(name, **row) for name, row in _TABLE.items()}


def recognize(device: str) -> Gpu | None:
    """Return the GPU that torch reports under this name. None for unknown GPUs, MIG slices and other variants."""
    found = (
        gpu
        for gpu in GPUS.values()
        if re.fullmatch(rf"(NVIDIA )?(GeForce )?({gpu.device})", device)
    )
    return next(found, None)


def find_gpu(text: str, tflops: float | None = None, link: float | None = None) -> Gpu:
    """Return the known GPU with this name, or an unnamed GPU with this amount of memory.

    Args:
        text: Name of a known GPU, or an amount of memory in GiB.
        tflops: Replaces the TFLOP/s in all precisions.
        link: Replaces the link rate, in GB/s.

    Raises:
        ValueError: If `text` is neither the name of a known GPU nor a positive number.
    """
    known = {name.lower(): gpu for name, gpu in GPUS.items()}
    try:
        gpu = known.get(text.lower()) or Gpu(f"{float(text):g} GiB", float(text))
    except ValueError:
        hint = did_you_mean(text, GPUS)
        raise ValueError(
            f"--gpu-memory {text}: expected a number of GiB, or one of {', '.join(GPUS)}{hint}"
        ) from None
    if not 0 < gpu.gib < float("inf"):
        raise ValueError(f"--gpu-memory {text}: expected a positive number of GiB")
    if tflops is not None:
        gpu = replace(gpu, half=tflops, fp32=tflops)
    return gpu if link is None else replace(gpu, link=link)
