"""The metrics of losses with teachers."""

# b local batch, N ranks

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.losses.base import Embeddings, Teacher

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
