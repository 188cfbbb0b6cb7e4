"""What a plan assumes because it can be neither traced nor counted. Light: the command line takes its defaults here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """Figures that a plan takes as given; each may be replaced by one that was measured."""

    slack: float = 0.05
    """Fraction of all other memory that the allocator holds in pieces too small to use."""
    context_gib: float = 1.0
    """GiB of a GPU taken by CUDA's context, NCCL's buffers and the workspaces of libraries."""
    image_bytes: int = 30_000
    """Size of a compressed image, for recipes that hold those."""
    num_samples: int | None = None
    """Samples of the data, for losses that keep numbers of each; None: not known."""
    per_host: int = 8
    """GPUs of a host."""
    efficiency: float = 0.2
    """Fraction of the promised FLOP/s that is reached; DisCo-CLIP's Table 4 comes to this with ViT-B/32 on A100s."""
    between_hosts: float = 25.0
    """GB/s that a GPU receives from other hosts: 200 Gbit/s for each GPU."""
    save_rate: float = 1.0
    """GB/s at which all ranks together write a checkpoint."""
    copy_rate: float = 10.0
    """GB/s at which a GPU copies its part of a checkpoint to the host."""
    failure_hours: float | None = None
    """Mean time between two failures of the whole job; None: no save interval is planned."""
