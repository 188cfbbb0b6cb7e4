"""Tar shards: the names and locations that data.shards specifies, and their sample counts.

data.shards has one of these forms:

folder, bundled:<set>          every .tar file in the folder or in the bundled data set
/data/{00000..00099}.tar       local shards by name; several braces and lists such as {a,b} also work
/data/part-*/*.tar             local shards by a pattern; also s3://, gs:// and az://. * does not match a slash
shards.txt                     a text file with one shard per line, all local or all remote
https://host/x/{0..9}.tar      shards to download; also s3://, gs://, az:// and hf://
pipe:COMMAND {0..9}.tar        the output of one shell command per shard, if data.remote.pipe allows it
table.csv                      a table whose rows contain an image path and captions (files.py)

`disco-ds index` writes the manifest (counting.py). Sample ids and the data order follow from it, so every rank must
find the same shards. With data.index=none, there is no manifest, and order.WholeShards defines the order.
"""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from glob import glob
from itertools import compress, islice
from pathlib import Path, PurePosixPath

from braceexpand import braceexpand

from disco_ds.config import PACKAGE
from disco_ds.config.data import PIPE, SCHEMES, RemoteSettings, is_remote
from disco_ds.config.secrets import VARIABLE, expand
from disco_ds.config.text_file import read_text, write_json
from disco_ds.data.sources.base import Shard, Source, digest
from disco_ds.data.sources.cache import ShardCache
from disco_ds.data.sources.fetching import BUCKETS, list_objects
from disco_ds.data.sources.tar import TarReader
from disco_ds.names import explain_errors, plural, shorten

NAME = "manifest.json"
"""Default file name of the manifest in a folder of shards."""
_BUNDLED = "bundled:"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_TAR = re.compile(r"\.tar(?=$|[\s?#'\"|])")
_MAX_SHARDS = 1_000_000
_AFTER_NAME = {"pipe": r"[\s?#&'\"|;]", "http": r"[?#]", "https": r"[?#]"}
"""Matches the end of a shard's name in a command or http URL. In other URLs, the name extends to their end."""
_NUM_NAMED = 5
"""Maximum number of shards that a message lists by name."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest(Source):
    """Tar shards, local or remote, with their sample counts if they have been counted."""

    folder: Path
    """Folder of local shards."""
    shards: tuple[Shard, ...]
    """The shards, sorted by name. A name is the path of a shard relative to the folder before the first brace or *, or
    to the folder that all shards of a text file have in common. It contains no other part of a URL, such as a
    password."""
    urls: tuple[str, ...] = ()
    """URLs or `pipe:` commands of remote shards; empty if the shards are in the folder."""
    remote: RemoteSettings = field(default=RemoteSettings(), compare=False, repr=False)
    """How remote shards are fetched."""
    missing: tuple[str, ...] = field(default=(), compare=False)
    """Names of shards that did not exist when the other shards were counted. They are not part of the source."""
    whole: bool = field(default=False, compare=False)
    """True if list_folder listed these shards, so that they are all .tar files in `folder`."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the shards."""
        return tuple(shard.name for shard in self.shards)

    def locate(self) -> dict[str, str]:
        """Return the path, URL or command of each shard by its name."""
        locations = self.urls or [str(self.folder / name) for name in self.names]
        return dict(zip(self.names, locations, strict=True))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of samples in each shard."""
        return [shard.samples for shard in self.shards]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of names and sample counts. It does not include the folder, which may move."""
        return digest([(shard.name, shard.samples) for shard in self.shards])

    def open(self, num_slots: int = 1, window: int = 1) -> TarReader:
        """Open the shards for reading in one process. See Source.open."""
        num_open = num_slots * self.estimate_open_shards(window)
        if not self.urls:
            return TarReader(self.folder, self.shards, num_open)
        cache = self._open_cache()
        return TarReader(cache.folder, self.shards, num_open, cache.open)

    def estimate_open_shards(self, window: int) -> int:
        """Estimate how many shards a slot reads at a time.

        This is the window divided by the mean number of samples per shard, rounded up, plus one, because a window may
        start in the middle of a shard. An uncounted shard is read whole, so it is the only one.
        """
        if not self.num_samples:
            return 1
        return math.ceil(window * len(self.shards) / self.num_samples) + 1

    def open_fetcher(self) -> Callable[[int], None] | None:
        """Return a function that fetches a remote shard into the cache, or None if the shards are local."""
        return self._open_cache().fetch_ahead if self.urls else None

    def _open_cache(self) -> ShardCache:
        return ShardCache(self.urls, list(self.shards), self.remote)

    def label(self, shard: int, entry: int) -> str:
        """Return a name for a sample without reading anything."""
        return f"{self.shards[shard].name}, entry {entry}"


