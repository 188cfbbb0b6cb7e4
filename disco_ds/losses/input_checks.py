"""Checks of the features that a user's training loop passes to a loss."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from disco_ds.distributed import comm

NORM_TOLERANCE = 0.02
"""A feature's norm may deviate from 1 by this much without a warning; rounding to bf16 causes up to 0.004."""
LARGEST_LOG = math.log(100.0) + 1e-3
"""Logarithm of CLIP's largest logit scale, 100, plus a small margin.

If a logit scale is not above this value, the caller has probably passed its logarithm by mistake.
"""


def check_tensors(**values: Any) -> None:
    """Check that arguments are tensors.

    Raises:
        ValueError: If an argument is not a tensor. The message begins with the argument's name.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} must be a tensor, got a {type(value).__module__}.{type(value).__qualname__}; "
                "pass a torch.Tensor"
            )


def check_alike(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    group_id: Tensor | None,
    group: Any = None,
    teacher: Sequence[Any] = (),
) -> None:
    """Check that all ranks pass the same kind of inputs. Collective: one small all_reduce.

    Without this check, ranks with different inputs would hang in a collective or compute a wrong loss.

    Args:
        image: Image features.
        text: Text features.
        scale: 0-d or [1], the logit scale.
        bias: 0-d or [1], the logit bias. None counts as 0.
        group_id: Group ids. Their values are not compared, only whether all ranks or none pass them.
        group: The process group; None: all ranks.
        teacher: The teachers' features, objects of base.Teacher.

    Raises:
        ValueError: On every rank, if the inputs of the ranks differ, or if features are not [b, D].
    """
    if comm.size(group) == 1:
        return
    mine = [*image.shape, *text.shape] if image.dim() == text.dim() == 2 else [-1] * 4
    teachers = hash(tuple((t.image.shape, t.text.shape) for t in teacher)) % 2**31
    numbers = torch.tensor([*mine, teachers, group_id is not None], device=image.device)
    learned = [scale, torch.zeros(1) if bias is None else bias]
    learned = [value.detach().to(numbers.device).reshape(1) for value in learned]
    values = torch.cat([numbers.double(), *learned])
    most, least = comm.all_reduce_max(torch.stack([values, -values]), group).tolist()
    *most, has_ids, scale_most, bias_most = most
    *least, all_have_ids, scale_least, bias_least = [-x for x in least]
    if most[4:] != least[4:]:
        raise ValueError(
            "the ranks pass different numbers of teachers, or teachers' features of different shapes; pass the "
            "features of the same teachers on every rank, for that rank's samples"
        )
    if -1 in mine or most != least:
        lower, upper = ([int(x) for x in shapes[:4]] for shapes in (least, most))
        raise ValueError(
            f"features of rank {comm.rank(group)} have the shapes {tuple(image.shape)} and "
            f"{tuple(text.shape)}, but all ranks need the same [b, D]; over all ranks, [image rows, "
            f"image width, text rows, text width] ranges from {lower} to {upper}; drop the last uneven batch "
            "(drop_last=True)"
        )
    if has_ids != all_have_ids:
        raise ValueError(
            "some ranks pass group_id and others do not; pass it on every rank or on none"
        )
    for name, smallest, largest in (
        ("scale", scale_least, scale_most),
        ("bias", bias_least, bias_most),
    ):
        # Different GPUs may round exp(log_scale) differently.
        if largest - smallest > 1e-5 * max(abs(smallest), abs(largest)):
            raise ValueError(
                f"the logit {name} differs between ranks, from {smallest:.7g} to {largest:.7g}, because its "
                f"gradient is not averaged over ranks; make the {name} a parameter of the wrapped module, and return "
                "it from the module's forward"
            )


def warn_of_unusual(image: Tensor, text: Tensor, scale: Tensor, group: Any = None) -> None:
    """Warn on rank 0 about features that are not unit rows, and about a logit scale that looks like a logarithm."""
    if comm.rank(group) > 0:
        return
    unit = True
    for name, rows in (("image", image), ("text", text)):
        worst = (rows.detach().float().norm(dim=-1) - 1).abs().max().item() if len(rows) else 0.0
        if worst > NORM_TOLERANCE:
            unit = False
            warn(
                f"{name} features are not normalized, and the loss depends on their norms: the norm of a row is "
                f"{worst:.2f} away from 1; normalize them with F.normalize(features, dim=-1)"
            )
    if unit and scale.item() <= LARGEST_LOG:
        warn(
            f"the logit scale is {scale.item():.2f}, which looks like a logarithm; pass "
            "logit_scale.exp(), which starts at 14.3 in CLIP and 10 in SigLIP"
        )


def warn(text: str) -> None:
    """Issue a warning that points to the line of the user's code that called torch or this package."""
    frame = sys._getframe()
    level = 1
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith(("torch.", "disco_ds.")):
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)
