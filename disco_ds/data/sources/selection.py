"""Selection and preparation of samples: data.uids, data.filter and data.transforms, applied to one sample at a time.

A sample that these settings exclude is dropped: the slot's next sample takes its place, and the dropped sample does
not count as broken. Stages that join or reorder samples, such as webdataset's batched and shuffle, are refused, because
they would change the data order.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from disco_ds.config.data import DataSettings
from disco_ds.data.captions import Members
from disco_ds.data.errors import DataError, DroppedSample, breaks_sample
from disco_ds.data.sources.base import Reader
from disco_ds.names import explain_errors, load_custom

Stage = Callable[[Iterable[dict[str, Any]]], Iterable[dict[str, Any]]]
"""A per-sample stage of webdataset: converts an iterable of samples into another iterable."""
_JOINING = {
    "shuffle", "detshuffle", "rsample", "slice", "associate",
    "batched", "unbatched", "listed", "unlisted", "to_tuple",
}  # fmt: skip
"""Stages of webdataset that need more than one sample or do not return samples."""
_MANY = 1_000
"""If none of this many samples has a field that data.filter names, that is an error."""
_SORTED_HERE = 1_000_000
"""Files with more uids than this must already be sorted."""
_NUM_COMPARED = 10_000
"""Approximate number of evenly spaced uids that are compared to check that a large file is sorted."""


class Selection:
    """A source's rules for keeping, dropping and changing samples before captions and images are decoded.

    If none of data.uids, data.filter and data.transforms is set, it keeps all samples.

    Args:
        settings: Settings of the source.

    Raises:
        ValueError: If a file or function cannot be loaded, or if a stage joins samples. The message names the file or
            the function.
    """

    def __init__(self, settings: DataSettings) -> None:
        self._uids = read_uids(settings.uids) if settings.uids else None
        self._rules = settings.filter
        self._stages = load_stages(settings.transforms) if settings.transforms else ()
        self._seen = set[str]()
        """Fields of the samples that have been read."""
        self._num_seen = 0

    def read(self, reader: Reader, shard: int, entry: int) -> Members:
        """Read a sample, and select and prepare it as `apply` does.

        Raises:
            BrokenSample: If the sample cannot be used or is left out.
            DataError: As for `apply`.
            OSError: If the shard itself cannot be read.
        """
        with breaks_sample(OSError):
            members = reader.read(shard, entry)
        with breaks_sample():
            return self.apply(members, lambda: reader.name(shard, entry))

    def apply(self, members: Members, name: Callable[[], str]) -> Members:
        """Select and prepare a sample.

        Args:
            members: The sample's members by extension.
            name: Function that returns the sample's name, `shard/key`. It is called only if there are stages.

        Returns:
            The members that provide the caption and the image.

        Raises:
            DroppedSample: If the sample is left out.
            DataError: If none of the first samples has a field that data.filter names.
            Exception: Any exception that a stage or a malformed member causes.
        """
        if self._uids is not None or self._rules:
            fields = json.loads(members["json"]) if "json" in members else members
            if self._uids is not None and not _contains(self._uids, fields["uid"]):
                raise DroppedSample("its uid is not in data.uids")
            if self._rules and self._num_seen < _MANY:
                self._num_seen += 1
                self._seen.update(fields)
                if self._num_seen == _MANY:
                    self.check_fields()
            for key, rule in self._rules.items():
                if not _passes(fields.get(key), rule):
                    raise DroppedSample(f"its {key} does not pass data.filter")
        if not self._stages:
            return members
        shard, _, key = name().rpartition(".tar/")
        samples: Iterable[dict[str, Any]] = [{"__key__": key, "__url__": f"{shard}.tar", **members}]
        for stage in self._stages:
            samples = stage(iter(samples))
        kept = list(islice(samples, 2))
        if not kept:
            raise DroppedSample("data.transforms dropped it")
        if len(kept) > 1 or not isinstance(kept[0], dict):
            raise ValueError(
                "data.transforms must return one dictionary for each sample, or drop it"
            )
        return kept[0]

    def check_fields(self) -> None:
        """Check that at least one of the first samples, if there were any, had each field of data.filter.

        Raises:
            DataError: If a field is missing.
        """
        missing = sorted(self._rules.keys() - self._seen)
        if self._seen and missing:
            raise DataError(
                f"data.filter: none of the first {self._num_seen:,} samples has the field {', '.join(missing)}; their "
                f"fields: {', '.join(sorted(self._seen))}"
            )


def load_stages(function: str) -> list[Stage]:
    """Call the function that data.transforms names, and return its stages.

    Raises:
        ValueError: If the function cannot be imported, fails, does not return a list, or returns a stage that joins
            samples.
    """
    create = load_custom(function, {})
    with explain_errors(f"{function} failed"):
        stages = list(create())
    for stage in stages:
        # webdataset's stages keep their function in an attribute.
        name = getattr(getattr(stage, "f", stage), "__name__", "").lstrip("_")
        if name in _JOINING:
            raise ValueError(
                f"{function} returns the stage {name}, which does not handle one sample at a time; return only "
                "per-sample stages, such as wds.select, wds.map, wds.map_dict and wds.rename"
            )
    return stages


def read_uids(path: Path) -> np.ndarray:
    """Read the uids of a DataComp subset: an .npy file of pairs of uint64.

    Returns:
        Sorted uids, [n] of the type (u8, u8). A large file is memory-mapped.

    Raises:
        ValueError: If the file cannot be read, has another data type, or is large and not sorted.
    """
    with explain_errors(f"{path} cannot be read as an .npy file of uids"):
        uids = np.load(path, mmap_mode="r")
    if uids.dtype != np.dtype("u8,u8"):
        raise ValueError(
            f"{path} has the type {uids.dtype}, expected pairs of uint64 as in DataComp"
        )
    if len(uids) <= _SORTED_HERE:
        return np.sort(uids)
    # A large file is memory-mapped, and is not read whole.
    compared = uids[:: len(uids) // _NUM_COMPARED]
    if (np.sort(compared) != compared).any():
        raise ValueError(
            f"{path} must be sorted, because it has {len(uids):,} uids; use np.save(path, np.sort(uids))"
        )
    return uids


def _contains(uids: np.ndarray, text: str | bytes) -> bool:
    """Return whether a uid of 32 hexadecimal digits is among the uids. The values of a csv file are bytes."""
    uid = divmod(int(text, 16), 2**64)
    position = int(np.searchsorted(uids, np.array(uid, dtype=uids.dtype)))
    return position < len(uids) and uids[position].item() == uid


def _passes(value: Any, rule: Mapping[str, Any]) -> bool:
    """Return whether a field passes a rule. A missing field does not pass, nor does an empty cell of a csv file."""
    allowed = rule.get("in")
    if isinstance(value, bytes):  # the columns of a csv file are texts
        value = value.decode()
        # A csv may contain true and false, as json.dumps writes them, or True and False, as pandas does.
        allowed = allowed and [text(item) for item in allowed for text in (str, json.dumps)]
    if value is None or (value == "" and allowed is None):
        return False
    if allowed is not None and value not in allowed:
        return False
    if "min" not in rule and "max" not in rule:
        return True
    return bool(rule.get("min", -math.inf) <= float(value) <= rule.get("max", math.inf))
