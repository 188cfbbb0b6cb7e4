"""Compute the contrastive loss on held-out pairs, in batches of a fixed size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.data import ImageSpec
from disco_ds.distributed import comm
from disco_ds.eval.encode import Tokenize, encode_pairs, gather_rows
from disco_ds.eval.results import Result
from disco_ds.eval.sets import ImageSet


@torch.no_grad()
def validate(
    model: nn.Module, pairs: ImageSet, spec: ImageSpec, tokenize: Tokenize, chunk: int
) -> Result:
    """Compute InfoNCE and the accuracy in the batch; equal at any number of ranks. Collective.

    Batches are formed in the order of the samples, and pairs that do not fill a batch are left out.
    A set smaller than a batch forms one batch. The values depend on the batch size, so their names
    include it.

    Raises:
        AgreedError: If shards cannot be read, or no image can be read.
    """
    mine = encode_pairs(model, pairs, spec, tokenize, chunk)
    order = gather_rows(mine.image_id).argsort()
    image, text = gather_rows(mine.image)[order], gather_rows(mine.text)[order]
    scale = model(text=tokenize([""]).to(image.device))[2]
    batch = min(pairs.batch, len(image))
    starts = range(0, len(image) - batch + 1, batch)
    sums = torch.zeros(3, dtype=torch.float64, device=image.device)
    for start in starts[comm.rank() :: comm.size()]:
        sums += sum_batch(image[start : start + batch], text[start : start + batch], scale)
    num_pairs = batch * len(starts)
    means = (comm.all_reduce_sum(sums) / num_pairs).tolist()
    names = [f"{kind}_at_{batch}" for kind in ("loss", "i2t", "t2i")]
    num_broken = pairs.source.num_samples - len(image)
    counts = {"num_pairs": num_pairs, "num_broken": num_broken}
    return Result("validation", pairs.name, dict(zip(names, means, strict=True)), counts)


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
