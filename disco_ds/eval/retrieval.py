"""Retrieval: the rank of each caption's image among all images, and of each image's best caption among all captions.

Every process compares its own images and texts with those of all processes, in blocks, so that memory is dominated by
the features.
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

_ROWS, _COLUMNS = 1024, 8192
"""Size of a block of similarities."""


@dataclass(frozen=True)
class Recall:
    """The recall on one captioned set."""

    name: str
    values: dict[str, float]
    """For i2t and t2i: r1, r5 and r10 (fraction of queries whose match is among the first k) and the median rank."""
    num_images: int
    num_texts: int
    num_broken: int

    @property
    def row(self) -> dict[str, str]:
        counts = {"images": self.num_images, "texts": self.num_texts, "broken": self.num_broken}
        figures = {k.replace("_", " "): f"{v:g}" if "median" in k else f"{v:.2%}" for k, v in self.values.items()}
        return {"retrieval": self.name, **figures, **{k: f"{v:,}" for k, v in counts.items()}}


@torch.no_grad()
def retrieve(model: nn.Module, captioned: ImageSet, spec: ImageSpec, tokenize: Tokenize, chunk: int) -> Recall:
    """Recall on a set in both directions. Collective. Raises: AgreedError for images that cannot be read."""
    parts, texts, owners = [], [], list[int]()
    for features, samples in encode_images(model, captioned, spec, chunk):
        parts.append(features)
        for _, caption, _ in samples:
            lines = [line.strip() for line in caption.splitlines() if line.strip()]
            # Captions belong to the number of their image among this rank's readable ones.
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
    values = summarise("i2t", i2t) | summarise("t2i", t2i)
    return Recall(captioned.name, values, len(i2t), len(t2i), captioned.source.num_samples - len(i2t))


def find_ranks(query: Tensor, query_id: Tensor, key: Tensor, key_id: Tensor) -> Tensor:
    """The rank, from 1, of each query's best match among the keys; its matches are the keys with its id.

    Keys of equal similarity are ranked in their order, so that a model whose features are all equal scores no better
    than chance.

    Args:    query [q, D], key [k, D] unit rows; query_id [q], key_id [k] int64; each query id is among the key ids.
    Returns: [q] int64.
    """
    ranks = []
    for q, ids in zip(query.split(_ROWS), query_id.split(_ROWS), strict=True):
        best = q.new_full((len(q),), -torch.inf)
        place = torch.zeros_like(ids)
        better = torch.ones_like(ids)
        # Both passes compute the same blocks: a score computed in another way could differ in its last bit.
        for start in range(0, len(key), _COLUMNS):
            match = ids[:, None] == key_id[start : start + _COLUMNS]
            if match.any():
                top = (q @ key[start : start + _COLUMNS].T).masked_fill(~match, -torch.inf).max(dim=1)
                place = torch.where(top.values > best, start + top.indices, place)
                best = torch.maximum(best, top.values)
        for start in range(0, len(key), _COLUMNS):
            scores = q @ key[start : start + _COLUMNS].T
            worse, equal = scores < best[:, None], scores == best[:, None]
            if equal.any():
                worse |= equal & (torch.arange(start, start + scores.shape[1], device=q.device) >= place[:, None])
            # Counting the complement of `worse` ranks a model whose features are nan last.
            better += (~worse).sum(dim=1)
        ranks.append(better)
    return torch.cat(ranks)


def summarise(way: str, ranks: Tensor) -> dict[str, float]:
    """R@1, R@5, R@10 and the median of ranks [n]."""
    shares = {f"{way}_r{k}": (ranks <= k).double().mean().item() for k in (1, 5, 10)}
    return shares | {f"{way}_median": float(np.median(ranks.cpu()))}


def gather_rows(x: Tensor) -> Tensor:
    """The rows of all ranks in rank order; their numbers may differ. Collective."""
    # Collectives need equal shapes: pad to the longest, and cut the padding off after gathering.
    counts = comm.gather_objects(len(x))
    padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, max(counts) - len(x)))
    parts = comm.gather(padded).split(max(counts))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
