"""A digest of a model's weights."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def hash_weights(model: nn.Module) -> str:
    """Return a digest of the state_dict: names, dtypes, shapes and values of all parameters and persistent buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
