"""Evaluation sets: images with labels or captions, in a layout that is detected from the folder.

    shards          .tar files with their manifest.json (disco-ds index)
    csv             image paths and captions, for retrieval and validation; columns as in open_clip
                    unless the settings name others
    image folder    one sub-folder per class: ImageNet val, -Sketch and -R (named by WordNet id),
                    -v2 (named 0 to 999)
    clip_benchmark  test/nshards.txt, test/0.tar ...; with labels in .cls, classnames.txt and
                    zeroshot_classification_templates.txt; or with captions in .txt, one per line,
                    and dataset_type.txt containing `retrieval`

All sets are checked when a run starts, so that a mistake is not discovered after the last step.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from disco_ds.config import DataSettings, EvalSettings
from disco_ds.data import (
    ImageFolder,
    Manifest,
    Table,
    index_shards,
    load_manifest,
    read_labels,
    resolve_shards,
    sort_labels,
)

logger = logging.getLogger(__name__)
PLAIN = ("{}",)
_IMAGENET = "imagenet"
_SHARDS_CAPTION = EvalSettings().caption_key
"""The default of eval.caption_key."""
_CSV_IMAGE = "filepath"
"""open_clip's default of --csv-img-key."""
_CSV_CAPTION = "{title}"
"""open_clip's default of --csv-caption-key.

For a csv it replaces the default of eval.caption_key, which is meant for shards.
"""


@dataclass(frozen=True)
class ImageSet:
    """Images with one text each.

    The text is a label for classification, or captions, one per line, for retrieval and validation.
    """

    name: str
    source: Manifest | ImageFolder | Table
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


def load_sets(settings: EvalSettings, data: DataSettings) -> list[ImageSet]:
    """Open all sets that the settings name, and read their labels.

    Raises:
        ValueError: If a set is missing, empty or of another kind, or a label has no class name.
    """
    sets = [_load_labeled(name, path, settings, data) for name, path in settings.labeled.items()]
    for name, path in settings.retrieval.items():
        sets.append(_load_captioned("retrieval", name, path, settings, data))
    for name, path in settings.validation.items():
        pairs = _load_captioned("validation", name, path, settings, data)
        sets.append(replace(pairs, batch=settings.validation_batch))
    return sets


def _load_labeled(name: str, shards: str, settings: EvalSettings, data: DataSettings) -> ImageSet:
    where = f"eval.labeled.{name}"
    folder = resolve_shards(shards)
    images = _open(name, where, folder, "classification", data, settings.label_key)
    file = settings.classes.get(name)
    templates = settings.templates.get(name)
    if isinstance(images.source, ImageFolder):
        labels = images.source.classes
        classes = read_classes(file, labels) if file else _imagenet_classes(where, labels)
        return replace(images, classes=classes, templates=read_templates(templates or _IMAGENET))
    assert isinstance(images.source, Manifest)
    # Shards do not list their classes, so the labels must be read from the samples.
    found = {label for label in read_labels(images.source, images.text) if label is not None}
    if not found:
        raise ValueError(
            f"{where}: no sample of {shards} has a label {images.text}; set eval.label_key"
        )
    if _is_benchmark(folder):
        file = file or folder / "classnames.txt"
        provided = folder / "zeroshot_classification_templates.txt"
        templates = templates or (str(provided) if provided.is_file() else _IMAGENET)
    classes = read_classes(file, found) if file else {label: label for label in sorted(found)}
    prompts = read_templates(templates) if templates else PLAIN
    return replace(images, classes=classes, templates=prompts)


def _load_captioned(
    kind: str, name: str, shards: str, settings: EvalSettings, data: DataSettings
) -> ImageSet:
    where = f"eval.{kind}.{name}"
    if Table.takes(shards):
        return _open_csv(name, where, shards, settings, data)
    folder = resolve_shards(shards)
    images = _open(name, where, folder, "retrieval", data, settings.caption_key)
    if not isinstance(images.source, Manifest):
        raise ValueError(
            f"{where}: {folder} contains no .tar shards; captions are read from shards or a csv"
        )
    if not any(read_labels(images.source, images.text)):
        raise ValueError(
            f"{where}: no sample of {shards} has a caption {images.text}; set eval.caption_key"
        )
    return images


def _open_csv(
    name: str, where: str, path: str, settings: EvalSettings, data: DataSettings
) -> ImageSet:
    """Open a csv of image paths and captions.

    Raises:
        ValueError: See Table.load.
    """
    caption = settings.caption_key
    if caption == _SHARDS_CAPTION:
        caption = _CSV_CAPTION
    columns = {"image_key": f"{data.image_key};{_CSV_IMAGE}", "captions": {caption: 1.0}}
    data = data.model_copy(update=columns)
    try:
        return ImageSet(name, Table.load(path, data), data, caption)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _is_benchmark(folder: Path) -> bool:
    return (folder / "test" / "nshards.txt").is_file()


