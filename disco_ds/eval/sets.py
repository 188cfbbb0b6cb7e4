"""Evaluation sets: images with labels or captions. The layout is detected from the folder or file.

    shards          .tar files with their manifest.json (disco-ds index)
    csv             image paths and captions, for retrieval and validation; columns as in open_clip
                    unless the settings name others; rows with the same path are one image
    image folder    one sub-folder per class: ImageNet val, -Sketch and -R (named by WordNet id),
                    -v2 (named 0 to 999), or named after the classes
    clip_benchmark  test/nshards.txt, test/0.tar ...; captions in .txt members, one per line, or labels
                    in .cls members with classnames.txt and zeroshot_classification_templates.txt

All sets are checked when a run starts, so that a mistake is reported before training and not after it.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from disco_ds.config import DataSettings, EvalSettings
from disco_ds.config.text_file import read_text
from disco_ds.data import (
    CaptionedImages,
    ImageFolder,
    Manifest,
    Table,
    index_shards,
    is_table,
    load_manifest,
    read_labels,
    resolve_shards,
    sort_labels,
)

logger = logging.getLogger(__name__)
PLAIN = ("{}",)
_IMAGENET = "imagenet"
_WNID = r"n\d{8}"
"""Matches a WordNet id."""
_SHARDS_CAPTION = EvalSettings().caption_key
"""The default of eval.caption_key."""
_CSV_IMAGE = "filepath"
"""open_clip's default of --csv-img-key."""
_CSV_CAPTION = "{title}"
"""open_clip's default of --csv-caption-key. For csv files, it is the default of eval.caption_key."""


@dataclass(frozen=True)
class ImageSet:
    """Images with one text each.

    The text is a label for classification, or captions, one per line, for retrieval and validation.
    """

    name: str
    source: Manifest | ImageFolder | CaptionedImages
    data: DataSettings
    """How to read the images: the members that may contain them, and their maximum size."""
    text: str
    """Template of a sample's label or captions, filled in from its members."""
    classes: dict[str, str] = field(default_factory=dict)
    """Label -> class name; empty for a set with captions."""
    templates: tuple[str, ...] = PLAIN
    """Prompts with {c} or {} in place of the class name."""
    batch: int = 0
    """Batch size of the validation loss; 0 for other evaluations."""
    train: ImageSet | None = None
    """Images that probes learn from; None for other evaluations."""


def load_sets(settings: EvalSettings, data: DataSettings) -> list[ImageSet]:
    """Open all sets that the settings name, and read their labels.

    Raises:
        ValueError: If a set is missing, is empty, or does not fit the setting that names it; or if a
            label has no class name.
    """
    loaders = {
        "labeled": _load_labeled,
        "retrieval": _load_captioned,
        "validation": _load_captioned,
        "probes": _load_probe,
    }
    sets = []
    for kind, load in loaders.items():
        for name, place in getattr(settings, kind).items():
            try:
                found = load(name, place, settings, data)
            except ValueError as error:
                raise ValueError(f"eval.{kind}.{name}: {error}") from None
            batch = settings.validation_batch if kind == "validation" else 0
            sets.append(replace(found, batch=batch))
    return sets


def _load_labeled(name: str, path: str, settings: EvalSettings, data: DataSettings) -> ImageSet:
    folder = resolve_shards(path)
    images = _open(name, folder, data, settings.label_key, "{cls}")
    file = settings.classes.get(name)
    templates = settings.templates.get(name)
    if isinstance(images.source, ImageFolder):
        labels = images.source.classes
        classes = read_classes(file, labels) if file else _imagenet_classes(name, labels)
        return replace(images, classes=classes, templates=read_templates(templates or _IMAGENET))
    labels = _read_texts(images, "label_key")
    if _is_benchmark(folder):
        file = file or folder / "classnames.txt"
        provided = folder / "zeroshot_classification_templates.txt"
        templates = templates or (str(provided) if provided.is_file() else _IMAGENET)
    classes = read_classes(file, labels) if file else {label: label for label in labels}
    prompts = read_templates(templates) if templates else PLAIN
    return replace(images, classes=classes, templates=prompts)


