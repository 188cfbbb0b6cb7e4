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

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.nn.modules.batchnorm import _BatchNorm

from disco_ds.config import DataSettings, EvalSettings
from disco_ds.config.text_file import read_text
from disco_ds.data import (
    CaptionedImages,
    ImageFolder,
    Source,
    Table,
    index_shards,
    is_table,
    load_manifest,
    read_labels,
    resolve_shards,
    sort_labels,
)
from disco_ds.distributed import comm
from disco_ds.eval.encode import Encoder, ImageSet, split_lines
from disco_ds.eval.pairs import HeldOutSet, RetrievalSet
from disco_ds.eval.probes import ProbeSet
from disco_ds.eval.results import Result
from disco_ds.eval.zero_shot import LabeledSet
from disco_ds.names import explain_errors

logger = logging.getLogger(__name__)
PLAIN = ("{}",)
_IMAGENET = "imagenet"
_IMAGES = "jpg;jpeg;png;webp;filepath;image"
"""Where images are looked for besides data.image_key: members of shards, open_clip's default of --csv-img-key, and the
images of an ImageFolder."""
_SHARDS_CAPTION = EvalSettings().caption_key
"""The default of eval.caption_key."""
_CSV_CAPTION = "{title}"
"""open_clip's default of --csv-caption-key. For csv files, it is the default of eval.caption_key."""


def load_sets(settings: EvalSettings, data: DataSettings) -> list[ImageSet]:
    """Open all sets that the settings name, and read their labels.

    Raises:
        ValueError: If a set is missing, is empty, or does not fit the setting that names it; or if a
            label has no class name.
    """
    # Evaluations have no groups, and data.image_key may name a column of a training csv.
    data = data.replace(group_by=None, image_key=f"{data.image_key};{_IMAGES}")
    sets: list[ImageSet] = []
    for setting in ("labeled", "retrieval", "validation", "probes"):
        for name, given in getattr(settings, setting).items():
            try:
                sets.append(_load(setting, name, given, settings, data))
            except ValueError as error:
                raise ValueError(f"eval.{setting}.{name}: {error}") from None
    return sets


# The towers are not compiled for evaluations: the batch size varies there, so torch.compile would afterwards compile
# the training step for a variable batch size too.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def evaluate_sets(encoder: Encoder, sets: Sequence[ImageSet]) -> list[Result]:
    """Evaluate the encoder's model on every set, in eval mode. Collective: every rank must call this.

    Afterwards, the model's previous mode is restored. No random number is drawn. The running statistics of batch
    normalization differ between ranks. Those of rank 0, which checkpoints contain, overwrite those of the other ranks.

    Raises:
        AgreedError: If shards cannot be read, if a set has no readable image, or if the training images of a
            probe have fewer than two labels.
    """
    model = encoder.model
    training = model.training
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    if sets and buffers:
        statistics = comm.broadcast([buffer.cpu() for buffer in buffers])
        for buffer, value in zip(buffers, statistics, strict=True):
            buffer.copy_(value)
    results = [item.evaluate(encoder) for item in sets]
    model.train(training)
    return results


def _load(
    setting: str, name: str, given: Any, settings: EvalSettings, data: DataSettings
) -> ImageSet:
    """Open the set that eval.SETTING.NAME gives, and read its labels."""
    if setting == "probes":
        with explain_errors("probes need scikit-learn", "pip install 'disco_ds[probes]'"):
            import sklearn  # noqa: F401 - probes.py imports it later
        train, _ = _open(name, given.train, data, settings.label_key)
        test, _ = _open(name, given.test, data, settings.label_key)
        return ProbeSet(**vars(test), train=train)
    if setting == "labeled":
        images, labels = _open(name, given, data, settings.label_key)
        return _add_classes(images, labels, resolve_shards(given), settings)
    images, _ = _open(name, given, data, settings.caption_key, is_captioned=True)
    if setting == "retrieval":
        return RetrievalSet(**vars(images))
    return HeldOutSet(**vars(images), batch=settings.validation_batch)


def _add_classes(
    images: ImageSet, labels: list[str], folder: Path, settings: EvalSettings
) -> LabeledSet:
    """Add the class names and the prompts to the images in a folder."""
    file, templates = settings.classes.get(images.name), settings.templates.get(images.name)
    is_folder = isinstance(images.source, ImageFolder)
    if _is_benchmark(folder):
        file = file or folder / "classnames.txt"
        provided = folder / "zeroshot_classification_templates.txt"
        templates = templates or (str(provided) if provided.is_file() else _IMAGENET)
    if file:
        classes = read_classes(file, labels)
    elif is_folder:
        classes = _imagenet_classes(images.name, labels)
    else:
        classes = {label: label for label in labels}
    templates = templates or (_IMAGENET if is_folder else None)
    prompts = read_templates(templates) if templates else PLAIN
    return LabeledSet(**vars(images), classes=classes, templates=prompts)