def _open(
    name: str, where: str, folder: Path, kind: str, data: DataSettings, text: str
) -> ImageSet:
    """Open a folder in any of the layouts.

    Args:
        name: Name of the set.
        where: The setting, for messages.
        folder: The folder.
        kind: "classification" or "retrieval".
        data: How to read images from plain shards.
        text: Template of the label or captions in plain shards.

    Raises:
        ValueError: If the folder is missing or its content does not match its description.
    """
    if not folder.is_dir():
        raise ValueError(f"{where}: there is no folder {folder}")
    if _is_benchmark(folder):
        type_file = folder / "dataset_type.txt"
        found = _read(type_file).strip().lower() if type_file.is_file() else "classification"
        if found != kind:
            raise ValueError(f"{where}: {type_file} says {found}, expected {kind}")
        manifest = index_shards(folder / "test")
        expected = _read(folder / "test" / "nshards.txt").strip()
        if expected != str(len(manifest.shards)):
            raise ValueError(
                f"{where}: nshards.txt says {expected}, but {folder / 'test'} has "
                f"{len(manifest.shards)} .tar files"
            )
        # clip_benchmark's exports have fixed member names; those of the training data do not apply.
        data = data.model_copy(update={"image_key": "webp;png;jpg;jpeg"})
        return ImageSet(name, manifest, data, "{txt}" if kind == "retrieval" else "{cls}")
    if any(folder.glob("*.tar")):
        return ImageSet(name, load_manifest(folder), data, text)
    data = data.model_copy(update={"image_key": "image"})
    return ImageSet(name, ImageFolder(folder), data, "{cls}")


def read_templates(wanted: str) -> tuple[str, ...]:
    """Read the prompts in a file, one per line, or open_clip's 80 prompts for `imagenet`.

    Raises:
        ValueError: If a prompt has no placeholder for the class, or there are no prompts.
    """
    if wanted == _IMAGENET:
        from open_clip import OPENAI_IMAGENET_TEMPLATES

        return tuple(fill("{c}") for fill in OPENAI_IMAGENET_TEMPLATES)
    lines = tuple(line.strip() for line in _read(Path(wanted)).splitlines() if line.strip())
    for number, line in enumerate(lines or ("",), start=1):
        if "{c}" not in line and "{}" not in line:
            raise ValueError(
                f"{wanted}, template {number}: {line!r} has neither {{c}} nor {{}} "
                "in place of the class name"
            )
    return lines


def read_classes(path: Path, labels: Collection[str]) -> dict[str, str]:
    """Read class names by label from a file.

    The file is JSON (a list, or a mapping from label to name) or text (one name per line, or label
    and name per line). Names without labels belong to the labels in sorted order; but if all labels
    are numbers, the first name belongs to label 0 and so on, even if no sample has that label.
    Keras' format {"0": [wnid, name]} is accepted too.

    Raises:
        ValueError: If a label has no name.
    """
    text = _read(path)
    given: Any = [line.strip() for line in text.splitlines() if line.strip()]
    if path.suffix == ".json":
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
    else:
        words = [line.split(None, 1) for line in given]
        if all(len(pair) == 2 for pair in words) and set(labels) <= {pair[0] for pair in words}:
            given = dict(words)
    if isinstance(given, dict):
        pairs = [value if isinstance(value, list) else (key, value) for key, value in given.items()]
        names = {str(key): str(value) for key, value in pairs if key in labels}
    elif all(label.isdecimal() for label in labels):
        names = {str(number): name for number, name in enumerate(given)}
    else:
        names = dict(zip(sort_labels(labels), given, strict=False))
    missing = sort_labels(set(labels) - set(names))
    if missing or (isinstance(given, list) and len(names) != len(given)):
        example = f", for example {missing[0]!r}" if missing else ""
        raise ValueError(
            f"{path} names {len(given)} classes, but the images have {len(labels)} labels, "
            f"{len(missing)} of them without a name{example}; add a line or JSON entry for each"
        )
    return names


def _imagenet_classes(where: str, labels: list[str]) -> dict[str, str]:
    """Return open_clip's class names for ImageNet's WordNet ids (wnids) or numbers 0 to 999.

    The labels may be only some of the wnids. Sub-folders with other names are named after
    their classes, so those names are used.

    Raises:
        ValueError: If the labels are other numbers or wnids.
    """
    from open_clip import IMAGENET_CLASSNAMES
    from timm.data import ImageNetInfo

    # timm lists the wnids in the order of the class numbers, as open_clip lists the names.
    wnids = ImageNetInfo().label_names()
    numbers = [str(number) for number in range(len(wnids))]
    if set(labels) <= set(wnids) or set(labels) == set(numbers):
        keys = numbers if "0" in labels else wnids
        names = dict(zip(keys, IMAGENET_CLASSNAMES, strict=True))
        return {key: name for key, name in names.items() if key in set(labels)}
    if not all(re.fullmatch(r"\d+|n\d{8}", label) for label in labels):
        logger.warning(
            "%s: using the names of the sub-folders (%s ... %s) as class names",
            where,
            labels[0],
            labels[-1],
        )
        return {label: label.replace("_", " ") for label in labels}
    raise ValueError(
        f"{where}: the sub-folders ({labels[0]} ... {labels[-1]}) are neither wnids of ImageNet-1k "
        f"nor 0 to 999, so their class names are unknown; give a file with the names: "
        f"{where.replace('labeled', 'classes')}=FILE"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
