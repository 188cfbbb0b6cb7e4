"""Make the tests independent of the machine. This module is imported first.

- Ranks use the CPU, even on a machine with GPUs, unless DISCO_DS_TEST_DEVICE is `cuda`, as `make test-gpu` sets it.
- Tests marked `gpu` are skipped unless DISCO_DS_TEST_DEVICE is `cuda` or `cpu`.
- Variables that a launcher or a scheduler has set are removed, and local test servers are reached without a proxy.
- Tests of fp16 are skipped on a CPU without fp16, because DeepSpeed refuses it there. To test as on such a CPU, use
  `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 make test`.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SCHEDULED = ("SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")

for name in list(os.environ):
    if name in LAUNCHED or name.startswith(SCHEDULED):
        del os.environ[name]
DEVICE = os.environ.get("DISCO_DS_TEST_DEVICE", "")
"""Device of the tests that are marked `gpu`: "cuda", "cpu", or "" to skip them."""
if DEVICE not in ("", "cpu", "cuda"):
    raise ValueError(f"DISCO_DS_TEST_DEVICE is {DEVICE}; it may be cuda or cpu")
if DEVICE == "cuda" and not torch.cuda.is_available():
    DEVICE = ""
os.environ["DS_ACCELERATOR"] = "cuda" if DEVICE == "cuda" else "cpu"
direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
os.environ["no_proxy"] = f"127.0.0.1,localhost,{direct}"


def _has_fp16() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())


HAS_FP16 = _has_fp16()

needs_fp16 = pytest.mark.skipif(not HAS_FP16, reason="this processor has no fp16")


@contextmanager
def many_open_files() -> Iterator[None]:
    """Make new file descriptors in the block larger than 1,023, which select() cannot handle."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 4096), limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def runnable(names: list[str]) -> list[str]:
    """Return the cases that can run on this machine."""
    return [name for name in names if HAS_FP16 or "fp16" not in name]
