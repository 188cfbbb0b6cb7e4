"""Compute the contrastive loss on held-out pairs, in batches of a fixed size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.eval.encode import Encoder, gather_rows
from disco_ds.eval.results import Result
from disco_ds.eval.sets import ImageSet


def validate(encoder: Encoder, pairs: ImageSet) -> Result:
    """Compute the InfoNCE loss and the in-batch accuracies. Collective.

    The values are the same for any number of ranks.

    Batches are formed in the order of the samples, and the pairs after the last full batch are left out.
    A set smaller than a batch forms one batch. The values depend on the batch size, so their names
    include it.

    Raises:
        AgreedError: If shards cannot be read, or no image can be read.
    """
    mine = encoder.encode_pairs(pairs)
    order = gather_rows(mine.image_id).argsort()
    image, text = gather_rows(mine.image)[order], gather_rows(mine.text)[order]
    scale = encoder.model(text=encoder.tokenize([""]).to(image.device))[2]
    batch = min(pairs.batch, len(image))
    starts = range(0, len(image) - batch + 1, batch)
    sums = torch.zeros(3, dtype=torch.float64, device=image.device)
    for start in starts[comm.rank() :: comm.size()]:
        sums += score_batch(image[start : start + batch], text[start : start + batch], scale)
    means = (comm.all_reduce_sum(sums) / len(starts)).tolist()
    names = [f"{kind}_at_{batch}" for kind in ("loss", "i2t", "t2i")]
    num_broken = pairs.source.num_samples - len(image)
    counts = {"num_pairs": batch * len(starts), "num_broken": num_broken}
    return Result("validation", pairs.name, dict(zip(names, means, strict=True)), counts)


def score_batch(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Compute the InfoNCE loss, the image-to-text accuracy and the text-to-image accuracy of a batch of pairs.

    Args:
        image: Unit rows, one for each pair.
        text: Unit rows, one for each pair.
        scale: The logit scale, [1].

    Returns:
        These three numbers, [3] float64.
    """
    logits = scale * (image @ text.T)
    labels = torch.arange(len(logits), device=logits.device)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    own = logits.diagonal()
    # A pair counts as a hit only if its similarity is larger than all others, not equal to any.
    i2t = ((logits >= own[:, None]).sum(dim=1) == 1).double().mean()
    t2i = ((logits >= own).sum(dim=0) == 1).double().mean()
    return torch.stack([loss.double(), i2t, t2i])