def is_table(text: str) -> bool:
    """Return whether a setting names a local .csv or .tsv file."""
    return text.endswith((".csv", ".tsv")) and not is_remote(text)


def refuse_remote(text: str, remote: RemoteSettings) -> None:
    """Check that the settings allow the given shards, if these are remote.

    Raises:
        ValueError: If the settings do not allow the shards, if the URL scheme is not supported, or if an environment
            variable in the URL is not set. The message names the setting, the scheme or the variable.
    """
    if text.startswith(PIPE):
        if not remote.pipe:
            raise ValueError(
                "a pipe: command runs in a shell with your permissions; if you trust it, set data.remote.pipe=true"
            )
    elif is_remote(text):
        expand(text)
    elif scheme := _URL.match(text):
        raise ValueError(
            f"{scheme[0]} is not supported: use one of {', '.join(SCHEMES)}, or a pipe: command that writes the tar"
        )


def find_shards(text: str, remote: RemoteSettings, known: Iterable[str] | None = None) -> Manifest:
    """List the shards that a setting specifies. No shard is opened.

    Args:
        text: The setting, such as data.shards.
        remote: Which remote shards are allowed, and how they are fetched.
        known: Names of the shards in a manifest, to which a remote pattern is applied. If None, the bucket is listed.

    Raises:
        ValueError: If there are no shards, if the settings do not allow the remote shards, if the text names a csv
            file, or if a bucket cannot be listed.
    """
    refuse_remote(text, remote)
    if is_table(text):
        raise ValueError("a csv file needs no manifest: its rows are counted when a run starts")
    text = os.path.expanduser(text)
    if text.endswith(".txt"):
        return _read_list(Path(text), remote)
    if not (is_remote(text) or text.endswith(".tar") or "{" in text or "*" in text):
        return list_folder(resolve_shards(text))
    start = _find_start(text)
    locations = _expand(text, _cut(text.removeprefix(start), text))
    if "*" in text and not text.startswith(PIPE):
        if is_remote(text):
            locations = _match_remote(locations, start, remote, known)
        else:
            locations = sorted({path for pattern in locations for path in glob(_escape(pattern))})
        if not locations:
            raise ValueError(f"no shard matches {text}")
    return _make_listing(locations, start, remote)


