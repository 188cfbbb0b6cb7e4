"""Evaluation on images with captions: retrieval, and the contrastive loss on held-out pairs.

For retrieval, every rank compares its images with the texts of all ranks, and its texts with the images of all ranks,
a few rows at a time, so that the similarities need little memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.eval.encode import Encoder, ImageSet, gather_rows
from disco_ds.eval.results import Result

_ROWS = 128
"""Number of queries that are compared with all keys at a time."""


@dataclass(frozen=True)
class RetrievalSet(ImageSet):
    """Images with one or several captions each, for retrieval in both directions."""

    def evaluate(self, encoder: Encoder) -> Result:
        """Find each caption's image and each image's captions. Collective.

        For each direction (i2t and t2i), the values are the median rank of the best match, and r1, r5 and
        r10: the fractions of queries with a match among the 1, 5 and 10 most similar keys. If several images have the
        same caption, or the same pixels, each of them is a right answer.
        """
        image, image_id, image_hash, text, text_id, text_hash = encoder.encode_pairs(self)
        owners = image_hash[torch.searchsorted(image_id, text_id)]
        matches = torch.stack([owners, text_hash], 1).unique(dim=0)
        local = slice(comm.rank(), None, comm.size())
        i2t = find_ranks(image[local], image_hash[local], text, text_hash, matches)
        t2i = find_ranks(text[local], text_hash[local], image, image_hash, matches.flip(1))
        values = summarize("i2t", gather_rows(i2t)) | summarize("t2i", gather_rows(t2i))
        counts = {
            "num_images": len(image),
            "num_texts": len(text),
            "num_broken": self.source.num_samples - len(image),
        }
        return Result("retrieval", self.name, values, counts)


def find_ranks(
    query: Tensor, query_hash: Tensor, key: Tensor, key_hash: Tensor, matches: Tensor
) -> Tensor:
    """Find the rank, counted from 1, of each query's best match among the keys.

    Keys that do not match but are equally similar are ranked before the match, so that a model whose features are all
    equal gets no hits.

    Args:
        query: Unit rows, one for each query.
        query_hash: int64, one for each query.
        key: Unit rows, one for each key.
        key_hash: int64, one for each key.
        matches: [n, 2] int64, the hashes of queries and keys that match. Every query matches a key.

    Returns:
        int64, one rank for each query.
    """
    distinct, column = key_hash.unique(return_inverse=True)
    matching = torch.searchsorted(distinct, matches[:, 1].contiguous())
    ranks = []
    for rows, hashes in zip(query.split(_ROWS), query_hash.split(_ROWS), strict=True):
        scores = rows @ key.T
        row, match = (hashes[:, None] == matches[:, 0]).nonzero(as_tuple=True)
        is_match = torch.zeros(len(rows), len(distinct), dtype=torch.bool, device=key.device)
        is_match[row, matching[match]] = True
        others = ~is_match[:, column]
        best = scores.masked_fill(others, -torch.inf).amax(dim=1, keepdim=True)
        ranks.append(1 + (others & (scores >= best)).sum(dim=1))
    return torch.cat(ranks)


def summarize(way: str, ranks: Tensor) -> dict[str, float]:
    """Compute R@1, R@5, R@10 and the median rank.

    Args:
        way: Prefix of the metrics' names, i2t or t2i.
        ranks: For each query, the rank of its best match, counted from 1. int64.
    """
    shares = {f"{way}_r{k}": (ranks <= k).double().mean().item() for k in (1, 5, 10)}
    return shares | {f"{way}_median": ranks.double().quantile(0.5).item()}


@dataclass(frozen=True)
class HeldOutSet(ImageSet):
    """Images with captions, for the contrastive loss. The first caption of each image is used."""

    batch: int
    """Number of pairs in a batch."""

    def evaluate(self, encoder: Encoder) -> Result:
        """Compute the InfoNCE loss and the in-batch accuracies. Collective.

        The values are the same for any number of ranks.

        Batches are formed in the order of the samples, and the pairs after the last full batch are left out.
        A set smaller than a batch forms one batch. The values depend on the batch size, so their names
        include it.
        """
        pairs = encoder.encode_pairs(self, most=1)
        image, text = pairs.image, pairs.text
        scale = encoder.model(text=encoder.tokenize([""]).to(image.device))[2]
        batch = min(self.batch, len(image))
        starts = range(0, len(image) - batch + 1, batch)
        sums = torch.zeros(3, dtype=torch.float64, device=image.device)
        for start in starts[comm.rank() :: comm.size()]:
            sums += score_batch(image[start : start + batch], text[start : start + batch], scale)
        means = (comm.all_reduce_sum(sums) / len(starts)).tolist()
        names = [f"{metric}_at_{batch}" for metric in ("loss", "i2t", "t2i")]
        counts = {
            "num_pairs": batch * len(starts),
            "num_broken": self.source.num_samples - len(image),
        }
        return Result("validation", self.name, dict(zip(names, means, strict=True)), counts)


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
