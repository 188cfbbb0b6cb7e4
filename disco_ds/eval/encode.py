"""Encode the images and texts of an evaluation set; every rank encodes its share.

All ranks make the same number of forward passes: at ZeRO 3 a pass that only one rank makes would
hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.data import ImageSpec, read_all
from disco_ds.distributed import comm
from disco_ds.eval.sets import ImageSet

Tokenize = Callable[[list[str]], Tensor]


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
        AgreedError: At the end, on all ranks, if shards cannot be read.
    """
    device = comm.local_device()
    problem = None
    samples = read_all(images.source, images.data, spec, comm.rank(), comm.size(), images.text)
    share = math.ceil(images.source.num_samples / comm.size())
    for _ in range(math.ceil(share / chunk)):
        batch: list[tuple[Tensor, str, int]] = []
        try:
            batch = list(islice(samples, chunk))
        except OSError as error:
            # Raised after the last forward pass, because the other ranks wait for this one there.
            problem = error
        pixels = [image for image, _, _ in batch]
        # A rank without images runs the model on a black image.
        pixels = pixels or [torch.zeros(3, *spec.size, dtype=torch.uint8)]
        features = model(image=torch.stack(pixels).to(device))[0]
        yield features[: len(batch)], batch
    with comm.all_or_none(f"evaluation on {images.name}"):
        if problem is not None:
            raise problem


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


def encode_classes(
    model: nn.Module, classes: list[str], templates: tuple[str, ...], tokenize: Tokenize, chunk: int
) -> Tensor:
    """Encode classes as the unit means of their prompts, [C, D], fp32, on every rank. Collective.

    Source: CLIP (Radford et al. 2021), section 3.1.4.
    """
    # Each rank takes consecutive classes, so that gathering the means restores the order.
    share = math.ceil(len(classes) / comm.size())
    mine = classes[comm.rank() * share : (comm.rank() + 1) * share]
    prompts = []
    for name in mine:
        for template in templates:
            placeholder = "{c}" if "{c}" in template else "{}"
            prompts.append(template.replace(placeholder, name))
    features = encode_texts(model, prompts, tokenize, chunk)
    means = features.view(-1, len(templates), features.shape[-1]).mean(dim=1)
    padded = F.pad(F.normalize(means, dim=-1), (0, 0, 0, share - len(mine)))
    return comm.gather(padded)[: len(classes)]
