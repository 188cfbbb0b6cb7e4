"""Validation: the contrastive loss on pairs that were held out, over batches of a stated size."""

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
    """The InfoNCE loss on one set of pairs, and accuracy within its batches; both depend on the batch's size."""

    name: str
    loss: float
    """Mean over the pairs, of both directions."""
    i2t: float
    t2i: float
    batch: int
    num_pairs: int
    """Pairs that the figures are of: those of whole batches."""
    num_broken: int

    @property
    def values(self) -> dict[str, float]:
        return {f"{kind}_at_{self.batch}": getattr(self, kind) for kind in ("loss", "i2t", "t2i")}

    @property
    def row(self) -> dict[str, str]:
        figures = {"loss": f"{self.loss:.4f}", "i2t": f"{self.i2t:.2%}", "t2i": f"{self.t2i:.2%}"}
        counts = {"batch": self.batch, "pairs": self.num_pairs, "broken": self.num_broken}
        return {"validation": self.name, **figures, **{k: f"{v:,}" for k, v in counts.items()}}


@torch.no_grad()
def validate(model: nn.Module, pairs: ImageSet, spec: ImageSpec, tokenize: Tokenize, chunk: int) -> Validation:
    """The loss on a set, the same at any number of ranks. Collective.

    Batches are cut in the order of the samples, and pairs that do not fill one are left out; a set that is smaller than
    a batch is one batch.

    Raises: AgreedError for images that cannot be read.
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
    num = batch * len(starts)
    loss, i2t, t2i = (comm.all_reduce_sum(sums) / num).tolist()
    return Validation(pairs.name, loss, i2t, t2i, batch, num, pairs.source.num_samples - len(image))


def sum_batch(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The sums over a batch of its loss and hits i2t and t2i, [3] float64; image, text [B, D] unit rows, scale [1]."""
    logits = scale * (image @ text.T)
    labels = torch.arange(len(logits), device=logits.device)
    losses = [F.cross_entropy(side, labels, reduction="sum").double() for side in (logits, logits.T)]
    hits = [(side.argmax(dim=1) == labels).sum().double() for side in (logits, logits.T)]
    return torch.stack([(losses[0] + losses[1]) / 2, *hits])
