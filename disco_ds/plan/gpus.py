"""GPUs by name: memory as torch reports it, and what their makers promise."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Gpu:
    name: str
    gib: float
    half: float = 0.0
    """FLOP/s of dense products in bf16 or fp16, with fp32 sums; 0: not known."""
    tf32: float = 0.0
    full: float = 0.0
    """In fp32."""
    link: float = 0.0
    """Bytes/s that a GPU receives from the others of its host."""

    def rate(self, precision: str) -> float:
        return {"fp32": self.full, "tf32": self.tf32}.get(precision, self.half)


def _gpu(name: str, gib: float, half: float, tf32: float, full: float, link: float) -> Gpu:
    """Rates in TFLOP/s, the link in GB/s."""
    return Gpu(name, gib, half * 1e12, tf32 * 1e12, full * 1e12, link * 1e9)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40G", 39.4, 312, 156, 19.5, 300),
        _gpu("A100-80G", 79.1, 312, 156, 19.5, 300),
        _gpu("H100-80G", 79.1, 989, 494, 67, 450),
        _gpu("H200", 139.8, 989, 494, 67, 450),
        _gpu("L4", 22.0, 121, 60, 30.3, 32),
        _gpu("A10G", 22.0, 70, 35, 35, 32),
        _gpu("RTX-4090", 23.5, 165, 82.6, 82.6, 32),
        _gpu("RTX-3090", 23.5, 71, 35.6, 35.6, 32),
    )
}
"""Data sheets of the makers (dense, without sparsity); a link of 32 is PCIe 4."""


def find_gpu(text: str, tflops: float | None = None, link: float | None = None) -> Gpu:
    """A GPU of GPUS, or one of so many GiB; tflops (16-bit products) and link (GB/s) replace what it has.

    Raises: ValueError for another name, or a memory that is not positive.
    """
    try:
        gpu = Gpu(f"{float(text):g} GiB", float(text))
    except ValueError:
        known = {name.lower(): name for name in GPUS}
        if text.lower() not in known:
            close = difflib.get_close_matches(text.lower(), known, n=1, cutoff=0.4)
            hint = f"did you mean {known[close[0]]}? " if close else ""
            raise ValueError(f"--gpu {text}: {hint}a number of GiB, or one of {', '.join(GPUS)}") from None
        gpu = GPUS[known[text.lower()]]
    if not 0 < gpu.gib < float("inf"):
        raise ValueError(f"--gpu {text}: the memory of a GPU is a positive number of GiB")
    if tflops is not None:
        gpu = replace(gpu, half=tflops * 1e12, tf32=gpu.tf32 or tflops * 1e12 / 2, full=gpu.full or tflops * 1e12 / 16)
    return gpu if link is None else replace(gpu, link=link * 1e9)
