"""Whether this machine computes in fp16: DeepSpeed refuses fp16.enabled on a processor that does not.

ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 hides it from every process of a test run, on a processor that does.
"""

from __future__ import annotations

import pytest
from deepspeed.accelerator import get_accelerator

HAS_FP16 = bool(get_accelerator().is_fp16_supported())

needs_fp16 = pytest.mark.skipif(not HAS_FP16, reason="this processor has no fp16")


def runnable(names: list[str]) -> list[str]:
    """Those of some cases that run here, by name."""
    return [name for name in names if HAS_FP16 or "fp16" not in name]
