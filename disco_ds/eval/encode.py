"""Encode the images and texts of an evaluation set; every rank encodes its share.

All ranks make the same number of forward passes: at ZeRO 3, a forward pass that some ranks do not
join would hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.config import DataSettings
from disco_ds.data import ImageSpec, Source, read_all
from disco_ds.distributed import comm
from disco_ds.eval.results import Result


@dataclass(frozen=True)
class ImageSet:
    """Images with one text each, and how they are evaluated."""

    name: str
    source: Source
    data: DataSettings
    """How to read the images: the members that may contain them, and their maximum size."""
    text: str
    """Template of an image's label, or of its captions, one per line."""

    def evaluate(self, encoder: Encoder) -> Result:
        """Evaluate a model on this set. Collective.

        Raises:
            AgreedError: If shards cannot be read, no image can be read, or features are not finite.
        """
        raise NotImplementedError


class Pairs(NamedTuple):
    """The features of a captioned set on all ranks, in the order of the samples."""

    image: Tensor
    """Unit rows, fp32, one for each image."""
    image_id: Tensor
    """Sample id of each image, int64."""
    image_hash: Tensor
    """Equal for images with the same pixels, int64."""
    text: Tensor
    """Unit rows, fp32, one for each caption. An image may have several captions."""
    text_id: Tensor
    """Sample id of each caption, int64."""
    text_hash: Tensor
    """Equal for captions with the same words, int64."""


@dataclass(frozen=True)
class Encoder:
    """The two towers of a model, and how their inputs are prepared.

    The methods are collective: every rank must call them.
    """

    model: nn.Module
    """A DeepSpeed engine or a module."""
    spec: ImageSpec
    """Size and resizing of the images."""
    tokenize: Callable[[list[str]], Tensor]
    chunk: int
    """Number of images or texts per rank and forward pass."""

    def encode_images(
        self, images: ImageSet
    ) -> Iterator[tuple[Tensor, list[tuple[Tensor, str, int]]]]:
        """Encode this rank's share of a set. Every rank must iterate to the end.

        Yields:
            Unit features, fp32, a row for each image of a batch; and (image, text, sample id) for each image.
            Images that cannot be read are left out. A batch is empty if this rank has no images left.

        Raises:
            AgreedError: At the end, on all ranks, if shards cannot be read, no image can be read, or the features of an
                image are not finite.
        """
        rank, size, device = comm.rank(), comm.size(), comm.local_device()
        problem = None
        num_read = 0
        finite = torch.ones((), dtype=torch.bool, device=device)
        samples = read_all(images.source, images.data, self.spec, rank, size, images.text)
        for _ in range(math.ceil(images.source.num_samples / (size * self.chunk))):
            batch: list[tuple[Tensor, str, int]] = []
            try:
                batch = list(islice(samples, self.chunk))
            except OSError as error:
                # Raise it only after the last forward pass, because the other ranks need this rank until then.
                problem = error
            num_read += len(batch)
            pixels = [image for image, _, _ in batch]
            # A rank without images runs the model on a black image.
            pixels = pixels or [torch.zeros(3, *self.spec.size, dtype=torch.uint8)]
            features = self.model(image=torch.stack(pixels).to(device))[0]
            finite &= features.isfinite().all()
            yield features[: len(batch)], batch
        with comm.all_or_none(f"evaluation on {images.name}"):
            if problem is not None:
                raise problem
            _check_finite("image", finite)
        if not any(comm.gather_objects(num_read)):
            raise comm.AgreedError(f"evaluation on {images.name}: no image could be read")

    def encode_texts(self, texts: list[str]) -> Tensor:
        """Encode this rank's texts as unit features, fp32, a row for each. Ranks may have different numbers of texts.

        Raises:
            AgreedError: If the features of a text are not finite on a rank.
        """
        device = comm.local_device()
        most = max(1, *comm.gather_objects(len(texts)))
        parts = []
        for start in range(0, most, self.chunk):
            part = texts[start : start + self.chunk]
            features = self.model(text=self.tokenize(part or [""]).to(device))[1]
            parts.append(features[: len(part)])
        encoded = torch.cat(parts)
        with comm.all_or_none("evaluation"):
            _check_finite("text", encoded.isfinite().all())
        return encoded

    def encode_pairs(self, pairs: ImageSet, most: int | None = None) -> Pairs:
        """Encode the images, and the first `most` captions of each (None: all captions).

        Raises:
            AgreedError: On all ranks, if shards cannot be read, no image can be read, or features are not finite.
        """
        parts, texts = list[Tensor](), list[str]()
        # (sample id, hash) of each image and of each caption
        images, captions = list[tuple[int, int]](), list[tuple[int, int]]()
        for features, samples in self.encode_images(pairs):
            parts.append(features)
            for pixels, text, index in samples:
                lines = split_lines(text)[:most]
                images.append((index, _hash(pixels.numpy().tobytes())))
                captions += [(index, _hash(line.encode(errors="surrogatepass"))) for line in lines]
                texts += lines
        sides = []
        for features, keys in ((torch.cat(parts), images), (self.encode_texts(texts), captions)):
            keyed = torch.tensor(keys, dtype=torch.int64, device=features.device).view(-1, 2)
            ids = gather_rows(keyed)
            order = ids[:, 0].argsort(stable=True)
            sides += [gather_rows(features)[order], *ids[order].T.contiguous()]
        return Pairs(*sides)

    def encode_classes(self, classes: list[str], templates: tuple[str, ...]) -> Tensor:
        """Encode each class as the normalized mean of its prompts' features.

        Args:
            classes: The names of the classes.
            templates: Prompts with {} in place of the class name.

        Returns:
            Unit rows, fp32, one for each class, on every rank.

        Source: CLIP (Radford et al. 2021), section 3.1.4.
        """
        # Each rank takes consecutive classes, so that gathering the means restores the order.
        share = math.ceil(len(classes) / comm.size())
        mine = classes[comm.rank() * share : (comm.rank() + 1) * share]
        prompts = [template.replace("{}", name) for name in mine for template in templates]
        features = self.encode_texts(prompts)
        means = features.view(-1, len(templates), features.shape[-1]).mean(dim=1)
        return gather_rows(F.normalize(means, dim=-1))


def _hash(data: bytes) -> int:
    """Return a hash that fits into int64."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), signed=True)


def split_lines(text: str) -> list[str]:
    """Return the lines of a text that are not blank, without surrounding spaces."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def _check_finite(tower: str, finite: Tensor) -> None:
    """Raise an error if this rank's features of a tower are not finite."""
    if not finite:
        raise ValueError(f"the features of the {tower} tower are not finite")


def gather_rows(x: Tensor) -> Tensor:
    """Gather the rows of all ranks in rank order; ranks may have different numbers of rows. Collective."""
    # Collectives need equal shapes: pad to the longest, gather, and remove the padding.
    counts = comm.gather_objects(len(x))
    padding = x.new_zeros(max(counts) - len(x), *x.shape[1:])
    parts = comm.gather(torch.cat([x, padding])).split(max(counts))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
