"""Probes on several ranks have the accuracies that scikit-learn computes from the image features of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from threadpoolctl import threadpool_limits

from disco_ds.cli.main import main
from disco_ds.config import DataSettings, EvalSettings, ModelSettings, load_config
from disco_ds.data import ImageSpec, read_all
from disco_ds.eval import Encoder, evaluate_sets, load_sets
from disco_ds.eval.probes import train_linear
from disco_ds.models.clip import build_model, build_tokenizer
from helpers.dist import run_ranks
from helpers.shards import encode
from helpers.tiny_run import recipe
from helpers.towers import BPE_SIZE, write_tiny

SPEC = ImageSpec((32, 32))
COLORS = {"red": (200, 60, 40), "green": (60, 190, 70), "blue": (50, 70, 200)}


def write_images(folder: Path, count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    for label, color in COLORS.items():
        (folder / label).mkdir(parents=True)
        for number in range(count):
            pixels = np.clip(rng.normal(color, 90, (32, 32, 3)), 0, 255).astype(np.uint8)
            (folder / label / f"{number}.png").write_bytes(encode(Image.fromarray(pixels)))
    (folder / "red" / "broken.png").write_bytes(b"no image")
    return str(folder)


def make_model(name: str) -> tuple[Any, Any]:
    settings = ModelSettings(name=name)
    torch.manual_seed(0)
    model = build_model(settings)
    return model, build_tokenizer(settings, model)


def evaluate(name: str, settings: EvalSettings) -> Any:
    model, tokenizer = make_model(name)
    (result,) = evaluate_sets(Encoder(model, SPEC, tokenizer, 4), load_sets(settings, DATA))
    return result.values, result.counts


DATA = DataSettings(source="synthetic")


def evaluate_and_encode(name: str, settings: EvalSettings) -> tuple[Any, list[Any]]:
    """Evaluate. Also return features and labels of both sets, each from one forward pass."""
    result = evaluate(name, settings)
    (item,) = load_sets(settings, DATA)
    model, _ = make_model(name)
    model.eval()
    parts: list[Any] = []
    for images in (item.train, item):
        assert images is not None
        samples = list(read_all(images.source, images.data, SPEC, 0, 1, images.text))
        with torch.no_grad():
            features = model(image=torch.stack([image for image, _, _ in samples]))[0].numpy()
        parts += [features, [label for _, label, _ in samples]]
    return result, parts


def vote(distance: Any) -> Any:
    return np.exp(-distance / 0.07)


def make_features(num_classes: int, count: int, seed: int) -> tuple[Any, Any]:
    """Return labeled unit features that are all close to each other. The noise exceeds the distance between classes."""
    centers = np.random.default_rng(0).normal(size=(num_classes, 16))
    labels = np.repeat(np.arange(num_classes), count)
    features = 50 + 4 * np.random.default_rng(seed).normal(size=(len(labels), 16))
    features[:, 8:] = 50 + features[:, 8:] / 20 + centers[labels, 8:]
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return features.astype(np.float32), labels.astype(str)


def test_linear_probe_finds_its_regularization() -> None:
    with threadpool_limits(1):
        train, labels = make_features(12, 20, 1)
        test, expected = make_features(12, 20, 2)
        weak = LogisticRegression(C=0.316, max_iter=1000).fit(train, labels)
        assert weak.score(test, expected) < 0.5
        found = train_linear(train, labels)
        assert found.C >= 1000
        assert found.score(test, expected) > 0.95
        # The gradient of many classes is small, which must not end the training.
        train, labels = make_features(60, 6, 1)
        test, expected = make_features(60, 6, 2)
        default = LogisticRegression(C=1e4, max_iter=1000).fit(train, labels)
        better = train_linear(train, labels).score(test, expected)
        assert better > default.score(test, expected) + 0.1
    with pytest.raises(ValueError, match="two labels with several images"):
        train_linear(train[:7], np.array(["a", *"bbbbbb"]))


def test_probes_are_scikit_learns_at_any_number_of_ranks(tmp_path: Path) -> None:
    train, test = write_images(tmp_path / "train", 12, 0), write_images(tmp_path / "test", 7, 1)
    settings = EvalSettings(probes={"colors": {"train": train, "test": test}})
    name = write_tiny(tmp_path, BPE_SIZE)
    ((alone, parts),) = run_ranks(evaluate_and_encode, 1, name, settings)
    train_x, train_y, test_x, test_y = parts
    nearest = KNeighborsClassifier(20, metric="cosine", weights=vote).fit(train_x, train_y)
    # Hold out a fifth of each class's images, and try values of C in half decades.
    best: tuple[float, float] = (-1.0, 0.0)
    shuffled = np.random.default_rng(0).permutation(36)
    order = shuffled[np.argsort(np.array(train_y)[shuffled], kind="stable")]
    held_out = set(order[::5].tolist())
    parts = [[row for row in range(36) if (row in held_out) == held] for held in (False, True)]
    (x, y), (held_x, held_y) = ((train_x[part], [train_y[row] for row in part]) for part in parts)
    for exponent in np.arange(-2, 6.5, 0.5):
        linear = LogisticRegression(C=10**exponent, max_iter=1000, tol=1e-4 / 3).fit(x, y)
        best = max(best, (linear.score(held_x, held_y), -exponent))
    strength = 10 ** -best[1]
    linear = LogisticRegression(C=strength, max_iter=1000, tol=1e-4 / 3).fit(train_x, train_y)
    expected = {"knn": nearest.score(test_x, test_y), "linear": linear.score(test_x, test_y)}
    expected["linear_C"] = strength
    assert expected["linear"] > 0.4
    counts = {"num_classes": 3, "num_train": 36, "num_images": 21, "num_broken": 1}
    for values, found in (alone, *run_ranks(evaluate, 2, name, settings)):
        # Batches of another size round differently, which may move one image across a border.
        assert values == pytest.approx(expected, abs=1.01 / 21)
        assert found == counts


def test_missing_folder_and_single_label_are_named(tmp_path: Path) -> None:
    probes = {"colors": {"train": str(tmp_path / "none"), "test": str(tmp_path / "none")}}
    with pytest.raises(ValueError, match=r"eval\.probes\.colors: .*none"):
        load_sets(EvalSettings(probes=probes), DATA)
    with pytest.raises(ValueError, match=r"eval\.probes\.colors\.test"):
        load_config(recipe(tmp_path), [f"eval.probes.colors.train={tmp_path}"])


def test_command_evaluates_a_run_of_two_views(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Zero-shot evaluation is refused for such a run: its text tower is not trained."""
    train, test = write_images(tmp_path / "train", 8, 0), write_images(tmp_path / "test", 5, 1)
    views = ["model.two_views=true", "data.augment.color_jitter=[0.2,0.2,0.2,0.1]"]
    views += ["loss.name=nt_xent"]
    path = recipe(tmp_path)
    with pytest.raises(ValueError, match=r"two_views .*eval\.probes"):
        load_config(path, [*views, f"eval.labeled.colors={test}"])
    probes = f"eval.probes.colors={{train: {train}, test: {test}}}"
    command = ["train", "--config", str(path), "steps=1", *views, probes]
    assert run_ranks(main, 1, command, joined=False) == [0]
    output = capfd.readouterr().out
    assert "knn" in output
    assert "linear" in output
