"""Teachers' soft targets: metrics for all losses, and cross-entropy for losses that compute whole rows of logits."""

# b local batch, B global batch, N ranks

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.losses.base import Embeddings, Loss, Teacher
from disco_ds.losses.kernels import full_dtype

SAMPLE = 128
"""teacher_agreement is computed on this number of pairs, with the same number (at least 1) from every rank."""


def teacher_metrics(embeddings: Embeddings, parts: Tensor, group: Any) -> dict[str, Tensor]:
    """Return the metrics of a loss with teachers. Their means over ranks are the global values. Collective.

    Args:
        embeddings: Features of this rank.
        parts: [2] or [3], this rank's shares of the loss of the pairs, the cross-entropy with the teachers' targets
            and, optionally, KL(teacher, student), averaged over the teachers.
        group: The process group; None: all ranks.

    Returns:
        pair_loss and teacher_loss. If `parts` has three entries, also teacher_kl and teacher_agreement: the fraction of
        images for which the student and the teachers choose the same text, among the first SAMPLE / N pairs of every
        rank.
    """
    names = ("pair_loss", "teacher_loss", "teacher_kl")
    found = dict(zip(names, parts.unbind(), strict=False))
    if "teacher_kl" not in found:
        return found
    with torch.no_grad():
        count = min(len(embeddings.image), max(SAMPLE // comm.size(group), 1))
        student = _gather_logits(embeddings, count, group)
        probabilities = sum(
            _gather_logits(teacher, count, group).softmax(1) for teacher in embeddings.teacher
        )
        assert isinstance(probabilities, Tensor)
        agree = student.argmax(1) == probabilities.argmax(1)
        found["teacher_agreement"] = agree.double().mean()
    return found


def _gather_logits(features: Embeddings | Teacher, count: int, group: Any) -> Tensor:
    """Return the logits of the first `count` pairs of every rank, [N count, N count] in fp32. Collective."""
    image, text = (x[:count].detach().float() for x in (features.image, features.text))
    sides = comm.gather(image, group), comm.gather(text, group)
    return features.scale.detach().float() * (sides[0] @ sides[1].T)


def add_teacher_loss(
    loss: Tensor,
    logits: Sequence[Tensor],
    embeddings: Embeddings,
    rows: slice,
    settings: Loss,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the weighted mean of the loss of the pairs and the cross-entropy with the teachers' targets. Collective.

    Args:
        loss: The loss of the pairs, 0-d.
        logits: [n, B] each: the logits of n images with all texts, and of the n texts of the same pairs with all
            images.
        embeddings: Features of this rank.
        rows: The range of these n pairs in the global batch.
        settings: Provides the process group and teacher_weight, the weight of the cross-entropy. The weight of `loss`
            is 1 - teacher_weight.

    Returns:
        The weighted mean, and the result of teacher_metrics. Without teachers, `loss` and an empty dict.
    """
    if not embeddings.teacher:
        return loss, {}
    assert settings.teacher_weight is not None
    group: Any = settings.group
    targets = [torch.zeros_like(x) for x in logits]
    entropy = torch.zeros_like(loss.detach())
    for teacher in embeddings.teacher:
        dtype = full_dtype(teacher.image)
        image, text = (
            comm.gather(x.detach(), group).to(dtype) for x in (teacher.image, teacher.text)
        )
        with torch.autocast(image.device.type, enabled=False):  # autocast would multiply in 16 bits
            for target, mine, others in zip(targets, (image, text), (text, image), strict=True):
                found = (teacher.scale.detach() * (mine[rows] @ others.T)).softmax(1)
                target += found / len(embeddings.teacher)
                entropy -= torch.special.xlogy(found, found).sum(1).mean().detach()
    losses = [F.cross_entropy(x, p) for x, p in zip(logits, targets, strict=True)]
    cross_entropy = (losses[0] + losses[1]) / 2
    entropy /= 2 * len(embeddings.teacher)
    parts = torch.stack([loss, cross_entropy, cross_entropy - entropy]).detach()
    total = loss + settings.teacher_weight * (cross_entropy - loss)
    return total, teacher_metrics(embeddings, parts, group)
