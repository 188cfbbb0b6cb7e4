"""Image-text retrieval: find each caption's image and each image's captions.

Every rank compares its images and texts with those of all ranks, in blocks, so that the features
dominate the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.data import ImageSpec
from disco_ds.distributed import comm
from disco_ds.eval.encode import Tokenize, encode_images, encode_texts
from disco_ds.eval.sets import ImageSet

_ROWS = 1024
"""Rows of a block of similarities."""
_COLUMNS = 8192
"""Columns of a block of similarities."""


@dataclass(frozen=True)
class Recall:
    """The recall on one captioned set."""

    name: str
    values: dict[str, float]
    """For i2t and t2i: r1, r5 and r10 (fraction of queries with a match among the first k), and the
    median rank."""
    num_images: int
    num_texts: int
    num_broken: int

    @property
    def row(self) -> dict[str, str]:
        """A row of the printed table."""
        row = {"retrieval": self.name}
        for name, value in self.values.items():
            row[name.replace("_", " ")] = f"{value:g}" if "median" in name else f"{value:.2%}"
        row["images"] = f"{self.num_images:,}"
        row["texts"] = f"{self.num_texts:,}"
        row["broken"] = f"{self.num_broken:,}"
        return row


@torch.no_grad()
def retrieve(
    model: nn.Module, captioned: ImageSet, spec: ImageSpec, tokenize: Tokenize, chunk: int
) -> Recall:
    """Compute the recall on a set in both directions. Collective.

    Raises:
        AgreedError: If shards cannot be read, or no image can be read.
    """
    parts, texts, owners = [], [], list[int]()
    for features, samples in encode_images(model, captioned, spec, chunk):
        parts.append(features)
        for _, caption, _ in samples:
            lines = [line.strip() for line in caption.splitlines() if line.strip()]
            # A caption's owner is the position of its image among this rank's readable images.
            owners += [owners[-1] + 1 if owners else 0] * len(lines)
            texts += lines
    image, text = torch.cat(parts), encode_texts(model, texts, tokenize, chunk)
    counts = comm.gather_objects(len(image))
    if not sum(counts):
        raise comm.AgreedError(f"eval.retrieval.{captioned.name}: no image could be read")
    first = sum(counts[: comm.rank()])
    image_id = torch.arange(first, first + len(image), device=image.device)
    text_id = first + torch.tensor(owners, dtype=torch.int64, device=image.device)
    i2t = gather_rows(find_ranks(image, image_id, gather_rows(text), gather_rows(text_id)))
    t2i = gather_rows(find_ranks(text, text_id, gather_rows(image), gather_rows(image_id)))
    values = summarize("i2t", i2t) | summarize("t2i", t2i)
    num_broken = captioned.source.num_samples - len(i2t)
    return Recall(captioned.name, values, len(i2t), len(t2i), num_broken)


def find_ranks(query: Tensor, query_id: Tensor, key: Tensor, key_id: Tensor) -> Tensor:
    """Find the rank, counted from 1, of each query's best match among the keys.

    Keys with the id of the query match it. Keys of equal similarity are ranked in their order, so
    that a model whose features are all equal scores no better than chance.

    Args:
        query: [q, D], unit rows.
        query_id: [q] int64; each of them is also in key_id.
        key: [k, D], unit rows.
        key_id: [k] int64.

    Returns:
        [q] int64.
    """
    ranks = []
    for q, ids in zip(query.split(_ROWS), query_id.split(_ROWS), strict=True):
        best = q.new_full((len(q),), -torch.inf)
        place = torch.zeros_like(ids)
        rank = torch.ones_like(ids)
        # Both passes compute the same blocks, because the last bit of a score depends on its block.
        for start in range(0, len(key), _COLUMNS):
            match = ids[:, None] == key_id[start : start + _COLUMNS]
            if match.any():
                scores = q @ key[start : start + _COLUMNS].T
                top = scores.masked_fill(~match, -torch.inf).max(dim=1)
                place = torch.where(top.values > best, start + top.indices, place)
                best = torch.maximum(best, top.values)
        for start in range(0, len(key), _COLUMNS):
            scores = q @ key[start : start + _COLUMNS].T
            places = torch.arange(start, start + scores.shape[1], device=q.device)
            tied_behind = (scores == best[:, None]) & (places >= place[:, None])
            worse = (scores < best[:, None]) | tied_behind
            # Counting the complement of `worse` ranks a model with NaN features last.
            rank += (~worse).sum(dim=1)
        ranks.append(rank)
    return torch.cat(ranks)


def summarize(way: str, ranks: Tensor) -> dict[str, float]:
    """Compute R@1, R@5, R@10 and the median of ranks [n]."""
    shares = {f"{way}_r{k}": (ranks <= k).double().mean().item() for k in (1, 5, 10)}
    return shares | {f"{way}_median": float(np.median(ranks.cpu()))}


def gather_rows(x: Tensor) -> Tensor:
    """Gather the rows of all ranks in rank order; their numbers may differ. Collective."""
    # Collectives need equal shapes: pad to the longest, gather, and remove the padding.
    counts = comm.gather_objects(len(x))
    padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, max(counts) - len(x)))
    parts = comm.gather(padded).split(max(counts))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
