"""Store a teacher's embeddings with the samples, for `disco-ds embed`.

Every rank writes some of the shards, and no rank waits for another. A shard has a temporary name until it is complete,
so a command that was interrupted and is run again writes only the shards that are missing.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import webdataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from disco_ds.config import Config
from disco_ds.config.text_file import write_text
from disco_ds.data import augment, index_shards, load_sources, write_manifest
from disco_ds.data.captions import Members, find_group, list_captions, shorten_caption
from disco_ds.data.errors import BrokenSample, DataError, DroppedSample, breaks_sample
from disco_ds.data.images.decode import (
    NUM_CROP_NUMBERS,
    decode_image,
    find_image,
    resize_for_evaluation,
)
from disco_ds.data.order.counter_rng import keyed_row
from disco_ds.data.sources.base import Samples, Source
from disco_ds.data.stored import RECORD, VIEW_SEED, describe_views
from disco_ds.distributed import comm
from disco_ds.eval.model import read_form

IMAGE, TEXT = "img.npy", "txt.npy"
"""Names of the sample members that store the embeddings of the image and of the captions."""
_SPARE_BROKEN = 16
"""Number of broken samples that are tolerated in addition to the fraction data.max_broken."""
_NAME = re.compile(r"[a-z0-9_][a-z0-9_ .-]*")
"""Matches a member name that can be the extension of a file in a tar shard."""
logger = logging.getLogger(__name__)


class _Inputs(NamedTuple):
    """A sample's members, and the teacher's inputs.

    The arrays are not tensors, because a data worker would open a file for each tensor that it sends.
    """

    members: Members
    images: np.ndarray
    """uint8. If there are views: [views, 3, H, W], a crop for each. Otherwise: [1, 3, H, W], the resized image."""
    key: int
    """Hash of the image. It replaces the sample's id as the key of the augmentation's random numbers."""
    tokens: np.ndarray
    """The tokens of the sample's captions, a row for each caption."""


class _Item(NamedTuple):
    """What was read for a sample."""

    name: str
    inputs: _Inputs | None = None
    """None if the sample is left out."""
    broken: str | None = None
    """The reason why the sample is broken; None if it is intact, even if it is left out (DroppedSample)."""


@dataclass(frozen=True)
class _Items(Dataset):  # type: ignore[type-arg]
    """The samples of the shards that this rank writes, in order."""

    samples: Samples
    places: list[tuple[int, int]]
    """For each sample: the number of its shard, and its position in the shard."""
    views: int

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> _Item:
        shard, entry = self.places[number]
        name = f"{shard:06d}/{entry:06d}"
        samples, settings = self.samples, self.samples.settings
        try:
            with breaks_sample(OSError):
                raw = samples.reader.read(shard, entry)
                name = samples.name(shard, entry)
            with breaks_sample():
                members = samples.select(raw, shard, entry)
                data = find_image(members, settings.image_key)
                captions = list_captions(settings.captions, members)
                if not captions:
                    raise BrokenSample("no template of data.captions can be filled")
                key = find_group("image", members, "", data)
                if self.views:
                    rows = [
                        keyed_row(VIEW_SEED, view, key, NUM_CROP_NUMBERS)
                        for view in range(self.views)
                    ]
                    images = torch.stack([samples.decode(data, row) for row in rows])
                else:
                    image = decode_image(data, settings.max_pixels)
                    images = resize_for_evaluation(image, samples.form.image)[None]
                tokens = samples.form.tokenize([shorten_caption(text) for text in captions])
        except DroppedSample:
            return _Item(name)
        except BrokenSample as error:
            return _Item(name, broken=str(error))
        return _Item(name, _Inputs(raw, images.numpy(), key, tokens.numpy()))