def list_folder(folder: Path) -> Manifest:
    """List every .tar file in a folder.

    Raises:
        ValueError: If the folder does not exist or contains no .tar file.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    paths = [f"{folder}/{name}" for name in os.listdir(folder) if name.endswith(".tar")]
    if not paths:
        raise ValueError(f"{folder} contains no .tar file; expected a folder of webdataset shards")
    return replace(_make_listing(paths, f"{folder}/", RemoteSettings()), whole=True)


def _read_list(path: Path, remote: RemoteSettings) -> Manifest:
    """List the shards that a text file names, one per line.

    Raises:
        ValueError: If the file cannot be read, or lists no shard, a shard twice, or both local and remote shards.
    """
    lines = map(str.strip, read_text(path, "list of shards").split("\n"))
    locations = [os.path.expanduser(line) for line in lines if line and not line.startswith("#")]
    for location in locations:
        refuse_remote(location, remote)
    if len({is_remote(location) for location in locations}) != 1 or any(
        location.startswith(PIPE) for location in locations
    ):
        raise ValueError(f"{path} must list either local shards or URLs, one per line")
    start = os.path.commonprefix([_cut(location, location) for location in locations])  # noqa: RUF071 - cut after a slash below
    # Relative paths are relative to the file, so that it can be moved together with the shards.
    return _make_listing(locations, start[: start.rfind("/") + 1], remote, path.parent)


def _find_start(text: str) -> str:
    """Return what precedes the shards' names in a pattern.

    Raises:
        ValueError: If a URL or command has neither braces nor * nor the name of a .tar file.
    """
    # ${NAME} is an environment variable, not a brace pattern, and not a part of the shard's name.
    masked = VARIABLE.sub(lambda name: "$" * len(name[0]), text)
    match = re.search(r"[{*]", masked) or _TAR.search(masked)
    if match is None:
        raise ValueError(
            "a URL or command must contain braces, such as {0000..0099}.tar, or the name of a single .tar file"
        )
    before = text[: match.start()]
    if text.startswith("http"):
        before = _cut(before, text)
    # In a command, a space or a quote may precede the name.
    separators = "/ '\"" if text.startswith(PIPE) else "/"
    return text[: max(map(before.rfind, separators)) + 1]


def _cut(name: str, location: str) -> str:
    """Remove what follows the name of a shard in the URL or command `location`. It may be secret."""
    after_name = _AFTER_NAME.get(location.partition(":")[0])
    return re.split(after_name, name, maxsplit=1)[0] if after_name else name


def _expand(text: str, name: str) -> list[str]:
    """Expand the braces of a pattern, and return the resulting strings.

    Args:
        text: The pattern.
        name: Name of the pattern in error messages.

    Raises:
        ValueError: If a brace is missing, or if there are too many strings.
    """
    sizes = [abs(int(last) - int(first)) for first, last in _RANGE.findall(text)]
    try:
        # The range of a brace is expanded at once, but combinations of several braces are not.
        expanded = braceexpand(text, escape=False) if max(sizes, default=0) < _MAX_SHARDS else ()
        locations = list(islice(expanded, _MAX_SHARDS + 1))
    except (ValueError, RecursionError):
        raise ValueError(f"the braces in {shorten(name)} are not balanced") from None
    if not 0 < len(locations) <= _MAX_SHARDS:
        raise ValueError(
            f"the braces in {shorten(name)} expand to more than {_MAX_SHARDS:,} shards; check their ranges"
        )
    return locations


def _match_remote(
    patterns: Collection[str], start: str, remote: RemoteSettings, known: Iterable[str] | None
) -> list[str]:
    """Return the URLs of the shards that match a pattern. All patterns begin with `start`.

    Raises:
        ValueError: If the server cannot list its files, or if listing them fails.
    """
    if not start.startswith(BUCKETS):
        raise ValueError(
            f"only {', '.join(BUCKETS)} and local folders can be searched with *; use braces or a .txt file"
        )
    if known is None:
        known = [url.removeprefix(start) for url in list_objects(start, remote)]
    # An absolute pattern must match the whole path, not only its end.
    absolute = [_escape("/" + pattern.removeprefix(start)) for pattern in patterns]
    return [
        start + name
        for name in known
        if any(PurePosixPath("/" + name).match(pattern) for pattern in absolute)
    ]


def _escape(pattern: str) -> str:
    """Escape all special characters of a pattern, except *."""
    return re.sub(r"[?[]", r"[\g<0>]", pattern)


def _make_listing(
    locations: Collection[str], start: str, remote: RemoteSettings, base: Path = Path()
) -> Manifest:
    """Return a listing of shards.

    Args:
        locations: Local paths, or URLs and commands. All of them begin with `start`.
        start: The part of each location before the name of the shard.
        remote: How remote shards are fetched.
        base: Folder to which local paths are relative.

    Raises:
        ValueError: If two shards have the same name or path.
    """
    urls: dict[str, str] = {}
    names: dict[str, str] = {}
    """Shard names by path, because two paths lead to the same file if one of them contains a link."""
    for location in locations:
        name = _cut(location.removeprefix(start), location)
        path = name if is_remote(location) else os.path.realpath(base / location)
        if path in names:
            raise ValueError(f"the shard {name} is named twice, the first time as {names[path]}")
        names[path] = name
        urls[name] = location
    shards = tuple(Shard(name, samples=0, bytes=0) for name in sorted(urls))
    if is_remote(location):
        return Manifest(Path(), shards, tuple(urls[shard.name] for shard in shards), remote)
    return Manifest(base / start, shards)


def resolve_shards(text: str) -> Path:
    """Return the path that a setting names. `bundled:<set>` names the folder of a data set included in the package."""
    if text.startswith(_BUNDLED):
        return PACKAGE / "assets" / text.removeprefix(_BUNDLED)
    return Path(text).expanduser()


def collect(listing: Manifest, counted: Mapping[str, Shard]) -> Manifest:
    """Return the manifest of those shards of a listing that have been counted."""
    kept = [name in counted for name in listing.names]
    shards = tuple(counted[name] for name in compress(listing.names, kept))
    return replace(listing, shards=shards, urls=tuple(compress(listing.urls, kept)))


def write_manifest(manifest: Manifest, path: Path | None = None) -> Path:
    """Write a manifest atomically, by default to manifest.json in its folder, and return the path of the file."""
    path = path or manifest.folder / NAME
    shards = [shard._asdict() for shard in manifest.shards]
    tree = {"version": 1, "shards": shards, "missing": manifest.missing}
    write_json(path, tree)
    return path


def read_manifest(path: Path) -> Manifest:
    """Read a manifest file. Whether its shards are in the same folder is not checked.

    Raises:
        ValueError: If the file is not a manifest.
    """
    with explain_errors(f"{path} is not a manifest", "write it with disco-ds index"):
        tree = json.loads(path.read_bytes())
        shards = tuple(Shard(**item) for item in tree["shards"])
    return Manifest(path.parent, shards, missing=tuple(tree.get("missing", ())))


def load_manifest(where: Path | Manifest, path: Path | None = None) -> Manifest:
    """Read the manifest entries of a folder or of the listed shards, and compare them with the shards.

    A shard that has changed since it was counted causes only a warning. If it was truncated, only the samples that were
    cut off are lost.

    Args:
        where: The folder, or the shards that find_shards lists.
        path: Path of the manifest; None means manifest.json in the folder.

    Raises:
        ValueError: If manifest and shards do not match. The message states the difference and the remedy.
        OSError: If a listed local shard cannot be found.
    """
    listing = where if isinstance(where, Manifest) else list_folder(where)
    path = path or listing.folder / NAME
    shards = listing.folder if listing.whole else "'SHARDS'"
    remedy = f"index the shards: disco-ds index {shards} --to {path}"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; {remedy}")
    counted = read_manifest(path)
    known = {shard.name: shard for shard in counted.shards}
    names = set(listing.names)
    # A folder must match its manifest exactly; a listing may name only some of its shards.
    if listing.whole and (gone := known.keys() - names):
        raise ValueError(f"{path} lists missing shards: {some(gone)}; restore them, or {remedy}")
    # Shards that did not exist when the manifest was written are left out.
    if uncounted := names - known.keys() - set(counted.missing):
        raise ValueError(f"{path} does not list {some(uncounted)}; {remedy}")
    manifest = collect(listing, known)
    if not manifest.num_samples:
        raise ValueError(f"the shards of {path} contain no complete sample")
    if changed := find_changed(manifest):
        logger.warning(
            "%s: %d of %s changed in size since they were counted: %s; disco-ds index --check shows whether the "
            "counts are still correct",
            listing.folder,
            len(changed),
            plural(len(names), "shard"),
            some(changed),
        )
    return manifest


def find_changed(manifest: Manifest) -> list[str]:
    """Return the names of the local shards whose size has changed since they were counted.

    Raises:
        FileNotFoundError: If a shard no longer exists.
    """
    if manifest.urls:
        return []
    return [
        shard.name
        for shard in manifest.shards
        if os.stat(manifest.folder / shard.name).st_size != shard.bytes
    ]


def some(names: Collection[str], most: int = _NUM_NAMED) -> str:
    """Return the first few names, and how many more there are."""
    ordered = sorted(names)
    rest = len(ordered) - most
    return ", ".join(ordered[:most]) + (f" and {rest} more" if rest > 0 else "")
