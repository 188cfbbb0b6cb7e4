"""InfoNCE for losses that compute whole rows of the matrix of logits: `clip` and `disco`."""

# b local batch, B global batch, n rows of logits

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.losses.base import (
    TIE,
    Embeddings,
    Loss,
    LossOutput,
    Teacher,
    check_teacher_weight,
    global_metrics,
)
from disco_ds.losses.kernels import full_dtype
from disco_ds.losses.teacher import teacher_metrics


class WholeRowsLoss(Loss):
    """Base class of losses that compute whole rows of the matrix of logits.

    Args:
        group: The process group; None: all ranks.
        teacher_weight: Weight of the targets of the teachers in Embeddings.teacher, from 0 to 1; the weight of the
            pairs is 1 - teacher_weight. None: there is no teacher. See docs/losses.md section 9.

    Raises:
        ValueError: If teacher_weight is not from 0 to 1.
    """

    def __init__(self, group: Any = None, teacher_weight: float | None = None):
        super().__init__()
        self.group = group
        self.teacher_weight = check_teacher_weight(teacher_weight)

    def compute(
        self, embeddings: Embeddings, logits_image: Tensor, logits_text: Tensor, own: slice
    ) -> LossOutput:
        """Compute the loss and the metrics of n pairs. Collective.

        Args:
            embeddings: Features of this rank.
            logits_image: [n, B], the logits of the images of these pairs with all texts.
            logits_text: [n, B], the logits of the texts of these pairs with all images.
            own: The range of these pairs in the global batch.
        """
        both = logits_image, logits_text
        labels = torch.arange(own.start, own.stop, device=logits_image.device)
        loss = _cross_entropy(both, (labels, labels))
        others = {}
        if self.teacher_weight:
            targets, entropy = self._find_targets(embeddings.teacher, both, own)
            of_teachers = _cross_entropy(both, targets)
            parts = torch.stack([loss, of_teachers, of_teachers - entropy]).detach()
            others = teacher_metrics(embeddings, parts, self.group)
            loss = loss + self.teacher_weight * (of_teachers - loss)
        with torch.no_grad():
            hits = [self._count_hits(logits, labels, embeddings.scale) for logits in both]
            metrics = global_metrics(loss, hits, len(labels), self.group, others)
        return LossOutput(loss, metrics)

    @staticmethod
    def _count_hits(logits: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        pairs = logits.gather(1, labels[:, None])
        at_top = logits >= pairs - TIE * scale.abs()
        return (at_top.sum(1) == 1).sum()

    def _find_targets(
        self, teachers: Sequence[Teacher], logits: Sequence[Tensor], own: slice
    ) -> tuple[list[Tensor], Tensor]:
        """Return the teachers' mean softmaxes, [n, B] for each direction, and the mean of their entropies, 0-d."""
        targets = [torch.zeros_like(x) for x in logits]
        entropy = logits[0].new_zeros(())
        for teacher in teachers:
            dtype = full_dtype(teacher.image)
            image, text = (
                comm.gather(x.detach(), self.group).to(dtype) for x in (teacher.image, teacher.text)
            )
            with torch.autocast(image.device.type, enabled=False):  # it would multiply in 16 bits
                for target, mine, others in zip(targets, (image, text), (text, image), strict=True):
                    found = (teacher.scale.detach() * (mine[own] @ others.T)).softmax(1)
                    target += found / len(teachers)
                    entropy -= torch.special.xlogy(found, found).sum(1).mean()
        return targets, entropy / (2 * len(teachers))


def _cross_entropy(logits: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return the mean of the cross-entropies of both directions."""
    image, text = (F.cross_entropy(x, y) for x, y in zip(logits, targets, strict=True))
    return (image + text) / 2