@dataclass(frozen=True)
class Embedder:
    """Computes and stores the embeddings of the samples of one source.

    Args:
        config: The recipe.
        model: The teacher, on this rank's device, in eval mode and in the precision of the recipe.
        tokenizer: The teacher's tokenizer.
        identity: Name and digest of the teacher, which are recorded in the folder.
        views: Number of augmentations of each image. 0: resize the image as in evaluation instead.
        batch: Maximum number of images, or of texts, in a forward pass.
    """

    config: Config
    model: nn.Module
    tokenizer: Any
    identity: dict[str, Any]
    views: int
    batch: int

    def write(self, folder: Path, rank: int, size: int) -> None:
        """Write this rank's shards. The rank that completes the last missing shard also writes the manifest.

        Args:
            folder: The folder of the new shards.
            rank: Number of this rank.
            size: Number of ranks. This rank writes the shards rank, rank + size, rank + 2 * size, ...

        Raises:
            ValueError: If the data settings are invalid or not supported, or if the folder has shards of another
                teacher, other data or other settings. In this case, nothing is written.
            DataError: If too many samples are broken.
            OSError: If a shard cannot be read or written.
        """
        data = self.config.data
        if data.sources or data.source == "synthetic" or data.index == "none":
            raise ValueError(
                "embed reads one source of counted samples: set data.shards instead of data.sources, and "
                "data.index=manifest"
            )
        source = load_sources(data)[0]
        folder.mkdir(parents=True, exist_ok=True)
        self._record(folder, source)
        paths = [folder / f"{shard:06d}.tar" for shard in range(len(source.sizes))]
        mine = [shard for shard in range(rank, len(paths), size) if not paths[shard].exists()]
        form = read_form(self.model, self.tokenizer)
        with (
            closing(source.open_samples(data, form, VIEW_SEED, 1)) as samples,
            closing(self._embed_shards(samples, mine)) as embedded,
        ):
            for shard in mine:
                _write_shard(paths[shard], islice(embedded, source.sizes[shard]))
        if all(path.exists() for path in paths):
            write_manifest(index_shards(folder))

    def _record(self, folder: Path, source: Source) -> None:
        """Record the teacher, the data and the augmentation settings in the folder.

        If an earlier command has recorded them, check that they have not changed.

        Raises:
            ValueError: If they have changed, or if the folder has shards but no record.
        """
        record = {
            "teacher": self.identity,
            "data": source.fingerprint,
            **describe_views(self.config.data, self.views),
        }
        path = folder / RECORD
        if not path.exists():
            if any(folder.glob("*.tar")):
                raise ValueError(
                    f"{folder} has shards that embed did not write; choose another folder"
                )
            write_text(path, json.dumps(record, indent=1) + "\n")
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        for key, value in json.loads(json.dumps(record)).items():
            if before.get(key) != value:
                raise ValueError(
                    f"{folder} was begun with {key} {before.get(key)}, now it is {value}; choose another folder"
                )

    def _embed_shards(
        self, samples: Samples, shards: Sequence[int]
    ) -> Generator[tuple[str, Members] | None]:
        """Yield the name, the members and the embeddings of each sample of some shards, in order.

        For a sample that is left out, yield None.
        """
        sizes = samples.source.sizes
        places = [(shard, entry) for shard in shards for entry in range(sizes[shard])]
        workers = self.config.data.workers
        if workers is None:
            workers = max(len(os.sched_getaffinity(0)) - 1, 1)
        loader = DataLoader(
            _Items(samples, places, self.views),
            batch_size=max(1, self.batch // max(self.views, 1)),
            num_workers=workers,
            collate_fn=list,
            multiprocessing_context="forkserver" if workers else None,
        )
        most = self.config.data.max_broken
        num_read = num_broken = 0
        with tqdm(total=len(places), unit=" samples", unit_scale=True) as bar:
            for items in loader:
                embeddings = self._embed([item.inputs for item in items if item.inputs])
                bar.update(len(items))
                for item in items:
                    num_read += 1
                    if item.broken is not None:
                        num_broken += 1
                        logger.warning("left out: %s: %s", item.name, item.broken)
                    if num_broken > _SPARE_BROKEN + most * num_read:
                        raise DataError(
                            f"{num_broken} of {num_read} samples are broken; the limit is {_SPARE_BROKEN} plus the "
                            f"fraction data.max_broken={most:g}"
                        )
                    if item.inputs:
                        yield item.name, {**item.inputs.members, **next(embeddings)}
                    else:
                        yield None

    @torch.no_grad()
    def _embed(self, samples: Sequence[_Inputs]) -> Iterator[Members]:
        """Yield the new members of each sample, which store the embeddings.

        The image embeddings have the shape [views, width]; or [width] if `views` is 0. The caption embeddings have a
        row for each caption.
        """
        if not samples:
            return
        device = comm.local_device()
        images = torch.from_numpy(np.concatenate([each.images for each in samples])).to(device)
        if self.views:
            views = torch.arange(self.views, device=device).repeat(len(samples))
            keys = torch.tensor([each.key for each in samples], device=device)
            keys = keys.repeat_interleave(self.views)
            images = augment(images, views, keys, VIEW_SEED, self.config.data.augment)
        text = torch.from_numpy(np.concatenate([each.tokens for each in samples])).to(device)
        rows = torch.cat([self.model(image=x)[0] for x in images.split(self.batch)])
        texts = torch.cat([self.model(text=x)[1] for x in text.split(self.batch)])
        found = rows.float().cpu(), texts.float().cpu()
        if not all(torch.isfinite(x).all() for x in found):
            raise DataError("the teacher's embeddings are not finite; try deepspeed={} for fp32")
        images_of = found[0].split([len(each.images) for each in samples])
        texts_of = found[1].split([len(each.tokens) for each in samples])
        for image, caption in zip(images_of, texts_of, strict=True):
            yield {IMAGE: _pack(image if self.views else image[0]), TEXT: _pack(caption)}


def _write_shard(path: Path, samples: Iterable[tuple[str, Members] | None]) -> None:
    """Write a shard under a temporary name, and rename it when it is complete.

    Args:
        path: The shard.
        samples: The name and the members of each sample. None is passed over.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        with webdataset.TarWriter(file, encoder=False, keep_meta=True, mtime=0) as tar:
            for number, (name, members) in enumerate(filter(None, samples)):
                if bad := [member for member in members if not _NAME.fullmatch(member)]:
                    raise DataError(
                        f"{bad[0]!r}, the name of a column or member, cannot be a file extension in a tar shard; "
                        "rename it, for example in lower case"
                    )
                key = name.partition(".tar/")[2] or f"{number:06d}"
                tar.write({"__key__": key, **members})
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _pack(rows: Tensor) -> bytes:
    """Return embeddings as the content of an .npy file, in fp16."""
    file = io.BytesIO()
    np.save(file, rows.half().numpy())
    return file.getvalue()
