"""A custom loss: InfoNCE with label smoothing (docs/extending.md)."""

import torch
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, Loss, LossCost, LossOutput


class SmoothedLoss(Loss):
    """Each rank compares its own b rows with all B = N b of the other side."""

    def __init__(self, smoothing: float = 0.1):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, embeddings: Embeddings) -> LossOutput:
        image, text = embeddings.image, embeddings.text  # [b, D] each
        labels = comm.rank() * len(image) + torch.arange(len(image), device=image.device)
        sides = ((image, comm.gather(text)), (text, comm.gather(image)))  # gather: [b, D] -> [B, D]
        logits = [embeddings.scale * own @ everyone.T for own, everyone in sides]  # [b, B] each
        loss = (
            sum(F.cross_entropy(each, labels, label_smoothing=self.smoothing) for each in logits)
            / 2
        )
        return LossOutput(loss, {"loss": comm.all_reduce_sum(loss.detach()) / comm.size()})

    def cost(self, b: int, N: int, D: int, num_samples: int) -> LossCost:
        """Tell `disco-ds plan` what the loss costs. Optional: without it, `plan` refuses the loss."""
        B = N * b
        # Bytes of the logits, their gradients and both gathered sides.
        peak = 4 * (6 * b * B + 4 * B * D)
        return LossCost(
            peak,
            state=0,
            state_on_host=False,
            flops=12 * b * B * D,
            precision="fp32",
            received_bytes=16 * (B - b) * D,
        )
