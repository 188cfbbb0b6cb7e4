"""Store a teacher's embeddings or similarities with the samples, for `disco-ds embed`.

Every rank writes some of the shards, and no rank waits for another. A shard has a temporary name until it is complete,
so a command that was interrupted and is run again writes only the shards that are missing.

This module gets the teacher as a module, because this package does not import models.
"""

import io
import json
import logging
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import webdataset
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from disco_ds.config.data import DataSettings
from disco_ds.config.text_file import write_json
from disco_ds.data.captions import Members, list_captions, shorten_caption
from disco_ds.data.errors import BrokenSample, DataError, DroppedSample, refuse_broken
from disco_ds.data.images import augment, decode_for_evaluation, find_image
from disco_ds.data.samples import InputSpec, decode_crop
from disco_ds.data.sequential import read_in_threads, read_labels
from disco_ds.data.sources.base import Source, digest
from disco_ds.data.sources.counting import index_shards
from disco_ds.data.sources.load import load_sources
from disco_ds.data.sources.selection import Selection
from disco_ds.data.sources.shards import Manifest, load_manifest, write_manifest
from disco_ds.data.stored import RECORD, describe_views, find_view_key

IMAGE, TEXT = "img.npy", "txt.npy"
"""Names of the sample members that store the embeddings of the image and of the captions."""
SCORE = "similarity"
"""Name of the field that stores the similarity of the image and the captions, for data.filter."""
_NAME = re.compile(r"[a-z0-9_][a-z0-9_ .-]*")
"""Matches a member name that can be the extension of a file in a tar shard."""
logger = logging.getLogger(__name__)


class _Inputs(NamedTuple):
    """A sample's members, and the teacher's inputs."""

    name: str
    members: dict[str, Any]
    images: Tensor
    """[views or views + 1, 3, H, W] uint8: a crop for each view, then the resized image if it is needed."""
    keys: list[int]
    """The key of the random numbers of each view."""
    tokens: Tensor
    """The tokens of the sample's captions, a row for each caption."""
    fields: dict[str, Any] | None
    """The parsed json member, if the sample has one and gets a similarity."""


