"""What a setting such as data.shards may name, and the names and places of the shards it means. Opens no shard.

folder, bundled:<set>          every .tar in it
/data/{00000..00099}.tar       local shards one by one; several braces and lists {a,b} work too
https://host/x/{0..9}.tar      fetched, if data.remote.http allows it
pipe:COMMAND {0..9}.tar        what a shell command writes, if data.remote.pipe allows it
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
PIPE = "pipe:"
MAX_SHARDS = 10_000_000
"""More are taken for a mistake in the braces; the largest known data set has 1.3 million."""
_BUNDLED = "bundled:"
# In a URL or command a name ends at white space, /, quotes and the delimiters of a query.
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_BRACES = re.compile(r"[^\s/?&='\"|]*\{.*\}[^\s?#&'\"|]*")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
_TAR = re.compile(r"[^\s/?&='\"|]+\.tar\b")


@dataclass(frozen=True)
class Listing:
    """The shards that a setting means, before their samples are counted."""

    folder: Path
    """Where local shards are."""
    names: tuple[str, ...]
    """In the manifest, sorted: paths below the folder, or what differs between URLs. Never a query or a password."""
    urls: tuple[str, ...] = ()
    """Of remote shards."""
    whole: bool = False
    """Whether these are all shards of the folder."""


def is_table(text: str) -> bool:
    return text.endswith((".csv", ".tsv")) and not is_remote(text)


def is_remote(text: str) -> bool:
    return text.startswith(("http://", "https://", PIPE))


def refuse_remote(text: str, remote: RemoteSettings) -> None:
    """Raises: ValueError naming the setting that would allow it, or a variable of a URL that is not set."""
    if text.startswith(PIPE) and not remote.pipe:
        raise ValueError(
            "a pipe: runs its command in a shell, as you; if you trust it, set data.remote.pipe=true"
        )
    if is_remote(text) and not text.startswith(PIPE) and not remote.http:
        raise ValueError(
            "shards at a URL are fetched into data.remote.cache; to allow it, set data.remote.http=true"
        )
    if is_remote(text) and not text.startswith(PIPE):
        expand(text)
    if (match := _URL.match(text)) and not is_remote(text):
        raise ValueError(
            f"{match[0]} is not read directly: give an http(s) URL, or a pipe: whose command writes the tar"
        )


def find_shards(text: str, remote: RemoteSettings) -> Listing:
    """The shards that a text means, whether it names a folder or the shards themselves.

    Raises:  ValueError if there are none, they have no manifest, or they are remote and not allowed.
    """
    refuse_remote(text, remote)
    if is_table(text):
        raise ValueError("a csv file needs no manifest: its rows are counted when a run starts")
    if is_remote(text) or text.endswith(".tar") or "{" in text:
        return list_shards(text)
    return list_folder(resolve_shards(text))


def list_folder(folder: Path) -> Listing:
    """Every .tar of a folder. Raises: ValueError if there are none."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".tar"))
    if not names:
        raise ValueError(f"{folder} holds no .tar file, expected a folder of webdataset shards")
    return Listing(folder, tuple(names), whole=True)


def list_shards(text: str) -> Listing:
    """The shards of a text with braces, or of one that names a single .tar.

    Raises:  ValueError for braces that do not match and shards that would share a name.
    """
    if is_remote(text):
        # Braces in the path take precedence over those in the query, which may hold a signature.
        head = text if text.startswith(PIPE) else text.partition("?")[0]
        match = _BRACES.search(head) or _BRACES.search(text) or _TAR.search(head)
        if match is None:
            raise ValueError(
                "a URL or command names its shards by braces, {0000..0099}.tar, or one that ends in .tar"
            )
        start, stop = match.span()
    else:
        # The last folder before the first brace is the folder of the shards; all after it are names.
        start, stop = text.rfind("/", 0, text.find("{") if "{" in text else None) + 1, len(text)
    given = text[start:stop]
    # Each range is expanded as a whole, even if fewer names are asked for.
    ranges = (
        range(0, abs(int(b) - int(a)) + 1, int(step or 1) or 1)
        for a, b, step in _RANGE.findall(given)
    )
    if any(len(numbers) > MAX_SHARDS for numbers in ranges):
        raise ValueError(f"{given} names more than {MAX_SHARDS:,} shards")
    try:
        names = sorted(islice(braceexpand(given, escape=False), MAX_SHARDS + 1))
    except ValueError:
        raise ValueError(f"the braces of {given} do not match") from None
    if len(names) > MAX_SHARDS:
        raise ValueError(f"{given} names more than {MAX_SHARDS:,} shards")
    if len(set(names)) < len(names):
        raise ValueError(f"{given} names a shard twice")
    urls = tuple(text[:start] + name + text[stop:] for name in names) if is_remote(text) else ()
    return Listing(Path(text[:start]).expanduser() if not urls else Path(), tuple(names), urls)


def resolve_shards(text: str) -> Path:
    """The folder of a text that names one: a path, or `bundled:<set>` for data of the package.

    Raises:  ValueError listing the bundled sets when there is none of that name.
    """
    if not text.startswith(_BUNDLED):
        return Path(text).expanduser()
    assets = PACKAGE / "assets"
    folder = assets / text.removeprefix(_BUNDLED)
    if not folder.is_dir():
        known = sorted(
            _BUNDLED + path.parent.relative_to(assets).as_posix() for path in assets.rglob(NAME)
        )
        raise ValueError(f"no bundled data is called {text!r}; known: {', '.join(known) or 'none'}")
    return folder
