"""Zero-shot classification: each image of a labelled set is assigned to the class with the nearest text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from disco_ds.data import ImageSpec
from disco_ds.distributed import comm
from disco_ds.eval.encode import Tokenize, encode_classes, encode_images
from disco_ds.eval.sets import ImageSet

NUM_EXAMPLES = 24
"""Maximum number of examples, taken at even distances from the set."""


class Example(NamedTuple):
    """An image of a set with the model's predictions, to be looked at."""

    image: NDArray[np.uint8]
    """[H, W, 3]."""
    label: str
    best: list[str]
    """Names of the three nearest classes, the nearest first."""


@dataclass(frozen=True)
class Accuracy:
    """The accuracy on one labelled set."""

    name: str
    top1: float
    top5: float
    recall: float
    """Top-1 accuracy of each class's images, averaged over the classes."""
    num_images: int
    num_classes: int
    num_broken: int
    """Images that could not be read; no other number includes them."""
    examples: list[Example] = field(default_factory=list, repr=False, compare=False)
    """Independent of the number of ranks."""

    @property
    def chance(self) -> float:
        return 1 / self.num_classes

    @property
    def values(self) -> dict[str, float]:
        return {"top1": self.top1, "top5": self.top5, "recall": self.recall, "chance": self.chance}

    @property
    def row(self) -> dict[str, str]:
        shares = {"top-1": self.top1, "top-5": self.top5, "class recall": self.recall, "chance": self.chance}
        counts = {"labels": self.num_classes, "images": self.num_images, "broken": self.num_broken}
        return {
            "zero-shot": self.name,
            **{k: f"{v:.2%}" for k, v in shares.items()},
            **{k: f"{v:,}" for k, v in counts.items()},
        }


@torch.no_grad()
def classify(model: nn.Module, labelled: ImageSet, spec: ImageSpec, tokenize: Tokenize, chunk: int) -> Accuracy:
    """Accuracy on a set. Collective. Raises: AgreedError for images that cannot be read."""
    classes = list(labelled.classes.values())
    texts = encode_classes(model, classes, labelled.templates, tokenize, chunk)
    number = {label: place for place, label in enumerate(labelled.classes)}
    counts = torch.zeros(3, len(classes), dtype=torch.int64, device=texts.device)  # images, top-1, top-5
    shown, every = dict[int, Example](), math.ceil(labelled.source.num_samples / NUM_EXAMPLES)
    for features, samples in encode_images(model, labelled, spec, chunk):
        target = torch.tensor([number[label] for _, label, _ in samples], dtype=torch.int64, device=texts.device)
        best = (features @ texts.T).topk(min(5, len(classes)), dim=1).indices
        right = best == target[:, None]
        hits = torch.stack([torch.ones_like(target), right[:, 0].long(), right.any(dim=1).long()])
        counts.index_add_(1, target, hits)
        for (image, label, index), near in zip(samples, best.tolist(), strict=True):
            # Chosen by id, so that the examples do not depend on the number of ranks.
            if index % every == 0:
                shown[index] = Example(
                    image.permute(1, 2, 0).numpy(), labelled.classes[label], [classes[place] for place in near[:3]]
                )
    counts = comm.all_reduce_sum(counts).double()
    images, top1, top5 = counts.sum(dim=1).tolist()
    if not images:
        raise comm.AgreedError(f"eval.labelled.{labelled.name}: no image could be read")
    # Classes without a readable image have no recall; they remain possible answers.
    seen = counts[0] > 0
    recall = (counts[1, seen] / counts[0, seen]).mean().item()
    broken = labelled.source.num_samples - int(images)
    shown = {index: example for part in comm.gather_objects(shown) for index, example in part.items()}
    examples = [shown[index] for index in sorted(shown)]
    return Accuracy(labelled.name, top1 / images, top5 / images, recall, int(images), len(classes), broken, examples)
