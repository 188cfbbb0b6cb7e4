"""What a model is evaluated on: images with labels or captions, in a layout that is recognised from the folder.

    shards          .tar files with their manifest.json (disco-ds index)
    csv             of image paths and captions, for those two; open_clip's column names unless the settings say others
    image folder    a sub-folder per class: ImageNet val, -Sketch and -R (named by wnid), -v2 (named 0 to 999)
    clip_benchmark  test/nshards.txt, test/0.tar ...; classnames.txt and zeroshot_classification_templates.txt, with
                    labels in .cls, or dataset_type.txt saying `retrieval`, with captions in .txt, one per line

Everything is checked when a run starts, so that no mistake is found only after the last step.
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
_CSV_IMAGE, _CSV_CAPTION = "filepath", "{title}"
"""open_clip's --csv-img-key and --csv-caption-key, for a csv beside which the settings describe shards."""


@dataclass(frozen=True)
class ImageSet:
    """Images with a text each: a label, for classification, or captions, one per line, for retrieval."""

    name: str
    source: Manifest | ImageFolder | Table
    data: DataSettings
    """Settings of reading: the members that may hold the image, and its maximum size."""
    text: str
    """Template of a sample's label or captions, filled with its members."""
    classes: dict[str, str] = field(default_factory=dict)
    """Label -> class name; empty for a set with captions."""
    templates: tuple[str, ...] = PLAIN
    """Prompts, with {c} or {} in place of the class name."""
    batch: int = 0
    """Pairs of a batch of the validation loss; 0: another evaluation."""


def load_sets(settings: EvalSettings, data: DataSettings) -> list[ImageSet]:
    """The sets that the settings name, with their labels.

    Raises: ValueError for a set that is missing, empty or of another kind, and for labels without a class name.
    """
    labelled = [_load_labelled(name, shards, settings, data) for name, shards in settings.labelled.items()]
    captioned = [
        _load_captioned("retrieval", name, shards, settings, data) for name, shards in settings.retrieval.items()
    ]
    pairs = [
        _load_captioned("validation", name, shards, settings, data) for name, shards in settings.validation.items()
    ]
    return [*labelled, *captioned, *(replace(item, batch=settings.validation_batch) for item in pairs)]


def _load_labelled(name: str, shards: str, settings: EvalSettings, data: DataSettings) -> ImageSet:
    where, folder = f"eval.labelled.{name}", resolve_shards(shards)
    images = _open(name, where, folder, "classification", data, settings.label_key)
    source, file = images.source, settings.classes.get(name)
    wanted = settings.templates.get(name, _IMAGENET)
    if isinstance(source, ImageFolder):
        classes = read_classes(file, source.classes) if file else _imagenet_classes(where, source.classes)
        return replace(images, classes=classes, templates=read_templates(wanted))
    assert isinstance(source, Manifest)
    # Which labels there are is known only from the samples: shards do not list their classes.
    labels = {label for label in read_labels(source, images.text) if label is not None}
    if not labels:
        raise ValueError(f"{where}: no sample of {shards} has a label {images.text}")
    if _is_benchmark(folder):
        own = folder / "zeroshot_classification_templates.txt"
        file = file or folder / "classnames.txt"
        wanted = settings.templates.get(name, str(own) if own.is_file() else _IMAGENET)
    classes = read_classes(file, labels) if file else {label: label for label in sorted(labels)}
    plain = name not in settings.templates and not _is_benchmark(folder)
    return replace(images, classes=classes, templates=PLAIN if plain else read_templates(wanted))


def _load_captioned(kind: str, name: str, shards: str, settings: EvalSettings, data: DataSettings) -> ImageSet:
    where = f"eval.{kind}.{name}"
    if Table.takes(shards):
        return _open_table(name, where, shards, settings, data)
    folder = resolve_shards(shards)
    images = _open(name, where, folder, "retrieval", data, settings.caption_key)
    if not isinstance(images.source, Manifest):
        raise ValueError(f"{where}: {folder} holds no .tar shards; captions come from shards")
    if not any(read_labels(images.source, images.text)):
        raise ValueError(f"{where}: no sample of {shards} has a caption {images.text}; set eval.caption_key")
    return images


def _open_table(name: str, where: str, path: str, settings: EvalSettings, data: DataSettings) -> ImageSet:
    """The rows of a csv. Raises: ValueError, see Table.load."""
    caption = settings.caption_key if settings.caption_key != _SHARDS_CAPTION else _CSV_CAPTION
    data = data.model_copy(update={"image_key": f"{data.image_key};{_CSV_IMAGE}", "captions": {caption: 1.0}})
    try:
        return ImageSet(name, Table.load(path, None, data), data, caption)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _is_benchmark(folder: Path) -> bool:
    return (folder / "test" / "nshards.txt").is_file()


