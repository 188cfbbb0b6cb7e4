"""GPUs by name: memory as torch reports it, and the rates of the data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Gpu:
    name: str
    gib: float
    device: str = ""
    """Pattern of the name in torch, after NVIDIA and GeForce."""
    half: float = 0.0
    """TFLOP/s of dense products in bf16 or fp16 with fp32 sums; 0: unknown."""
    tf32: float = 0.0
    fp32: float = 0.0
    link: float = 0.0
    """GB/s that it receives from the other GPUs of its host."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40G", 39.4, "A100-(SXM4|PCIE)-40GB", 312, 156, 19.5, 300),
        Gpu("A100-80G", 79.1, "A100(-SXM4-80GB| 80GB PCIe)", 312, 156, 19.5, 300),
        Gpu("H100-80G", 79.1, "H100 80GB HBM3", 989, 494, 67, 450),
        Gpu("H100-PCIe", 79.1, "H100 PCIe", 756, 378, 51, 64),
        Gpu("H100-NVL", 93.0, "H100 NVL", 835, 418, 60, 64),
        Gpu("H200", 139.8, "H200", 989, 494, 67, 450),
        Gpu("GH200-96G", 94.5, "GH200 480GB", 989, 494, 67, 450),
        Gpu("B200", 178.3, "B200", 2250, 1125, 75, 900),
        Gpu("L4", 22.0, "L4", 121, 60, 30.3, 32),
        Gpu("L40S", 44.4, "L40S", 362, 183, 91.6, 32),
        Gpu("A10G", 22.0, "A10G", 70, 35, 35, 32),
        Gpu("RTX-4090", 23.5, "RTX 4090", 165, 82.6, 82.6, 32),
        Gpu("RTX-3090", 23.5, "RTX 3090", 71, 35.6, 35.6, 32),
    )
}
"""Rates of the makers' data sheets, without sparsity. A link of 32 is PCIe 4 and one of 64 is PCIe 5, because NVLink
bridges join only a few cards."""


def recognise(device: str) -> Gpu | None:
    """The GPU of this name in torch; None if it is unknown, or only a part or variant of a known one."""
    found = (gpu for gpu in GPUS.values() if re.fullmatch(rf"(NVIDIA )?(GeForce )?({gpu.device})", device))
    return next(found, None)


def find_gpu(text: str, tflops: float | None = None, link: float | None = None) -> Gpu:
    """A GPU of GPUS by name, or one of so many GiB; tflops (of all products) and link replace its own rates.

    Raises: ValueError for another name, or a memory that is not positive.
    """
    known = {name.lower(): gpu for name, gpu in GPUS.items()}
    try:
        gpu = known[text.lower()] if text.lower() in known else Gpu(f"{float(text):g} GiB", float(text))
    except ValueError:
        # Here, since the parsers import this file for the names, and import no settings for a --help.
        from disco_ds.config.hints import did_you_mean

        hint = did_you_mean(text, GPUS)
        raise ValueError(f"--gpu-memory {text}: a number of GiB, or one of {', '.join(GPUS)}{hint}") from None
    if not 0 < gpu.gib < float("inf"):
        raise ValueError(f"--gpu-memory {text}: the memory of a GPU is a positive number of GiB")
    if tflops is not None:
        gpu = replace(gpu, half=tflops, tf32=tflops, fp32=tflops)
    return gpu if link is None else replace(gpu, link=link)
