"""Assumptions of a plan: values that can be neither traced nor counted.

Import-light: the command line takes its defaults from here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """Values that a plan assumes; replace them with measured ones where you can."""

    slack: float = 0.05
    """Memory lost to fragmentation, as a fraction of all other memory."""
    context_gib: float = 1.0
    """GiB of each GPU for the CUDA context, NCCL's buffers and library workspaces."""
    image_bytes: int = 30_000
    """Bytes per compressed image, for recipes with image_staging=compressed."""
    num_samples: int | None = None
    """Number of samples in the data, for losses that keep state per sample; None if unknown."""
    text_tokens: float | None = None
    """Mean number of tokens of a text. It is used only if the text tower skips padding. None: read it from the shards
    if they are on this machine; otherwise, assume that all texts are as long as the model allows."""
    text_deviation: float | None = None
    """Standard deviation of the number of tokens of a text. None: half of text_tokens."""
    num_captions: int = 0
    """Number of captions from which text_tokens was read; 0 if it was given."""
    per_host: int = 8
    """GPUs per host."""
    efficiency: float | None = None
    """Achieved fraction of the GPU's nominal FLOP/s. None: the rates in plan/speed.py."""
    between_hosts: float = 25.0
    """GB/s that each GPU receives from other hosts; the default is 200 Gbit/s."""
