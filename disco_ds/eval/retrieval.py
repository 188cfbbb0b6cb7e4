"""Image-text retrieval: find each caption's image and each image's captions.

Every rank compares its images with the texts of all ranks, and its texts with the images of all ranks. It compares
a few rows at a time, so that the similarities need little memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disco_ds.eval.encode import Encoder, gather_rows
from disco_ds.eval.results import Result
from disco_ds.eval.sets import ImageSet

_ROWS = 128
"""Number of queries that are compared with all keys at a time."""


def retrieve(encoder: Encoder, captioned: ImageSet) -> Result:
    """Compute the recall on a set in both directions. Collective.

    For each direction (i2t and t2i), the values are the median rank of the best match, and r1, r5 and
    r10: the fractions of queries with a match among the 1, 5 and 10 most similar keys.

    Raises:
        AgreedError: If shards cannot be read, or no image can be read.
    """
    image, image_id, text, text_id = encoder.encode_pairs(captioned)
    i2t = gather_rows(find_ranks(image, image_id, *_gather_sorted(text, text_id)))
    t2i = gather_rows(find_ranks(text, text_id, *_gather_sorted(image, image_id)))
    values = summarize("i2t", i2t) | summarize("t2i", t2i)
    num_broken = captioned.source.num_samples - len(i2t)
    counts = {"num_images": len(i2t), "num_texts": len(t2i), "num_broken": num_broken}
    return Result("retrieval", captioned.name, values, counts)


def _gather_sorted(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Gather rows and their ids from all ranks, sorted by id, so that their order does not depend on the ranks."""
    ids, order = gather_rows(ids).sort(stable=True)
    return gather_rows(rows)[order], ids


def find_ranks(query: Tensor, query_id: Tensor, key: Tensor, key_id: Tensor) -> Tensor:
    """Find the rank, counted from 1, of each query's best match among the keys.

    A key matches a query if both have the same id. Keys that do not match but are equally similar are ranked before the
    match, so that a model whose features are all equal gets no hits.

    Args:
        query: Unit rows, one for each query.
        query_id: int64, one id for each query. Each id also occurs in key_id.
        key: Unit rows, one for each key.
        key_id: int64, one id for each key.

    Returns:
        int64, one rank for each query.
    """
    ranks = []
    for rows, ids in zip(query.split(_ROWS), query_id.split(_ROWS), strict=True):
        scores = rows @ key.T
        others = ids[:, None] != key_id
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
