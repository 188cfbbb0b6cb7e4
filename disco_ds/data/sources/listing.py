"""The names and locations of the shards that a setting such as data.shards specifies. No shard is opened.

The setting has one of these forms:

folder, bundled:<set>          every .tar file in the folder or in the bundled data set
/data/{00000..00099}.tar       local shards by name; several braces and lists such as {a,b} also work
/data/part-*/*.tar             local shards by a pattern; also s3://, gs:// and az://. * does not match a slash
shards.txt                     a text file with one shard per line, all local or all remote
https://host/x/{0..9}.tar      shards to download; also s3://, gs://, az:// and hf://
pipe:COMMAND {0..9}.tar        the output of one shell command per shard, if data.remote.pipe allows it
table.csv                      a table whose rows contain an image path and captions
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from braceexpand import alphabet, braceexpand

from disco_ds.config import PACKAGE
from disco_ds.config.data import PIPE, SCHEMES, RemoteSettings, is_remote
from disco_ds.config.secrets import VARIABLE, expand
from disco_ds.config.text_file import read_text
from disco_ds.data.remote.stores import BUCKETS, StoreError, list_objects
from disco_ds.names import shorten

NAME = "manifest.json"
"""Default file name of the manifest in a folder of shards."""
_BUNDLED = "bundled:"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.-?(\d+))?")
"""Matches a range in braces, such as 000..099, a..f or 0..90..10."""
_INNERMOST = re.compile(r"\{([^{}]*)\}")
"""Matches a pair of braces that contains no others."""
_MAX_SHARDS = 10_000_000
_REST = re.compile(r"\?.*|(?<=\.tar)[\s'\"|].*")
"""Matches what follows a shard's name in a URL or command: a query, which may be a signature, or other arguments."""
_END = re.compile(r"[?#].*")
"""Matches what follows a shard's name in an http URL. All other URLs have neither a query nor a fragment."""
_WITH_ARGUMENTS = (PIPE, "http://", "https://")
"""How a place begins if its shard's name may be followed by other text."""
_END_IN_COMMAND = re.compile(r"[\s?#&'\"|;].*")
"""Matches what follows a shard's name in a command, or in the query of a URL."""


