"""Recognize the errors that are raised when the accelerator is out of memory."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that torch, cuBLAS, cuDNN or NCCL could not allocate accelerator memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    texts = (
        "cuda out of memory",
        "cuda error: out of memory",
        "_status_alloc_failed",
        "failure 2 'out of memory'",
    )
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)
