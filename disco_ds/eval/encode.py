"""Encode the images and texts of an evaluation set; every rank encodes its share.

All ranks make the same number of forward passes: at ZeRO 3 a pass that only one rank makes would
hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.data import ImageSpec, read_all
from disco_ds.distributed import comm
from disco_ds.eval.sets import ImageSet

Tokenize = Callable[[list[str]], Tensor]


class Pairs(NamedTuple):
    """This rank's features of a captioned set."""

    image: Tensor
    """[n, D], unit rows, fp32."""
    image_id: Tensor
    """[n] int64: ids of the samples."""
    text: Tensor
    """[m, D], unit rows, fp32."""
    text_id: Tensor
    """[m] int64: for each caption the id of its sample."""


@torch.no_grad()
def encode_images(
    model: nn.Module, images: ImageSet, spec: ImageSpec, chunk: int
) -> Iterator[tuple[Tensor, list[tuple[Tensor, str, int]]]]:
    """Encode this rank's readable images, at most `chunk` at a time.

    Collective: every rank must iterate to the end.

    Yields:
        Unit features [k, D], fp32, and the (image, text, id) of each of the k images. k is 0 if
        this rank has no images left.

    Raises:
        AgreedError: At the end, on all ranks, if shards or all images cannot be read.
    """
    device = comm.local_device()
    problem = None
    num_read = torch.zeros(1, device=device)
    samples = read_all(images.source, images.data, spec, comm.rank(), comm.size(), images.text)
    share = math.ceil(images.source.num_samples / comm.size())
    for _ in range(math.ceil(share / chunk)):
        batch: list[tuple[Tensor, str, int]] = []
        try:
            batch = list(islice(samples, chunk))
        except OSError as error:
            # Raised after the last forward pass, because the other ranks wait for this one there.
            problem = error
        num_read += len(batch)
        pixels = [image for image, _, _ in batch]
        # A rank without images runs the model on a black image.
        pixels = pixels or [torch.zeros(3, *spec.size, dtype=torch.uint8)]
        features = model(image=torch.stack(pixels).to(device))[0]
        yield features[: len(batch)], batch
    with comm.all_or_none(f"evaluation on {images.name}"):
        if problem is not None:
            raise problem
    if not comm.all_reduce_sum(num_read):
        raise comm.AgreedError(f"evaluation on {images.name}: no image could be read")


@torch.no_grad()
def encode_texts(model: nn.Module, texts: list[str], tokenize: Tokenize, chunk: int) -> Tensor:
    """Encode this rank's texts as unit features [n, D], fp32. Collective; n may differ by rank."""
    device = comm.local_device()
    most = max(int(comm.all_reduce_max(torch.tensor(len(texts), device=device))), 1)
    parts = []
    for start in range(0, most, chunk):
        part = texts[start : start + chunk]
        features = model(text=tokenize(part or [""]).to(device))[1]
        parts.append(features[: len(part)])
    return torch.cat(parts)


def encode_pairs(
    model: nn.Module, pairs: ImageSet, spec: ImageSpec, tokenize: Tokenize, chunk: int
) -> Pairs:
    """Encode this rank's images and their captions. Collective.

    Only the first caption of an image is encoded if the set is for the validation loss.

    Raises:
        AgreedError: See encode_images.
    """
    parts, texts, image_ids, text_ids = [], list[str](), list[int](), list[int]()
    for features, samples in encode_images(model, pairs, spec, chunk):
        parts.append(features)
        for _, caption, index in samples:
            lines = [line.strip() for line in caption.splitlines() if line.strip()]
            if pairs.batch:
                lines = lines[:1]
            image_ids.append(index)
            texts += lines
            text_ids += [index] * len(lines)
    image, text = torch.cat(parts), encode_texts(model, texts, tokenize, chunk)
    image_id = torch.tensor(image_ids, dtype=torch.int64, device=image.device)
    text_id = torch.tensor(text_ids, dtype=torch.int64, device=image.device)
    return Pairs(image, image_id, text, text_id)


def encode_classes(
    model: nn.Module, classes: list[str], templates: tuple[str, ...], tokenize: Tokenize, chunk: int
) -> Tensor:
    """Encode classes as the unit means of their prompts, [C, D], fp32, on every rank. Collective.

    Source: CLIP (Radford et al. 2021), section 3.1.4.
    """
    # Each rank takes consecutive classes, so that gathering the means restores the order.
    share = math.ceil(len(classes) / comm.size())
    mine = classes[comm.rank() * share : (comm.rank() + 1) * share]
    fills = [template.replace("{c}", "{}") for template in templates]
    prompts = [fill.replace("{}", name) for name in mine for fill in fills]
    features = encode_texts(model, prompts, tokenize, chunk)
    means = features.view(-1, len(templates), features.shape[-1]).mean(dim=1)
    return gather_rows(F.normalize(means, dim=-1))


def gather_rows(x: Tensor) -> Tensor:
    """Gather the rows of all ranks in rank order; their numbers may differ. Collective."""
    # Collectives need equal shapes: pad to the longest, gather, and remove the padding.
    counts = comm.gather_objects(len(x))
    padding = x.new_zeros(max(counts) - len(x), *x.shape[1:])
    parts = comm.gather(torch.cat([x, padding])).split(max(counts))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