@dataclass(frozen=True)
class Listing:
    """The shards that a setting names, before their samples are counted."""

    folder: Path
    """Folder of local shards."""
    names: tuple[str, ...]
    """Sorted shard names, as in the manifest. A name is the path of a shard relative to the folder before the first
    brace or *, or to the folder that all shards of a text file have in common. It contains no other part of a URL, such
    as a password."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """URLs or `pipe:` commands of remote shards by name, in the order of `names`; empty for local shards."""
    whole: bool = False
    """Whether `names` contains all shards of the folder."""


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
    elif (match := _URL.match(text)) and match[0] != "file://":
        raise ValueError(
            f"{match[0]} is not supported: use one of {', '.join(SCHEMES)}, or a pipe: command that writes the tar"
        )


def find_shards(text: str, remote: RemoteSettings, known: Iterable[str] | None = None) -> Listing:
    """List the shards that a setting specifies, either by a folder or by their names.

    Args:
        text: The setting, such as data.shards.
        remote: Which remote shards are allowed, and how to list a bucket.
        known: Names of the shards in a manifest, to which a remote pattern is applied. If None, the bucket is listed.

    Raises:
        ValueError: If there are no shards, if the settings do not allow the remote shards, or if the text names a csv
            file.
    """
    refuse_remote(text, remote)
    if is_table(text):
        raise ValueError("a csv file needs no manifest: its rows are counted when a run starts")
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://"))
    if text.endswith(".txt"):
        return _read_list(Path(text).expanduser(), remote)
    if "*" in text and not text.startswith(PIPE):
        return _match_remote(text, remote, known) if is_remote(text) else _match_local(text)
    if is_remote(text) or text.endswith(".tar") or "{" in text:
        return list_shards(text)
    folder = resolve_shards(text)
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}; expected a folder of .tar shards, names of .tar shards, a .txt file that "
            "lists them, or a .csv file"
        )
    return list_folder(folder)


def _read_list(path: Path, remote: RemoteSettings) -> Listing:
    """List the shards that a text file names, one per line.

    Raises:
        ValueError: If the file cannot be read, or lists no shard, a shard twice, or both local and remote shards.
    """
    lines = [line.strip() for line in read_text(path, "list of shards").split("\n")]
    places = [line for line in lines if line and not line.startswith("#")]
    for place in places:
        refuse_remote(place, remote)
    if len({is_remote(place) for place in places}) != 1 or any(
        place.startswith(PIPE) for place in places
    ):
        raise ValueError(f"{path} must list either local shards or URLs, one per line")
    start = os.path.commonprefix(list(map(_strip, places)))  # noqa: RUF071 - cut after a slash below
    # Relative paths are relative to the file, so that it can be moved together with the shards.
    return _make_listing(places, start[: start.rfind("/") + 1], path.parent)


def _strip(place: str) -> str:
    """Remove what follows the name of a shard in a URL or command. A local path is returned unchanged."""
    return _REST.sub("", place) if place.startswith(_WITH_ARGUMENTS) else place


def _find_name(place: str, start: str) -> str:
    """Return the name of a shard, which begins after `start`. What follows the name may be secret and is removed."""
    rest = place.removeprefix(start)
    if not place.startswith(_WITH_ARGUMENTS):
        return rest
    in_command = place.startswith(PIPE) or "?" in start
    return (_END_IN_COMMAND if in_command else _END).sub("", rest)


def _make_listing(places: Collection[str], start: str, base: Path = Path()) -> Listing:
    """Return a listing of shards.

    Args:
        places: Local paths, or URLs and commands. All of them begin with `start`.
        start: The part of each place before the name of the shard.
        base: Folder to which local paths are relative.

    Raises:
        ValueError: If two shards have the same name or path.
    """
    urls: dict[str, str] = {}
    named: dict[str, str] = {}
    for place in places:
        name = _find_name(place, start)
        # Two paths lead to the same file if one of them contains a link.
        path = name if is_remote(place) else os.path.realpath(base / Path(place).expanduser())
        if path in named:
            other = "" if named[path] == name else f": {named[path]} is the same file"
            raise ValueError(f"the shard {name} is named twice{other}")
        urls[name] = place
        named[path] = name
    names = tuple(sorted(urls))
    if is_remote(place):
        return Listing(Path(), names, {name: urls[name] for name in names})
    return Listing(base / Path(start).expanduser(), names)


def _match_local(text: str) -> Listing:
    """List the local shards that match a pattern, which may also contain braces.

    Raises:
        ValueError: If nothing matches.
    """
    text = os.path.expanduser(text)
    first = min(text.find(mark) for mark in "*{" if mark in text)
    folder = text[: text.rfind("/", 0, first) + 1]
    paths = {path for pattern in _expand(text, text) for path in glob(_escape(pattern))}
    if not paths:
        raise ValueError(f"no file matches {text}")
    return _make_listing(paths, folder)


def _escape(pattern: str) -> str:
    """Escape all special characters of a pattern, except *."""
    return re.sub(r"[?[]", r"[\g<0>]", pattern)


def _match_remote(text: str, remote: RemoteSettings, known: Iterable[str] | None) -> Listing:
    """List the shards of a bucket that match a pattern.

    Raises:
        ValueError: If nothing matches, or if the server cannot list its files.
    """
    if not text.startswith(BUCKETS):
        raise ValueError(
            f"only {', '.join(BUCKETS)} and local folders can be searched with *; use braces or a .txt file"
        )
    start = text[: text.rfind("/", 0, text.index("*")) + 1]
    if known is None:
        try:
            found = list_objects(start, remote)
        except StoreError as error:
            raise ValueError(f"{start} cannot be listed: {error}") from None
        known = [url.removeprefix(start) for url in found]
    # An absolute pattern must match the whole path, not only its end.
    pattern = _escape("/" + text.removeprefix(start))
    urls = [start + name for name in known if PurePosixPath("/" + name).match(pattern)]
    if not urls:
        raise ValueError(f"no shard matches {text}")
    return _make_listing(urls, start)


def list_folder(folder: Path) -> Listing:
    """List every .tar file in a folder.

    Raises:
        ValueError: If the folder does not exist or contains no .tar file.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    names = [name for name in os.listdir(folder) if name.endswith(".tar")]
    if not names:
        raise ValueError(f"{folder} contains no .tar file; expected a folder of webdataset shards")
    paths = [f"{folder}/{name}" for name in names]
    return replace(_make_listing(paths, f"{folder}/"), whole=True)


