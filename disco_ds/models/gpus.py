"""Known GPUs: their memory as torch reports it, and their rates from the data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40G", 39.4, "A100-SXM4-40GB", 312, 19.5, 300),
        Gpu("A100-80G", 79.1, "A100-SXM4-80GB", 312, 19.5, 300),
        Gpu("A100-PCIe-40G", 39.4, "A100-PCIE-40GB", 312, 19.5, 32),
        Gpu("A100-PCIe", 79.1, "A100 80GB PCIe", 312, 19.5, 32),
        Gpu("H100-80G", 79.1, "H100 80GB HBM3", 989, 67, 450),
        Gpu("H100-PCIe", 79.1, "H100 PCIe", 756, 51, 64),
        Gpu("H100-NVL", 93.0, "H100 NVL", 835, 60, 64),
        Gpu("H200", 139.8, "H200", 989, 67, 450),
        Gpu("GH200-96G", 94.5, "GH200 480GB", 989, 67, 450),
        Gpu("B200", 178.3, "B200", 2250, 75, 900),
        Gpu("L4", 22.0, "L4", 121, 30.3, 32),
        Gpu("L40S", 44.4, "L40S", 362, 91.6, 32),
        Gpu("A10G", 22.0, "A10G", 70, 35, 32),
        Gpu("RTX-4090", 23.5, "RTX 4090", 165, 82.6, 32),
        Gpu("RTX-3090", 23.5, "RTX 3090", 71, 35.6, 32),
    )
}
"""Known GPUs by name. Rates are from data sheets, without sparsity. A link rate of 32 GB/s means PCIe 4, and 64 GB/s
means PCIe 5. NVLink bridges are not counted, because they connect only a few cards."""


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
