"""Measure how long calls take on this device, and how fast the device multiplies matrices."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch


def median_ms(call: Callable[[], object], repeats: int, warmups: int = 3) -> float:
    """Return the median duration of a call in milliseconds. On a GPU, it is measured with CUDA events."""
    for _ in range(warmups):
        call()
    return statistics.median(
        _on_gpu(call) if torch.cuda.is_available() else _on_cpu(call) for _ in range(repeats)
    )


def _on_gpu(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


class Clock:
    """Records time marks and returns the times between them.

    On a GPU, a mark is a CUDA event in the current stream. Recording it does not make the host wait for the GPU.
    """

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def mark(self) -> None:
        if torch.cuda.is_available():
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def ms(self) -> list[float]:
        """Return the milliseconds from each mark to the next."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in pairwise(self.marks)]
        return [1000 * (b - a) for a, b in pairwise(self.marks)]


def matmul_tflops() -> float:
    """Return the TFLOP/s of torch's product of two random 8192 x 8192 fp16 matrices, as a reference for other rates.

    On a CPU, the matrices are small and in fp32.
    """
    size, dtype, device = (
        (8192, torch.float16, "cuda") if torch.cuda.is_available() else (256, torch.float32, "cpu")
    )
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: torch.mm(a, b), 20, warmups=10) / 1e9
