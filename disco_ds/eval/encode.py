"""Features of a set's images and texts, of which every rank encodes its share.

All ranks make the same number of forward passes: a pass that one rank makes alone would hang at ZeRO 3.
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
    """(unit features [k, D] fp32, (image, text, id) of each) of this rank's readable images, at most `chunk` at a time.

    Collective: every rank must iterate to the end. k is 0 where a rank has no images left.

    Raises: AgreedError, at the end, for shards that cannot be read.
    """
    device, problem = comm.local_device(), None
    samples = read_all(images.source, images.data, spec, comm.rank(), comm.size(), images.text)
    share = math.ceil(images.source.num_samples / comm.size())
    for _ in range(math.ceil(share / chunk)):
        batch: list[tuple[Tensor, str, int]] = []
        try:
            batch = list(islice(samples, chunk))
        except OSError as error:
            # Raised after the last forward pass: the other ranks are waiting in this one's collectives.
            problem = error
        # A rank without images still runs the model, on a black one.
        pixels = [picture for picture, _, _ in batch] or [torch.zeros(3, *spec.size, dtype=torch.uint8)]
        features = model(image=torch.stack(pixels).to(device))[0]
        yield features[: len(batch)], batch
    with comm.all_or_none(f"evaluation on {images.name}"):
        if problem is not None:
            raise problem


@torch.no_grad()
def encode_texts(model: nn.Module, texts: list[str], tokenize: Tokenize, chunk: int) -> Tensor:
    """Unit features of this rank's texts, [n, D] fp32; n may differ between ranks. Collective."""
    device = comm.local_device()
    most = max(int(comm.all_reduce_max(torch.tensor(len(texts), device=device))), 1)
    parts = []
    for start in range(0, most, chunk):
        part = texts[start : start + chunk]
        parts.append(model(text=tokenize(part or [""]).to(device))[1][: len(part)])
    return torch.cat(parts)


def encode_classes(
    model: nn.Module, classes: list[str], templates: tuple[str, ...], tokenize: Tokenize, chunk: int
) -> Tensor:
    """The unit mean of each class's prompts, [C, D] fp32 on every rank. Collective.

    Source: CLIP (Radford et al. 2021), section 3.1.4.
    """
    # Consecutive classes per rank, so that gathering the ranks' means restores the order.
    share = math.ceil(len(classes) / comm.size())
    mine = classes[comm.rank() * share : (comm.rank() + 1) * share]
    fields = ["{c}" if "{c}" in template else "{}" for template in templates]
    prompts = [t.replace(field, name) for name in mine for t, field in zip(templates, fields, strict=True)]
    features = encode_texts(model, prompts, tokenize, chunk)
    means = F.normalize(features.view(-1, len(templates), features.shape[-1]).mean(dim=1), dim=-1)
    return comm.gather(F.pad(means, (0, 0, 0, share - len(mine))))[: len(classes)]
