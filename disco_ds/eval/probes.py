"""Probes: the accuracy of simple classifiers that are trained on image features, without the text tower."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from disco_ds.distributed import comm, jobs
from disco_ds.eval.encode import Encoder, gather_rows
from disco_ds.eval.results import Result
from disco_ds.eval.sets import ImageSet, import_sklearn

_NEIGHBORS = 20
"""DINO's number of neighbors (Caron et al. 2021, section 4.1)."""
_C = 0.316
"""Inverse regularization strength of the linear probe in OpenAI's CLIP repository."""
_ITERATIONS = 1000


def probe(encoder: Encoder, images: ImageSet) -> Result:
    """Train probes on the images of `images.train`, and classify the images of the set. Collective.

    The values are the accuracies of scikit-learn's KNeighborsClassifier (cosine distance) and LogisticRegression on
    unit features. Only rank 0 computes them, but the features of both sets must fit in the memory of every rank.

    Raises:
        AgreedError: If shards cannot be read, or the training images have fewer than two labels.
    """
    assert images.train is not None
    train, labels = _encode(encoder, images.train)
    test, expected = _encode(encoder, images)

    def score() -> dict[str, float]:
        if len(set(labels)) < 2:
            raise ValueError("the training images must have at least two labels")
        linear_model, neighbors = import_sklearn()
        nearest = neighbors.KNeighborsClassifier(min(_NEIGHBORS, len(train)), metric="cosine")
        linear = linear_model.LogisticRegression(C=_C, max_iter=_ITERATIONS, random_state=0)
        return {
            name: float(probe.fit(train, labels).score(test, expected))
            for name, probe in (("knn", nearest), ("linear", linear))
        }

    # A job, because fitting may take longer than the timeout of a collective.
    what = f"probes on {images.name}"
    scores = jobs.run(what, lambda: score() if comm.rank() == 0 else {})
    values = comm.from_rank_0(what, lambda: scores)
    counts = {
        "num_classes": len(set(labels)),
        "num_train": len(labels),
        "num_images": len(expected),
        "num_broken": images.source.num_samples - len(expected),
    }
    return Result("probe", images.name, values, counts)


def _encode(encoder: Encoder, images: ImageSet) -> tuple[NDArray[np.float32], list[str]]:
    """Return the features [n, D] and the labels of all ranks' images, in the order of the set."""
    features, places = [], list[tuple[int, str]]()
    for rows, samples in encoder.encode_images(images):
        features.append(rows)
        places += [(index, label) for _, label, index in samples]
    gathered = gather_rows(torch.cat(features)).cpu().numpy()
    found = [place for part in comm.gather_objects(places) for place in part]
    order = sorted(range(len(found)), key=lambda row: found[row][0])
    return gathered[order], [found[row][1] for row in order]
