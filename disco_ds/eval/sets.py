"""Load evaluation sets, images with labels or captions, and evaluate a model on them.

The layout is detected from the folder or file:

    shards          .tar files with their manifest.json (disco-ds index)
    csv             image paths and captions or labels; columns as in open_clip unless the settings name
                    others; for captions, rows with the same path are one image
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
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from disco_ds.config import DataSettings, EvalSettings
from disco_ds.config.text_file import read_text
from disco_ds.data import (
    CaptionedImages,
    ImageFolder,
    ImageSpec,
    Manifest,
    Table,
    index_shards,
    is_table,
    load_manifest,
    read_labels,
    resolve_shards,
    sort_labels,
)
from disco_ds.distributed import comm
from disco_ds.eval.encode import Encoder, ImageSet
from disco_ds.eval.pairs import HeldOutSet, RetrievalSet
from disco_ds.eval.probes import ProbeSet
from disco_ds.eval.results import Result
from disco_ds.eval.zero_shot import LabeledSet

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


def load_sets(settings: EvalSettings, data: DataSettings) -> list[ImageSet]:
    """Open all sets that the settings name, and read their labels.

    Raises:
        ValueError: If a set is missing, is empty, or does not fit the setting that names it; or if a
            label has no class name.
    """
    data = data.model_copy(update={"group_by": None})  # evaluations have no groups
    sets: list[ImageSet] = []
    for setting, load in (
        ("labeled", _load_labeled),
        ("retrieval", _load_retrieval),
        ("validation", _load_held_out),
        ("probes", _load_probe),
    ):
        for name, given in getattr(settings, setting).items():
            try:
                sets.append(load(name, given, settings, data))
            except ValueError as error:
                raise ValueError(f"eval.{setting}.{name}: {error}") from None
    return sets


# The towers are not compiled for evaluations: the batch size varies there, so torch.compile would afterwards compile
# the training step for a variable batch size too.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def evaluate_sets(
    model: nn.Module,
    sets: Sequence[ImageSet],
    spec: ImageSpec,
    tokenize: Callable[[list[str]], Tensor],
    chunk: int,
) -> list[Result]:
    """Evaluate the model on every set, in eval mode. Collective: every rank must call this.

    Afterwards, the model's previous mode is restored. No random number is drawn. The running statistics of batch
    normalization differ between ranks. Those of rank 0, which checkpoints contain, overwrite those of the other ranks.

    Args:
        model: An engine or a module.
        sets: What to evaluate on.
        spec: Size and resizing of the images.
        tokenize: The tokenizer.
        chunk: Number of images or texts per rank and forward pass.

    Raises:
        AgreedError: If shards cannot be read, if a set has no readable image, or if the training images of a
            probe have fewer than two labels.
    """
    training = model.training
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    if sets and buffers:
        statistics = comm.broadcast([buffer.cpu() for buffer in buffers])
        for buffer, value in zip(buffers, statistics, strict=True):
            buffer.copy_(value)
    encoder = Encoder(model, spec, tokenize, chunk)
    results = [item.evaluate(encoder) for item in sets]
    model.train(training)
    return results


def _load_labeled(name: str, path: str, settings: EvalSettings, data: DataSettings) -> LabeledSet:
    file, templates = settings.classes.get(name), settings.templates.get(name)
    images, labels = _open_labeled(name, path, settings, data)
    if isinstance(images.source, ImageFolder):
        classes = read_classes(file, labels) if file else _imagenet_classes(name, labels)
        templates = templates or _IMAGENET
    else:
        folder = resolve_shards(path)
        if _is_benchmark(folder):
            file = file or folder / "classnames.txt"
            provided = folder / "zeroshot_classification_templates.txt"
            templates = templates or (str(provided) if provided.is_file() else _IMAGENET)
        classes = read_classes(file, labels) if file else {label: label for label in labels}
    prompts = read_templates(templates) if templates else PLAIN
    return LabeledSet(**vars(images), classes=classes, templates=prompts)


def _load_retrieval(
    name: str, path: str, settings: EvalSettings, data: DataSettings
) -> RetrievalSet:
    return RetrievalSet(**vars(_open_captioned(name, path, settings, data)))


def _load_held_out(name: str, path: str, settings: EvalSettings, data: DataSettings) -> HeldOutSet:
    images = _open_captioned(name, path, settings, data)
    return HeldOutSet(**vars(images), batch=settings.validation_batch)


def _load_probe(name: str, probe: Any, settings: EvalSettings, data: DataSettings) -> ProbeSet:
    try:
        import sklearn  # noqa: F401 - probes.py needs it
    except ImportError as error:
        raise ValueError(f"{error}; pip install 'disco_ds[probes]'") from None
    train, _ = _open_labeled(name, probe.train, settings, data)
    test, _ = _open_labeled(name, probe.test, settings, data)
    return ProbeSet(**vars(test), train=train)


def _open_labeled(
    name: str, path: str, settings: EvalSettings, data: DataSettings
) -> tuple[ImageSet, list[str]]:
    """Open images with labels, and return them with their distinct labels."""
    if is_table(path):
        images = _open_table(name, path, settings.label_key, data, joins=False)
        return images, _list_texts(images, "label_key")
    images = _open(name, resolve_shards(path), data, settings.label_key, "{cls}")
    if isinstance(images.source, ImageFolder):
        return images, images.source.classes
    return images, _list_texts(images, "label_key")


def _open_captioned(name: str, path: str, settings: EvalSettings, data: DataSettings) -> ImageSet:
    """Open images with captions."""
    if is_table(path):
        is_default = settings.caption_key == _SHARDS_CAPTION
        caption = _CSV_CAPTION if is_default else settings.caption_key
        return _open_table(name, path, caption, data, joins=True)
    images = _open(name, resolve_shards(path), data, settings.caption_key, "{txt}")
    if isinstance(images.source, ImageFolder):
        raise ValueError(f"{path} contains no .tar shards; captions are read from shards or a csv")
    _list_texts(images, "caption_key")
    return images


def _open_table(name: str, path: str, text: str, data: DataSettings, joins: bool) -> ImageSet:
    """Open a csv. `joins`: rows with the same path are one image with several texts."""
    columns = {"image_key": f"{data.image_key};{_CSV_IMAGE}", "captions": {text: 1.0}}
    data = data.model_copy(update=columns)
    source = CaptionedImages.read_texts(Table.load(path, data), text, joins)
    return ImageSet(name, source, data, "{texts}")


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


def _list_texts(images: ImageSet, setting: str) -> list[str]:
    """Return the distinct labels or captions of all samples, sorted.

    Raises:
        ValueError: If no sample has a label or caption.
    """
    source = images.source
    if isinstance(source, CaptionedImages):
        texts = {text for part in source.texts if isinstance(part, list) for text in part}
    else:
        assert isinstance(source, Manifest)
        texts = {text for text in read_labels(source, images.text) if text}
    if not texts:
        hint = f"check eval.{setting}"
        if images.text == "{cls}":
            hint = "sets with several labels per image (.npy members) cannot be evaluated"
        raise ValueError(f"the template {images.text} gives no text for any sample; {hint}")
    return sorted(texts)


def read_templates(wanted: str) -> tuple[str, ...]:
    """Read the prompts from a text file, one per line, or a JSON list. For `imagenet`, return open_clip's 80 prompts.

    Raises:
        ValueError: If a prompt has no placeholder for the class, or there are no prompts.
    """
    if wanted == _IMAGENET:
        from open_clip import OPENAI_IMAGENET_TEMPLATES

        return tuple(fill("{c}") for fill in OPENAI_IMAGENET_TEMPLATES)
    lines = _read_list(Path(wanted), "template file")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"{wanted} must contain a list of prompts")
    for line in lines or [""]:
        if "{c}" not in line and "{}" not in line:
            raise ValueError(
                f"{wanted}: the template {line!r} has neither {{c}} nor {{}} in place of the class "
                "name"
            )
    return tuple(lines)


def _read_list(path: Path, what: str) -> Any:
    """Return the content of a JSON file, or the lines of a text file that are not blank.

    Raises:
        ValueError: If the file cannot be read, or is not valid JSON.
    """
    text = read_text(path, what)
    if path.suffix != ".json":
        return [line.strip() for line in text.split("\n") if line.strip()]
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def read_classes(path: Path, labels: Collection[str]) -> dict[str, str]:
    """Read the class name of each label from a file. All names in the file are possible answers.

    A JSON file contains a list of names, or a mapping from label to name. In a text file, each line is a name, or a
    label, a tab and a name. Names without labels belong to the labels in sorted order. But if all labels are
    numbers, the first name belongs to label 0 and so on, even if no sample has that label.

    Raises:
        ValueError: If the file cannot be read; if a label has no name; or if a file with only names has more names than
            labels, unless all labels are numbers.
    """
    given = _read_list(path, "class name file")
    if path.suffix != ".json" and all("\t" in line for line in given):
        pairs = [line.split("\t", 1) for line in given]
        given = {label.strip(): name.strip() for label, name in pairs}
    values = given.values() if isinstance(given, dict) else given
    if not (isinstance(given, dict | list) and all(isinstance(name, str) for name in values)):
        raise ValueError(f"{path} must contain class names, or a mapping from label to class name")
    if isinstance(given, dict):
        names = given
    else:
        numbered = all(label.isdecimal() for label in labels)
        keys = map(str, range(len(given))) if numbered else sort_labels(labels)
        names = dict(zip(keys, given, strict=False))
    missing = sort_labels(set(labels) - set(names))
    if missing or len(names) != len(given):
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
