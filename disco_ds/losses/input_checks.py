"""Whether the features of all ranks fit together: asked before a collective that would hang, or return nonsense."""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from disco_ds.distributed import comm

NORM_TOLERANCE = 0.02
"""How far from 1 the norm of a feature may be: bf16 rounds to 0.004."""
LARGEST_LOG = math.log(100.0) + 1e-3
"""The logarithm of the largest scale that CLIP's training allows. A scale that is trained is hardly ever so small."""


def check_alike(image: Tensor, text: Tensor, group: Any = None, step: int = 0) -> None:
    """Compare what every rank is about to put in. Collective, one small all_reduce and a wait for it.

    Args:   step: a count of this rank's steps; a rank that has left one out is found by it.
    Raises: ValueError on every rank alike where shapes or steps differ.
    """
    if comm.size(group) == 1:
        return
    mine = [*image.shape, *text.shape] if image.dim() == text.dim() == 2 else [-1] * 4
    both = torch.tensor([[*mine, step], [-x for x in (*mine, step)]], device=image.device)
    most, least = comm.all_reduce_max(both, group).tolist()
    least = [-x for x in least]
    if most[4] != least[4]:
        raise ValueError(
            f"rank {comm.rank(group)} is at step {step}, all are at {least[4]} to {most[4]}: a rank has left one "
            "out, and what they train is not one model"
        )
    if -1 in mine or most != least:
        raise ValueError(
            f"features of rank {comm.rank(group)} are {tuple(image.shape)} and {tuple(text.shape)}; all ranks need the "
            f"same [b, D], and have {least[:4]} to {most[:4]}: drop the last uneven batch (drop_last=True)"
        )


def warn_of_unusual(image: Tensor, text: Tensor, scale: Tensor, group: Any = None) -> None:
    """Warn, on rank 0, of features that are not unit rows, or a scale that is rather its logarithm; some mean it."""
    if comm.rank(group) > 0:
        return
    unit = True
    for name, rows in (("image", image), ("text", text)):
        worst = (rows.detach().float().norm(dim=-1) - 1).abs().max().item() if len(rows) else 0.0
        if worst > NORM_TOLERANCE:
            unit = False
            warn(
                f"{name} features are not normalized (a norm is {worst:.2f} away from 1): the loss then depends on "
                "their lengths; F.normalize(features, dim=-1) makes unit rows"
            )
    if unit and scale.item() <= LARGEST_LOG:
        warn(
            f"the logit scale is {scale.item():.2f}, which is rather its logarithm: pass logit_scale.exp(), which CLIP "
            "begins at 14.3 and SigLIP at 10"
        )


def warn(text: str) -> None:
    """Warn at the line of the user's code that torch or this package was called from."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in (
        "torch",
        "disco_ds",
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