def _load_captioned(name: str, path: str, settings: EvalSettings, data: DataSettings) -> ImageSet:
    if is_table(path):
        caption = settings.caption_key
        if caption == _SHARDS_CAPTION:
            caption = _CSV_CAPTION
        columns = {"image_key": f"{data.image_key};{_CSV_IMAGE}", "captions": {caption: 1.0}}
        data = data.model_copy(update=columns)
        source = CaptionedImages.load(Table.load(path, data), caption)
        return ImageSet(name, source, data, "{captions}")
    images = _open(name, resolve_shards(path), data, settings.caption_key, "{txt}")
    if isinstance(images.source, ImageFolder):
        raise ValueError(f"{path} contains no .tar shards; captions are read from shards or a csv")
    _read_texts(images, "caption_key")
    return images


def _load_probe(name: str, probe: Any, settings: EvalSettings, data: DataSettings) -> ImageSet:
    try:
        import sklearn  # noqa: F401 - probes.py needs it
    except ImportError as error:
        raise ValueError(f"{error}; pip install 'disco_ds[probes]'") from None
    train, test = (
        _open(name, resolve_shards(path), data, settings.label_key, "{cls}")
        for path in (probe.train, probe.test)
    )
    return replace(test, train=train)


def _is_benchmark(folder: Path) -> bool:
    return (folder / "test" / "nshards.txt").is_file()


