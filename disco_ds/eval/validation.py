"""Compute the contrastive loss on held-out pairs, in batches of a fixed size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.data import ImageSpec
from disco_ds.distributed import comm
from disco_ds.eval.encode import Tokenize, encode_images, encode_texts
from disco_ds.eval.retrieval import gather_rows
from disco_ds.eval.sets import ImageSet


@dataclass(frozen=True)
class Validation:
    """InfoNCE loss on one set of pairs, and accuracy within its batches.

    Loss and accuracy depend on the batch size.
    """

    name: str
    loss: float
    """Mean over the pairs and both directions."""
    i2t: float
    t2i: float
    batch: int
    num_pairs: int
    """Number of evaluated pairs, all in full batches."""
    num_broken: int

    @property
    def values(self) -> dict[str, float]:
        """Metrics by name, which includes the batch size."""
        return {f"{kind}_at_{self.batch}": getattr(self, kind) for kind in ("loss", "i2t", "t2i")}

    @property
    def row(self) -> dict[str, str]:
        """A row of the printed table."""
        return {
            "validation": self.name,
            "loss": f"{self.loss:.4f}",
            "i2t": f"{self.i2t:.2%}",
            "t2i": f"{self.t2i:.2%}",
            "batch": f"{self.batch:,}",
            "pairs": f"{self.num_pairs:,}",
            "broken": f"{self.num_broken:,}",
        }


@torch.no_grad()
def validate(
    model: nn.Module, pairs: ImageSet, spec: ImageSpec, tokenize: Tokenize, chunk: int
) -> Validation:
    """Compute the loss on a set of pairs; it is the same at any number of ranks. Collective.

    Batches are formed in the order of the samples, and pairs that do not fill a batch are left out.
    A set smaller than a batch forms one batch.

    Raises:
        AgreedError: If shards cannot be read, or no image can be read.
    """
    parts, texts, ids = [], list[str](), list[int]()
    for features, samples in encode_images(model, pairs, spec, chunk):
        parts.append(features)
        texts += [caption.strip().splitlines()[0] for _, caption, _ in samples]
        ids += [index for _, _, index in samples]
    image, text = torch.cat(parts), encode_texts(model, texts, tokenize, chunk)
    order = gather_rows(torch.tensor(ids, dtype=torch.int64, device=image.device)).argsort()
    image, text = gather_rows(image)[order], gather_rows(text)[order]
    if not len(image):
        raise comm.AgreedError(f"eval.validation.{pairs.name}: no image could be read")
    scale = model(text=tokenize([""]).to(image.device))[2]
    batch = min(pairs.batch, len(image))
    starts = range(0, len(image) - batch + 1, batch)
    sums = torch.zeros(3, dtype=torch.float64, device=image.device)
    for start in starts[comm.rank() :: comm.size()]:
        sums += sum_batch(image[start : start + batch], text[start : start + batch], scale)
    num_pairs = batch * len(starts)
    loss, i2t, t2i = (comm.all_reduce_sum(sums) / num_pairs).tolist()
    num_broken = pairs.source.num_samples - len(image)
    return Validation(pairs.name, loss, i2t, t2i, batch, num_pairs, num_broken)


def sum_batch(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Sum the loss and the hits of a batch.

    Args:
        image: [B, D], unit rows.
        text: [B, D], unit rows.
        scale: [1].

    Returns:
        [3] float64: the loss, image-to-text hits and text-to-image hits.
    """
    logits = scale * (image @ text.T)
    labels = torch.arange(len(logits), device=logits.device)
    losses, hits = [], []
    for side in (logits, logits.T):
        losses.append(F.cross_entropy(side, labels, reduction="sum").double())
        hits.append((side.argmax(dim=1) == labels).sum().double())
    return torch.stack([(losses[0] + losses[1]) / 2, *hits])
