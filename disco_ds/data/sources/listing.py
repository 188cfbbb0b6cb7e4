"""The shards that a setting such as data.shards names: their names and where they are. No shard is opened.

folder, bundled:<set>          every .tar in the folder
/data/{00000..00099}.tar       local shards by name; several braces and lists {a,b} also work
https://host/x/{0..9}.tar      fetched, if data.remote.http allows it
pipe:COMMAND {0..9}.tar        the output of a shell command, if data.remote.pipe allows it
table.csv                      rows of image path and caption
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from braceexpand import braceexpand

from disco_ds.config import PACKAGE
from disco_ds.config.data import RemoteSettings
from disco_ds.config.secrets import expand

NAME = "manifest.json"
"""File name of the manifest in a folder of shards."""
PIPE = "pipe:"
"""Prefix of a shell command that writes a shard."""
MAX_SHARDS = 10_000_000
"""More shards are assumed to be a mistake in the braces; the largest known data set has 1.3 million."""
_BUNDLED = "bundled:"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
# In a URL or command, a name ends at white space, /, quotes and the delimiters of a query.
_BRACES = re.compile(r"[^\s/?&='\"|]*\{.*\}[^\s?#&'\"|]*")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
_TAR = re.compile(r"[^\s/?&='\"|]+\.tar\b")


@dataclass(frozen=True)
class Listing:
    """The shards that a setting names, before their samples are counted."""

    folder: Path
    """Folder of local shards."""
    names: tuple[str, ...]
    """Sorted names for the manifest: paths below the folder, or the parts in which the URLs differ. They never contain
    a query or a password."""
    urls: tuple[str, ...] = ()
    """URLs of remote shards."""
    whole: bool = False
    """Whether these are all shards of the folder."""


def is_table(text: str) -> bool:
    """Return whether a setting names a local csv file."""
    return text.endswith((".csv", ".tsv")) and not is_remote(text)


def is_remote(text: str) -> bool:
    """Return whether a setting names a URL or a command."""
    return text.startswith(("http://", "https://", PIPE))


def refuse_remote(text: str, remote: RemoteSettings) -> None:
    """Check that the settings allow the shards, if they are remote.

    Raises:
        ValueError: Names the setting that would allow them, or the variable of a URL that is not set.
    """
    if text.startswith(PIPE):
        if not remote.pipe:
            raise ValueError(
                "a pipe: runs its command in a shell with your rights; if you trust it, set data.remote.pipe=true"
            )
    elif is_remote(text):
        if not remote.http:
            raise ValueError(
                "shards at a URL are downloaded to data.remote.cache; to allow this, set data.remote.http=true"
            )
        expand(text)
    elif match := _URL.match(text):
        raise ValueError(
            f"{match[0]} is not read directly: use an http(s) URL, or a pipe: whose command writes the tar"
        )


def find_shards(text: str, remote: RemoteSettings) -> Listing:
    """List the shards of a text, which may name a folder or the shards themselves.

    Raises:
        ValueError: If there are no shards, if they are remote and not allowed, or if the text names a csv file.
    """
    refuse_remote(text, remote)
    if is_table(text):
        raise ValueError("a csv file needs no manifest: its rows are counted when a run starts")
    if is_remote(text) or text.endswith(".tar") or "{" in text:
        return list_shards(text)
    return list_folder(resolve_shards(text))


def list_folder(folder: Path) -> Listing:
    """List every .tar of a folder.

    Raises:
        ValueError: If there are none.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    names = sorted(name for name in os.listdir(folder) if name.endswith(".tar"))
    if not names:
        raise ValueError(f"{folder} contains no .tar file, expected a folder of webdataset shards")
    return Listing(folder, tuple(names), whole=True)


def list_shards(text: str) -> Listing:
    """List the shards of a text with braces, or of one that names a single .tar.

    Raises:
        ValueError: If the braces do not match, name too many shards, or name a shard twice.
    """
    remote = is_remote(text)
    if remote:
        # Braces in the path take precedence over those in the query, which may contain a signature.
        head = text if text.startswith(PIPE) else text.partition("?")[0]
        match = _BRACES.search(head) or _BRACES.search(text) or _TAR.search(head)
        if match is None:
            raise ValueError(
                "a URL or command names its shards by braces, such as {0000..0099}.tar, or names one .tar"
            )
        start, stop = match.span()
    else:
        # The folder is everything up to the last slash before the first brace; the rest is names.
        start, stop = text.partition("{")[0].rfind("/") + 1, len(text)
    given = text[start:stop]
    too_many = f"{given} names more than {MAX_SHARDS:,} shards"
    # braceexpand expands each range as a whole, even if fewer names are taken.
    for first, last, step in _RANGE.findall(given):
        if len(range(0, abs(int(last) - int(first)) + 1, int(step or 1) or 1)) > MAX_SHARDS:
            raise ValueError(too_many)
    try:
        names = sorted(islice(braceexpand(given, escape=False), MAX_SHARDS + 1))
    except ValueError:
        raise ValueError(f"the braces of {given} do not match") from None
    if len(names) > MAX_SHARDS:
        raise ValueError(too_many)
    if len(set(names)) < len(names):
        raise ValueError(f"{given} names a shard twice")
    if remote:
        urls = tuple(text[:start] + name + text[stop:] for name in names)
        return Listing(Path(), tuple(names), urls)
    return Listing(Path(text[:start]).expanduser(), tuple(names))


def resolve_shards(text: str) -> Path:
    """Return the folder that a text names: a path, or `bundled:<set>` for data of the package.

    Raises:
        ValueError: If there is no bundled set of that name; lists the sets.
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