def _open(name: str, folder: Path, data: DataSettings, text: str, benchmark_text: str) -> ImageSet:
    """Open an evaluation set from a folder in any supported layout.

    Args:
        name: Name of the set.
        folder: The folder.
        data: How to read images from shards, if the set does not have clip_benchmark's layout.
        text: Template of the label or captions in these shards.
        benchmark_text: Template of the label or captions in shards that have clip_benchmark's layout.

    Raises:
        ValueError: If the folder is missing, empty or incomplete.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    if _is_benchmark(folder):
        manifest = index_shards(folder / "test")
        num_expected = read_text(folder / "test" / "nshards.txt", "file").strip()
        if num_expected != str(len(manifest.shards)):
            raise ValueError(
                f"{folder / 'test'} has {len(manifest.shards)} .tar files, but its nshards.txt "
                f"says {num_expected}; download the missing files"
            )
        # clip_benchmark's exports have fixed member names; the training data's names do not apply.
        data = data.model_copy(update={"image_key": "webp;png;jpg;jpeg"})
        return ImageSet(name, manifest, data, benchmark_text)
    if any(folder.glob("*.tar")):
        # Try the usual names too, because data.image_key may name a column of a training csv.
        data = data.model_copy(update={"image_key": f"{data.image_key};jpg;jpeg;png;webp"})
        return ImageSet(name, load_manifest(folder), data, text)
    data = data.model_copy(update={"image_key": "image"})
    return ImageSet(name, ImageFolder(folder), data, "{cls}")


def _read_texts(images: ImageSet, setting: str) -> list[str]:
    """Read the labels or captions of all samples in shards, and return the distinct texts in sorted order.

    Raises:
        ValueError: If no sample has a label or caption.
    """
    assert isinstance(images.source, Manifest)
    texts = sorted({text for text in read_labels(images.source, images.text) if text})
    if not texts:
        raise ValueError(
            f"the template {images.text} gives no text for any sample; check eval.{setting}"
        )
    return texts


def read_templates(wanted: str) -> tuple[str, ...]:
    """Read the prompts from a file, one per line. For `imagenet`, return open_clip's 80 prompts.

    Raises:
        ValueError: If a prompt has no placeholder for the class, or there are no prompts.
    """
    if wanted == _IMAGENET:
        from open_clip import OPENAI_IMAGENET_TEMPLATES

        return tuple(fill("{c}") for fill in OPENAI_IMAGENET_TEMPLATES)
    text = read_text(Path(wanted), "template file")
    lines = tuple(line.strip() for line in text.split("\n") if line.strip())
    for line in lines or ("",):
        if "{c}" not in line and "{}" not in line:
            raise ValueError(
                f"{wanted}: the template {line!r} has neither {{c}} nor {{}} in place of the class "
                "name"
            )
    return lines


def read_classes(path: Path, labels: Collection[str]) -> dict[str, str]:
    """Read the class name of each label from a file.

    A JSON file contains a list of names, or a mapping from label to name. In a text file, each line is a
    name, or a label, a tab and a name. A space may replace the tab, unless the complete lines could be names too.
    If the file has only names, they belong to the labels in sorted order. But if all labels are numbers,
    the first name belongs to label 0 and so on, even if no sample has that label.

    Raises:
        ValueError: If the file cannot be read; if a label has no name; if it is unclear whether the lines begin with
            labels; or if a file with only names has more names than labels, unless all labels are numbers.
    """
    text = read_text(path, "class name file")
    given: Any = [line.strip() for line in text.split("\n") if line.strip()]
    if path.suffix == ".json":
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
    else:
        separator = "\t" if all("\t" in line for line in given) else None
        words = [line.split(separator, 1) for line in given]
        named = {pair[0].strip(): pair[-1].strip() for pair in words}
        if separator or (all(len(pair) == 2 for pair in words) and set(labels) <= named.keys()):
            if not separator and _may_be_names(given, labels):
                label, name = words[0]
                raise ValueError(
                    f"{path}: the name of label {label} may be {name!r} or {given[0]!r}; write a tab between label "
                    "and name, or, if the file has only names, make it a JSON list"
                )
            given = named
    values = given.values() if isinstance(given, dict) else given
    if not (isinstance(given, dict | list) and all(isinstance(name, str) for name in values)):
        raise ValueError(f"{path} must contain class names, or a mapping from label to class name")
    if isinstance(given, dict):
        names = {label: given[label] for label in labels if label in given}
    elif all(label.isdecimal() for label in labels):
        names = {str(number): name for number, name in enumerate(given)}
    else:
        names = dict(zip(sort_labels(labels), given, strict=False))
    missing = sort_labels(set(labels) - set(names))
    if missing or (isinstance(given, list) and len(names) != len(given)):
        raise ValueError(
            f"{path} must contain one name for each label; class names: {len(given)}, labels: "
            f"{len(labels)}, labels without a name: {', '.join(missing[:3]) or 'none'}"
        )
    repeated = {name for name, count in Counter(names.values()).items() if count > 1}
    if repeated:
        logger.warning(
            "%s: several classes have the same name: %s", path, ", ".join(sorted(repeated))
        )
    return names


def _may_be_names(lines: list[str], labels: Collection[str]) -> bool:
    """Return whether each line may be a complete class name, although the lines begin with labels.

    The names would then belong to the labels in sorted order.
    """
    if all(re.fullmatch(_WNID, label) for label in labels):
        return False
    reaches = all(label.isdecimal() and int(label) < len(lines) for label in labels)
    return len(lines) == len(labels) or reaches


def _imagenet_classes(name: str, labels: list[str]) -> dict[str, str]:
    """Return open_clip's class names for ImageNet's WordNet ids (wnids) or numbers 0 to 999.

    Some of the wnids may be missing in `labels`. If any label looks neither like a wnid nor like a number, the labels
    themselves are used as the class names.

    Raises:
        ValueError: If every label looks like a wnid or a number, but the labels are neither known wnids nor exactly the
            numbers 0 to 999.
    """
    from open_clip import IMAGENET_CLASSNAMES
    from timm.data import ImageNetInfo

    # timm lists the wnids in the order of the class numbers, as open_clip lists the names.
    wnids = ImageNetInfo().label_names()
    numbers = list(map(str, range(len(wnids))))
    keys = numbers if "0" in labels else wnids
    if labels == numbers or set(labels) <= set(wnids):
        names = dict(zip(keys, IMAGENET_CLASSNAMES, strict=True))
        return {label: names[label] for label in labels}
    span = f"{labels[0]} ... {labels[-1]}"
    if all(re.fullmatch(rf"\d+|{_WNID}", label) for label in labels):
        raise ValueError(
            f"the sub-folders ({span}) are neither wnids of ImageNet-1k nor 0 to 999, so their "
            f"class names are unknown; give a file with the names: eval.classes.{name}=FILE"
        )
    logger.warning("eval.labeled.%s: using the sub-folders' names (%s) as class names", name, span)
    return {label: label.replace("_", " ") for label in labels}