@dataclass(frozen=True)
class Embedder:
    """Computes and stores the embeddings, the similarities or both of the samples of one source.

    Args:
        settings: Settings of the data.
        spec: What the teacher expects of a sample.
        model: The teacher, on this rank's device, in eval mode and in the precision of the recipe.
        identity: Name and digest of the teacher, which are recorded in the folder.
        views: Number of augmentations of each image. 0: resize the image as in evaluation instead. None: store no
            embeddings.
        batch: Maximum number of images, or of texts, in a forward pass.
        score: Whether to store the mean cosine of the captions' embeddings and that of the resized image.
    """

    settings: DataSettings
    spec: InputSpec
    model: nn.Module
    identity: dict[str, Any]
    views: int | None
    batch: int
    score: bool = False

    def write(self, folder: Path, rank: int, size: int) -> bool:
        """Write this rank's shards. The rank that completes the last missing shard also writes the manifest.

        Args:
            folder: The folder of the new shards.
            rank: Number of this rank.
            size: Number of ranks. This rank writes the shards rank, rank + size, rank + 2 * size, ...

        Returns:
            Whether this rank wrote the manifest. If no shard was missing, that is rank 0.

        Raises:
            ValueError: If the data settings are invalid or not supported, or if the folder has shards of another
                teacher, other data or other settings. In this case, nothing is written.
            DataError: If too many samples are broken.
            OSError: If a shard cannot be read or written.
        """
        data = self.settings
        if data.sources or data.source == "synthetic" or data.index == "none":
            raise ValueError(
                "embed reads one source of counted samples: set data.shards instead of data.sources, and "
                "data.index=manifest"
            )
        source = load_sources(data)[0]
        folder.mkdir(parents=True, exist_ok=True)
        self._record(folder, source)
        paths = [folder / f"{shard:06d}.tar" for shard in range(len(source.sizes))]
        missing = [shard for shard in range(rank, len(paths), size) if not paths[shard].exists()]
        with closing(self._load(source, missing)) as inputs:
            embedded = self._embed_all(inputs, sum(source.sizes[shard] for shard in missing))
            for shard in missing:
                _write_shard(paths[shard], islice(embedded, source.sizes[shard]))
        completes = bool(missing or rank == 0) and all(path.exists() for path in paths)
        if completes:
            write_manifest(index_shards(folder))
        return completes

    def read_pairs(
        self, folder: Path, scores: np.ndarray, ids: Iterable[int]
    ) -> Iterator[tuple[Tensor, str, str]]:
        """Yield the resized image, the first caption and the similarity of the scored samples with these ids."""
        settings, manifest = self.settings, load_manifest(folder)
        starts = list(accumulate(manifest.sizes, initial=0))
        # The filter chose what was scored. It may name a similarity that has been replaced since.
        selection = Selection(settings.replace(uids=None, filter={}))
        with closing(manifest.open()) as reader:
            for index in ids:
                shard = bisect_right(starts, index) - 1
                members = selection.read(reader, shard, index - starts[shard])
                picture = find_image(members, settings.image_key)
                image = decode_for_evaluation(picture, settings.max_pixels, self.spec.image)
                yield image, list_captions(settings.captions, members)[0], f"{scores[index]:.4f}"

    def _record(self, folder: Path, source: Source) -> None:
        """Record the teacher, the data and the settings in the folder.

        If an earlier command has recorded them, check that they have not changed.

        Raises:
            ValueError: If they have changed, or if the folder has shards but no record.
        """
        data = self.settings
        # Shards of equal names and counts may contain other samples.
        shards = source.shards if isinstance(source, Manifest) else ()
        record = {
            "teacher": self.identity,
            "data": digest([source.fingerprint, shards]),
            **data.model_dump(mode="json", include={"source", "options", "uids", "filter"}),
            "shards": data.shards and os.path.abspath(data.shards),
            **describe_views(data, self.views),
            SCORE: self.score or None,
        }
        path = folder / RECORD
        if path.exists():
            before = json.loads(path.read_bytes())
            for key, value in json.loads(json.dumps(record)).items():
                if before.get(key) != value:
                    raise ValueError(
                        f"{folder} was begun with {key} {before.get(key)}, now it is {value}; choose another folder"
                    )
        elif any(folder.glob("*.tar")):
            raise ValueError(f"{folder} has shards that embed did not write; choose another folder")
        else:
            write_json(path, record)

    def _load(
        self, source: Source, shards: Sequence[int]
    ) -> Generator[_Inputs | BrokenSample, None, None]:
        """Yield the teacher's inputs for each sample of some shards, in order, as read_in_threads does."""
        settings, spec = self.settings, self.spec
        selection = Selection(settings)
        lock = threading.Lock()  # the functions in data.transforms may not be thread-safe

        def prepare(raw: Members, name: str) -> _Inputs:
            with lock:
                members = selection.apply(raw, lambda: name)
            picture = find_image(members, settings.image_key)
            captions = list_captions(settings.captions, members)
            if not captions:
                raise BrokenSample("no template of data.captions can be filled")
            keys = [find_view_key(picture, view) for view in range(self.views or 0)]
            images = [decode_crop(picture, settings, spec.image, key) for key in keys]
            if self.score or not keys:
                images.append(decode_for_evaluation(picture, settings.max_pixels, spec.image))
            tokens = spec.tokenize([shorten_caption(text) for text in captions])
            fields = dict(json.loads(raw["json"])) if self.score and "json" in raw else None
            return _Inputs(name, {**raw}, torch.stack(images), keys, tokens, fields)

        threads = settings.workers or max(len(os.sched_getaffinity(0)) - 1, 1)
        positions = ((shard, entry) for shard in shards for entry in range(source.sizes[shard]))
        return read_in_threads(source, positions, threads, prepare)

    def _embed_all(
        self, inputs: Iterator[_Inputs | BrokenSample], total: int
    ) -> Iterator[_Inputs | BrokenSample]:
        """Yield the samples in order, with the new members added; a BrokenSample is left out of the shard."""
        num_read = 0
        broken: list[str] = []
        num = max(1, self.batch // max(self.views or 0, 1))
        with tqdm(total=total, unit=" samples", unit_scale=True) as bar:
            while items := list(islice(inputs, num)):
                self._embed([item for item in items if isinstance(item, _Inputs)])
                bar.update(len(items))
                for item in items:
                    num_read += 1
                    if isinstance(item, BrokenSample) and not isinstance(item, DroppedSample):
                        broken.append(str(item))
                        logger.warning("left out: %s", item)
                        refuse_broken(
                            "samples are broken", broken, num_read, self.settings.max_broken
                        )
                    yield item

    @torch.no_grad()
    def _embed(self, samples: Sequence[_Inputs]) -> None:
        """Add the members that store the embeddings and the similarity to each sample.

        The image embeddings have the shape [views, width]; or [width] if `views` is 0. The caption embeddings have a
        row for each caption.
        """
        if not samples:
            return
        device = next(self.model.parameters()).device
        views = self.views or 0
        images = torch.stack([sample.images for sample in samples]).to(device)
        texts = torch.cat([sample.tokens for sample in samples]).to(device)
        if self.score or not views:
            # The resized image follows the crops.
            whole = crops = self._encode(0, images[:, views])
        if views:
            keys = torch.tensor([key for sample in samples for key in sample.keys], device=device)
            cropped = augment(images[:, :views].flatten(0, 1), keys, self.settings.augment)
            crops = self._encode(0, cropped).unflatten(0, (len(samples), views))
        captions = self._encode(1, texts).split([len(sample.tokens) for sample in samples])
        for k, sample in enumerate(samples):
            if self.views is not None:
                sample.members[IMAGE], sample.members[TEXT] = _pack(crops[k]), _pack(captions[k])
            if self.score:
                score = round(F.cosine_similarity(whole[k], captions[k]).mean().item(), 4)
                # data.filter reads the json member if there is one, otherwise the members themselves.
                if sample.fields is None:
                    sample.members[SCORE] = str(score).encode()
                else:
                    fields = {**sample.fields, SCORE: score}
                    sample.members["json"] = json.dumps(fields).encode()

    def _encode(self, side: int, rows: Tensor) -> Tensor:
        """Return the embeddings of images (side 0) or texts (side 1) on the CPU, in fp32."""
        name, parts = ("image", "text")[side], rows.split(self.batch)
        embeddings = torch.cat([self.model(**{name: part})[side].float().cpu() for part in parts])
        if not embeddings.isfinite().all():
            raise DataError("the teacher's embeddings are not finite; try deepspeed={} for fp32")
        return embeddings


def _write_shard(path: Path, samples: Iterable[_Inputs | BrokenSample]) -> None:
    """Write a shard under a temporary name, and rename it when it is complete.

    Args:
        path: The shard.
        samples: The samples. A BrokenSample is passed over.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        with webdataset.TarWriter(file, encoder=False, keep_meta=True, mtime=0) as tar:
            kept = (sample for sample in samples if isinstance(sample, _Inputs))
            for number, sample in enumerate(kept):
                if bad := [name for name in sample.members if not _NAME.fullmatch(name)]:
                    raise DataError(
                        f"{bad[0]!r}, the name of a column or member, cannot be a file extension in a tar shard; "
                        "rename it, for example in lower case"
                    )
                key = sample.name.partition(".tar/")[2] or f"{number:06d}"
                tar.write({"__key__": key, **sample.members})
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_scores(folder: Path) -> np.ndarray:
    """Read the similarities that are stored in the shards of a folder, [n] fp64, in the order of sample ids."""
    scores = read_labels(load_manifest(folder), f"{{json[{SCORE}]|{SCORE}}}")
    return np.array(scores, np.float64)


def _pack(rows: Tensor) -> bytes:
    """Return embeddings as the content of an .npy file, in fp16."""
    file = io.BytesIO()
    np.save(file, rows.half().numpy())
    return file.getvalue()