def list_shards(text: str) -> Listing:
    """List the shards that a setting specifies with braces, or the single .tar that it names.

    Raises:
        ValueError: If the braces are unbalanced or specify a shard twice, or if a URL or command has neither braces nor
            the name of a .tar file.
    """
    # ${NAME} is an environment variable, not a brace pattern, and not a part of the shard's name.
    masked = VARIABLE.sub(lambda found: "$" * len(found[0]), text) if is_remote(text) else text
    before, brace, _ = masked.partition("{")
    in_query = text.startswith(_WITH_ARGUMENTS) and bool(brace) and "?" in before
    head = before if in_query else _strip(before)
    if is_remote(text) and not brace and not head.endswith(".tar"):
        raise ValueError(
            "a URL or command must contain braces, such as {0000..0099}.tar, or the name of a single .tar file"
        )
    # In a command, a space or a quote may precede the name.
    marks = "/ '\"" if is_remote(text) else "/"
    if in_query:
        marks += "?&="
    start = text[: max(map(head.rfind, marks)) + 1]
    return _make_listing(_expand(text, _find_name(text, start)), start)


def _expand(text: str, name: str) -> list[str]:
    """Expand the braces of a pattern, and return the resulting strings.

    Args:
        text: The pattern.
        name: Name of the pattern in error messages.

    Raises:
        ValueError: If a brace is missing, or if there are too many strings.
    """
    if _count_strings(text) > _MAX_SHARDS:
        raise ValueError(
            f"the braces expand to more than {_MAX_SHARDS:,} shards; check their ranges"
        )
    try:
        return list(braceexpand(text, escape=False))
    except (ValueError, RecursionError):
        raise ValueError(
            f"the braces in {shorten(name)} are not balanced, or are nested too deeply"
        ) from None


def _count_strings(text: str) -> int:
    """Count the strings to which a pattern with braces expands, without creating them."""
    # Replace every innermost pair of braces with its number of strings, until there are no braces.
    num_replaced = 1
    while num_replaced:
        text, num_replaced = _INNERMOST.subn(_count_innermost, text)
    return _multiply(text)


def _count_innermost(braces: re.Match[str]) -> str:
    if found := _RANGE.fullmatch(braces[1]):
        first, last, step = found.groups()
        count = abs(_to_number(last) - _to_number(first)) // (int(step or 1) or 1) + 1
    else:
        count = sum(map(_multiply, braces[1].split(",")))
    return f"\0{min(count, _MAX_SHARDS + 1)}\0"


def _multiply(text: str) -> int:
    """Multiply the numbers that have replaced braces."""
    return math.prod(map(int, re.findall(r"\0(\d+)\0", text)))


def _to_number(end: str) -> int:
    return alphabet.index(end) if end.isalpha() else int(end)


def resolve_shards(text: str) -> Path:
    """Return the path that a setting names. `bundled:<set>` names the folder of a data set included in the package.

    Other paths need not exist.

    Raises:
        ValueError: If there is no bundled data set of that name. The message lists the available ones.
    """
    if not text.startswith(_BUNDLED):
        return Path(text).expanduser()
    assets = PACKAGE / "assets"
    folder = assets / text.removeprefix(_BUNDLED)
    if not folder.is_dir():
        known = sorted(
            _BUNDLED + path.parent.relative_to(assets).as_posix() for path in assets.rglob(NAME)
        )
        raise ValueError(f"there is no bundled data set {text!r}; available: {', '.join(known)}")
    return folder