def _is_benchmark(folder: Path) -> bool:
    return (folder / "test" / "nshards.txt").is_file()


def _open(
    name: str, path: str, data: DataSettings, text: str, is_captioned: bool = False
) -> tuple[ImageSet, list[str]]:
    """Open an evaluation set in any supported layout.

    Args:
        name: Name of the set.
        path: A folder or csv.
        data: How to read images.
        text: Template of the label or captions, in shards without clip_benchmark's layout and in a csv.
        is_captioned: Whether the images have captions, not labels. In a csv, rows with the same path are then one image
            with several captions.

    Returns:
        The images, and their distinct labels or captions, sorted.

    Raises:
        ValueError: If the set is missing, empty or incomplete, or has no labels or captions.
    """
    source: Source
    if is_table(path):
        if is_captioned and text == _SHARDS_CAPTION:
            text = _CSV_CAPTION
        data = data.replace(captions={text: 1.0})
        source = CaptionedImages(Table(path, data), text, joins=is_captioned)
        texts = source.texts
        images = ImageSet(name, source, data, "{texts}")
    else:
        folder = resolve_shards(path)
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        if _is_benchmark(folder):
            text = "{txt}" if is_captioned else "{cls}"
            source = index_shards(folder / "test")
            num_expected = read_text(folder / "test" / "nshards.txt", "file").strip()
            if num_expected != str(len(source.shards)):
                raise ValueError(
                    f"{folder / 'test'} has {len(source.shards)} .tar files, but its nshards.txt "
                    f"says {num_expected}; download the missing files"
                )
        elif any(folder.glob("*.tar")):
            source = load_manifest(folder)
        elif is_captioned:
            raise ValueError(
                f"{path} contains no .tar shards; captions are read from shards or a csv"
            )
        else:
            source = ImageFolder(folder)
            return ImageSet(name, source, data, "{cls}"), source.classes
        texts = {line for line in read_labels(source, text) if line}
        images = ImageSet(name, source, data, text)
    if not texts:
        setting = "caption_key" if is_captioned else "label_key"
        raise ValueError(f"the template {text} gives no text for any sample; check eval.{setting}")
    return images, sorted(texts)


def read_templates(wanted: str) -> tuple[str, ...]:
    """Read the prompts from a text file, one per line. For `imagenet`, return open_clip's 80 prompts.

    In a file, {c} or {} stands for the class name. In the returned prompts, it is always {}.

    Raises:
        ValueError: If a prompt has no placeholder for the class, or there are no prompts.
    """
    if wanted == _IMAGENET:
        from open_clip import OPENAI_IMAGENET_TEMPLATES

        return tuple(fill("{}") for fill in OPENAI_IMAGENET_TEMPLATES)
    text = read_text(Path(wanted), "template file").replace("{c}", "{}")
    lines = split_lines(text)
    for line in lines or [""]:
        if "{}" not in line:
            raise ValueError(
                f"{wanted}: the template {line!r} has neither {{c}} nor {{}} in place of the class "
                "name"
            )
    return tuple(lines)


def read_classes(path: Path, labels: Collection[str]) -> dict[str, str]:
    """Read the class name of each label from a file. All names in the file are possible answers.

    A JSON file contains a list of names, or a mapping from label to name. In a text file, each line is a name, or a
    label, a tab and a name. Names without labels belong to the labels in sorted order. But if all labels are
    numbers, the first name belongs to label 0 and so on, even if no sample has that label.

    Raises:
        ValueError: If the file cannot be read; if a label has no name; or if a file with only names has more names than
            labels, unless all labels are numbers.
    """
    text = read_text(path, "class name file")
    given: dict[str, str] | list[str]
    if path.suffix == ".json":
        with explain_errors(str(path)):
            given = TypeAdapter(dict[str, str] | list[str]).validate_json(text)
    else:
        given = split_lines(text)
        if all("\t" in line for line in given):
            parts = [line.partition("\t") for line in given]
            given = {label.strip(): name.strip() for label, _, name in parts}
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
    return names


def _imagenet_classes(name: str, labels: list[str]) -> dict[str, str]:
    """Return open_clip's class names for ImageNet's WordNet ids (wnids) or numbers 0 to 999.

    Some of the wnids may be missing in `labels`. Other labels are used as the class names themselves.
    """
    from open_clip import IMAGENET_CLASSNAMES
    from timm.data import ImageNetInfo

    # timm lists the wnids in the order of the class numbers, as open_clip lists the names.
    names = dict(zip(ImageNetInfo().label_names(), IMAGENET_CLASSNAMES, strict=True))
    if labels == list(map(str, range(len(names)))):
        return dict(zip(labels, IMAGENET_CLASSNAMES, strict=True))
    if names.keys() >= set(labels):
        return {label: names[label] for label in labels}
    span = f"{labels[0]} ... {labels[-1]}"
    logger.warning("eval.labeled.%s: using the sub-folders' names (%s) as class names", name, span)
    return {label: label.replace("_", " ") for label in labels}