def _open(name: str, where: str, folder: Path, kind: str, data: DataSettings, text: str) -> ImageSet:
    """The images of a folder in any of the layouts, and how to read them; `text` is the template for plain shards."""
    if not folder.is_dir():
        raise ValueError(f"{where}: there is no folder {folder}")
    if _is_benchmark(folder):
        stated = folder / "dataset_type.txt"
        found = _read(stated).strip().lower() if stated.is_file() else "classification"
        if found != kind:
            raise ValueError(f"{where}: {stated} says {found}, expected {kind}")
        manifest = index_shards(folder / "test")
        number = _read(folder / "test" / "nshards.txt").strip()
        if number != str(len(manifest.shards)):
            raise ValueError(f"{where}: nshards.txt says {number}, {folder / 'test'} has {len(manifest.shards)} .tar")
        # The members of clip_benchmark's own export, whatever the training data are called.
        data = data.model_copy(update={"image_key": "webp;png;jpg;jpeg"})
        return ImageSet(name, manifest, data, "{txt}" if kind == "retrieval" else "{cls}")
    if any(folder.glob("*.tar")):
        return ImageSet(name, load_manifest(folder), data, text)
    return ImageSet(name, ImageFolder(folder), data.model_copy(update={"image_key": "image"}), "{cls}")


def read_templates(wanted: str) -> tuple[str, ...]:
    """The prompts in a file, one per line, or open_clip's 80 prompts for `imagenet`. Raises: ValueError."""
    if wanted == _IMAGENET:
        from open_clip import OPENAI_IMAGENET_TEMPLATES

        return tuple(fill("{c}") for fill in OPENAI_IMAGENET_TEMPLATES)
    lines = tuple(line.strip() for line in _read(Path(wanted)).splitlines() if line.strip())
    for number, line in enumerate(lines or ("",), start=1):
        if "{c}" not in line and "{}" not in line:
            raise ValueError(f"{wanted}, template {number}: {line!r} has neither {{c}} nor {{}} where the class goes")
    return lines


def read_classes(path: Path, labels: Collection[str]) -> dict[str, str]:
    """Class names by label, from a file: JSON (list, or mapping from label) or lines (name, or label and name).

    Names without labels belong to the labels in sorted order. If the labels are numbers, the first name belongs to
    label 0, and so on, even if no sample has that label. Keras' format {"0": [wnid, name]} is understood as well.

    Raises: ValueError for a label without a name.
    """
    given: Any = [line.strip() for line in _read(path).splitlines() if line.strip()]
    if path.suffix == ".json":
        try:
            given = json.loads(_read(path))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
    elif set(labels) <= {line.split()[0] for line in given} and all(len(line.split()) > 1 for line in given):
        given = dict(line.split(None, 1) for line in given)
    if isinstance(given, dict):
        pairs = [value if isinstance(value, list) else (key, value) for key, value in given.items()]
        names = {str(key): str(value) for key, value in pairs if key in labels}
    else:
        numbered = all(label.isdecimal() for label in labels)
        names = dict(zip(map(str, range(len(given))) if numbered else sort_labels(labels), given, strict=False))
    missing = sort_labels(set(labels) - set(names))
    if missing or (len(names) != len(given) and isinstance(given, list)):
        example = f", such as {missing[0]!r}" if missing else ""
        raise ValueError(
            f"{path} names {len(given)} classes, the images have {len(labels)} labels, {len(missing)} of them without "
            f"a name{example}; give a line or a JSON entry for each"
        )
    return names


def _imagenet_classes(where: str, labels: list[str]) -> dict[str, str]:
    """open_clip's names of ImageNet's classes, for some or all wnids, or for 0 to 999. Other names are their own.

    Raises: ValueError for other numbers and wnids.
    """
    from open_clip import IMAGENET_CLASSNAMES
    from timm.data import ImageNetInfo

    # timm lists the wnids in the order of the class numbers, as open_clip lists the names.
    wnids = ImageNetInfo().label_names()
    numbers = [str(number) for number in range(len(wnids))]
    if set(labels) <= set(wnids) or set(labels) == set(numbers):
        keys = numbers if "0" in labels else wnids
        return {key: name for key, name in zip(keys, IMAGENET_CLASSNAMES, strict=True) if key in set(labels)}
    if not all(re.fullmatch(r"\d+|n\d{8}", label) for label in labels):
        logger.warning(
            "%s: the names of the sub-folders (%s ... %s) are taken as classes", where, labels[0], labels[-1]
        )
        return {label: label.replace("_", " ") for label in labels}
    raise ValueError(
        f"{where}: the sub-folders ({labels[0]} ... {labels[-1]}) are neither wnids of ImageNet-1k nor 0 to 999, so "
        f"their class names are not known; name a file that has them: {where.replace('labelled', 'classes')}=FILE"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
