"""Find out whether the Triton kernels run on this machine, by running two of them."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch
from packaging.version import Version
from torch import Tensor

from disco_ds.losses.kernels.tiles import Precision, Tiling

FENCED = "3.7.1"
"""Oldest version of Triton that is used on compute capability 10 and higher. `lacks_fence` states why."""

logger = logging.getLogger(__name__)


def uses_triton(tiling: Tiling, x: Tensor) -> bool:
    """Return True if Triton should compute tiles from rows that have the device and dtype of x.

    Raises:
        ValueError: If `tiling.impl` is "triton" and Triton cannot run.
    """
    if tiling.impl == "torch" or x.dtype == torch.float64:
        return False
    if tiling.impl == "auto":
        return x.is_cuda and find_problem(x.device, tiling.precision) is None
    if not (x.is_cuda or _interprets()):
        raise ValueError(
            f"impl=triton needs the triton package and a GPU; the features are on {x.device}"
        )
    if x.is_cuda and (problem := find_problem(x.device, tiling.precision)):
        raise ValueError(f"impl=triton cannot run on {x.device}: {problem}")
    return True


@cache
def find_problem(device: torch.device, precision: Precision) -> str | None:
    """Return why the Triton kernels do not run on this GPU at this precision, or None if they run. Log the reason once.

    Having a GPU is not enough: Triton needs the system's C compiler to build its launcher, and the GPU may be too
    small or too new for a kernel.
    """
    problem = _find_problem(device, precision)
    if problem is None:
        return None
    logger.warning(
        "the Triton kernels do not run on %s (%s); the losses use torch instead, which is slower",
        device,
        problem,
    )
    return problem


def _find_problem(device: torch.device, precision: Precision) -> str | None:
    if find_spec("triton") is None:
        return "the triton package is not installed"
    import triton

    from disco_ds.losses.kernels import triton_tiles

    try:
        triton_tiles.try_out(device, precision)
        if lacks_fence(torch.cuda.get_device_capability(device), triton.__version__):
            return f"triton {triton.__version__} is too old for this GPU, which needs {FENCED} or later"
    # The compiler or the driver may raise any exception. Without Triton, the losses are slower but not wrong.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[-1]}"
    return None


def lacks_fence(capability: tuple[int, int], version: str) -> bool:
    """Return True if this version of Triton may compute wrong matrix products on a GPU of this compute capability.

    Before 3.7.1, Triton emits no fence between asynchronous copies and the matrix products that read the copied data.
    Wrong results were seen on compute capability 10, and none on 9. Source: triton issue 9610, pytorch issue 181248.
    """
    return capability >= (10, 0) and Version(version) < Version(FENCED)


def _interprets() -> bool:
    if find_spec("triton") is None:
        return False
    import triton

    return triton.knobs.runtime.interpret
