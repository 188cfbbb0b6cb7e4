"""Zero-shot classification: each image of a labelled set among the set's own labels, by the nearest text.

All ranks work: each encodes its part of the texts and of the images, in equal numbers of forwards, since a forward of
one rank alone hangs at ZeRO 3 and keeps the others waiting at every stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from disco_ds import comm
from disco_ds.config import Config, EvalSettings
from disco_ds.data import ImageSpec, Manifest, load_manifest, read_all, read_labels, resolve_shards
from disco_ds.engine import Engine

Tokenize = Callable[[list[str]], Tensor]


@dataclass(frozen=True)
class Accuracy:
    """Of one labelled set."""

    top1: float
    top5: float
    num_images: int
    num_classes: int

    @property
    def chance(self) -> float:
        return 1 / self.num_classes


@dataclass(frozen=True)
class LabelledSet:
    """Images with labels, to be told apart by them."""

    name: str
    manifest: Manifest
    classes: list[str]


def load_sets(settings: EvalSettings) -> list[LabelledSet]:
    """The sets of eval.labelled with their labels, which are read here: at the start, not after the last step.

    Raises: ValueError for a set that is missing or has no label.
    """
    sets = []
    for name, shards in settings.labelled.items():
        manifest = load_manifest(resolve_shards(shards))
        classes = sorted({label for label in read_labels(manifest, settings.label_key) if label is not None})
        if not classes:
            raise ValueError(f"eval.labelled.{name}: no sample of {shards} has a label {settings.label_key}")
        sets.append(LabelledSet(name, manifest, classes))
    return sets


@torch.no_grad()
def classify_sets(
    engine: Engine, sets: list[LabelledSet], config: Config, image: ImageSpec, tokenize: Tokenize
) -> dict[str, Accuracy]:
    """Accuracy on every set, by name. Collective.

    Raises: AgreedError for images that cannot be read.
    """
    results = {}
    engine.eval()
    for labelled in sets:
        texts = encode_texts(engine, labelled.classes, tokenize, config.micro_batch)
        samples = read_all(labelled.manifest, config.data, image, comm.rank(), comm.size(), config.eval.label_key)
        results[labelled.name] = _classify(engine, samples, labelled, texts, image, config.micro_batch)
    engine.train()
    return results


@torch.no_grad()
def encode_texts(engine: Engine, texts: list[str], tokenize: Tokenize, chunk: int) -> Tensor:
    """Unit features of texts, [n, D] fp32 on every rank, each rank encoding its part. Collective."""
    share = math.ceil(len(texts) / comm.size())
    padded = texts + [texts[0]] * (share * comm.size() - len(texts))
    mine = padded[comm.rank() * share : (comm.rank() + 1) * share]
    device = comm.local_device()
    parts = [engine(text=tokenize(mine[i : i + chunk]).to(device))[1] for i in range(0, share, chunk)]
    return comm.gather(torch.cat(parts))[: len(texts)]


def _classify(
    engine: Engine,
    samples: Iterator[tuple[Tensor, str, int]],
    labelled: LabelledSet,
    texts: Tensor,
    image: ImageSpec,
    chunk: int,
) -> Accuracy:
    device = comm.local_device()
    number = {label: place for place, label in enumerate(labelled.classes)}
    hits = torch.zeros(3, dtype=torch.int64, device=device)  # top-1, top-5, images
    problem: OSError | None = None
    # The same number on every rank, though one may have fewer readable samples, or none.
    for _ in range(math.ceil(math.ceil(labelled.manifest.num_samples / comm.size()) / chunk)):
        batch: list[tuple[Tensor, str, int]] = []
        try:
            batch = list(islice(samples, chunk))
        except OSError as error:
            problem = error
        pixels = torch.zeros(chunk, 3, *image.size, dtype=torch.uint8)
        target = torch.full((chunk,), -1)
        for row, (picture, label, _) in enumerate(batch):
            pixels[row], target[row] = picture, number[label]
        target = target.to(device)
        features = engine(image=pixels.to(device))[0]
        best = (features @ texts.T).topk(min(5, len(number)), dim=1).indices
        right = best == target[:, None]
        hits += torch.stack([right[:, 0].sum(), right.any(dim=1).sum(), (target >= 0).sum()])
    with comm.together(f"eval.labelled.{labelled.name}"):
        if problem is not None:
            raise problem
    top1, top5, count = comm.all_reduce_sum(hits).tolist()
    if not count:
        raise comm.AgreedError(f"eval.labelled.{labelled.name}: no image could be read")
    return Accuracy(top1 / count, top5 / count, count, len(number))
