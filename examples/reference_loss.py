"""A custom loss: any InfoNCE or FastCLIP loss, shifted by a frozen reference model (DRRho-CLIP, arXiv 2505.06699).

The logits are s [(x_ij - x_ii) - (r_ij - r_ii)], where x are the cosines of the student and r those of the reference.
They are the logits of the student's features joined with the reference's: [I | I'] and [T | -T'], each [b, D + D'].
"""

from collections.abc import Sequence
from typing import Any

import torch

from disco_ds.losses import Embeddings, Loss, LossOutput, build_loss


class ReferenceLoss(Loss):
    """The loss `base` on logits from which those of a reference, the first Embeddings.teacher, are subtracted.

    Args:
        base: An InfoNCE loss, fastclip_v0, fastclip_v1 or fastclip_v3, but not siglip.
        teacher_weight: Factor of the reference's logits (1 in the paper).
        own_scale: Whether the reference's cosines are multiplied by its own scale, and not by the student's.
        options: Options of `base`.
    """

    def __init__(
        self,
        base: str = "disco_fused",
        teacher_weight: float = 1.0,
        own_scale: bool = False,
        **options: Any,
    ):
        super().__init__()
        self.base = build_loss(base, **options)
        self.teacher_weight, self.own_scale = teacher_weight, own_scale
        self.initial_scale = self.base.initial_scale
        self.learns_scale = self.base.learns_scale  # type: ignore[misc]
        self.base.accuracy = False  # it would be that of the joined features, not the student's

    def forward(self, embeddings: Embeddings) -> LossOutput:
        reference = embeddings.teacher[0]
        factor = torch.tensor(self.teacher_weight, device=embeddings.scale.device)
        if self.own_scale:
            # The base multiplies all logits by the student's scale. Detached here, its gradient would be wrong.
            factor = factor * reference.scale / embeddings.scale
        root = factor.sqrt().to(embeddings.image.dtype)
        image = torch.cat([embeddings.image, root * reference.image], 1)
        text = torch.cat([embeddings.text, -root * reference.text], 1)
        return self.base(Embeddings(image, text, embeddings.scale, index=embeddings.index))

    def set_num_samples(self, num_samples: int, run_samples: int) -> None:
        self.base.set_num_samples(num_samples, run_samples)

    def commit(self) -> None:
        self.base.commit()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.state_dict(*args, **kwargs)

    def load_state_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        self.base.load_state_parts(parts)
