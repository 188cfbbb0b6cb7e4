"""Probes: the accuracy of simple classifiers that are trained on image features, without the text tower."""

import warnings
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from disco_ds.distributed import comm, jobs
from disco_ds.eval.encode import Encoder, ImageSet, gather_rows
from disco_ds.eval.results import Result

_NEIGHBORS, _TEMPERATURE = 20, 0.07
"""DINO's number of neighbors, and the temperature of their votes (Caron et al. 2021, section 4.1)."""
_STRENGTHS = np.logspace(-2, 6, 17)
"""Values of LogisticRegression's C, the inverse regularization strength, among which train_linear chooses.

OpenAI's value 0.316 is for features that are not normalized.
"""
_VALIDATION = 5
"""One in this many training images is held out to choose LogisticRegression's C."""
_ITERATIONS = 1000
_TOLERANCE = 1e-4
"""scikit-learn's default tolerance: training stops when the gradient is smaller than this. train_linear divides it by
the number of classes, because more classes make the gradient smaller. With 1,000 classes, even the first gradient is
below 1e-4, so nothing would be trained."""


@dataclass(frozen=True)
class ProbeSet(ImageSet):
    """Images with labels, on which classifiers of image features are tested."""

    train: ImageSet
    """Images that the classifiers learn from."""

    def evaluate(self, encoder: Encoder) -> Result:
        """Train classifiers on the features of `train`, and measure their accuracy on this set. Collective.

        The features have unit length. The values are:
            knn: Accuracy of scikit-learn's KNeighborsClassifier with cosine distance.
            linear: Accuracy of scikit-learn's LogisticRegression.
            linear_C: Inverse regularization strength C of LogisticRegression, which train_linear chooses.

        Only rank 0 computes them, but the features of both sets must fit in the memory of every rank.

        Raises:
            AgreedError: If shards cannot be read, or the training images have too few labels.
        """
        train, labels = _encode(encoder, self.train)
        test, expected = _encode(encoder, self)

        def score() -> dict[str, float]:
            if comm.rank() > 0:
                return {}
            from sklearn.neighbors import KNeighborsClassifier

            nearest = KNeighborsClassifier(
                min(_NEIGHBORS, len(train)),
                metric="cosine",
                weights=lambda distance: np.exp((1 - distance) / _TEMPERATURE),
            ).fit(train, labels)
            linear = train_linear(train, labels)
            return {
                "knn": float(nearest.score(test, expected)),
                "linear": float(linear.score(test, expected)),
                "linear_C": float(linear.C),
            }

        # Run as a job (see distributed/jobs.py), because fitting may take longer than the timeout of a collective.
        values = comm.broadcast(jobs.run(f"probes on {self.name}", score))
        counts = {
            "num_classes": len(set(labels)),
            "num_train": len(labels),
            "num_images": len(expected),
            "num_broken": self.source.num_samples - len(expected),
        }
        return Result("probe", self.name, values, counts)


def train_linear(features: NDArray[np.float32], labels: NDArray[np.str_]) -> Any:
    """Train scikit-learn's LogisticRegression on unit features, a row for each image.

    The inverse regularization strength C is the one with the best accuracy on a held-out fifth of the images of each
    class, as in OpenAI's CLIP (Radford et al. 2021, section A.3). The classifier is then trained on all images.

    Raises:
        ValueError: If the images that are not held out have fewer than two labels.
    """
    from sklearn.linear_model import LogisticRegression

    shuffled = np.random.default_rng(0).permutation(len(labels))
    # In the order of labels, every fifth image makes a stratified sample.
    order = shuffled[labels[shuffled].argsort(kind="stable")]
    held_out, rest = order[::_VALIDATION], np.delete(order, np.s_[::_VALIDATION])
    if len(set(labels[rest])) < 2:
        raise ValueError(
            "the training images must have at least two labels with several images each"
        )
    options = {
        "max_iter": _ITERATIONS,
        "tol": _TOLERANCE / len(set(labels)),
        "random_state": 0,
    }
    linear = LogisticRegression(warm_start=True, **options)
    with warnings.catch_warnings():
        # Reaching the maximum number of iterations is not a problem.
        warnings.simplefilter("ignore")
        scores = [
            linear.set_params(C=strength)
            .fit(features[rest], labels[rest])
            .score(features[held_out], labels[held_out])
            for strength in _STRENGTHS
        ]
        best = float(_STRENGTHS[np.argmax(scores)])
        return LogisticRegression(C=best, **options).fit(features, labels)


def _encode(encoder: Encoder, images: ImageSet) -> tuple[NDArray[np.float32], NDArray[np.str_]]:
    """Encode a set on all ranks. Collective.

    Returns:
        On every rank: the features, a row for each image, and the labels of all images, in the order of the set.
    """
    features, labels_by_id = [], list[tuple[int, str]]()
    for rows, samples in encoder.encode_images(images):
        features.append(rows)
        labels_by_id += [(index, label) for _, label, index in samples]
    gathered = gather_rows(torch.cat(features)).cpu().numpy()
    ids, labels = zip(*chain.from_iterable(comm.gather_objects(labels_by_id)), strict=True)
    order = np.argsort(ids)
    return gathered[order], np.array(labels)[order]
