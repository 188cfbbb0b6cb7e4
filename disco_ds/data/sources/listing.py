"""List the names and locations of the shards that a setting such as data.shards specifies. No shard is opened.

The setting has one of these forms:

folder, bundled:<set>          every .tar file in the folder or in the bundled data set
/data/{00000..00099}.tar       local shards by name; several braces and lists such as {a,b} also work
https://host/x/{0..9}.tar      shards to download; also s3://, gs://, az:// and hf://
pipe:COMMAND {0..9}.tar        the output of one shell command per shard, if data.remote.pipe allows it
table.csv                      a table whose rows contain an image path and captions
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from braceexpand import braceexpand

from disco_ds.config import PACKAGE
from disco_ds.config.data import PIPE, SCHEMES, RemoteSettings, is_remote
from disco_ds.config.secrets import expand

NAME = "manifest.json"
"""Default file name of the manifest in a folder of shards."""
MAX_SHARDS = 10_000_000
"""Maximum number of shards. More are assumed to be a mistake in the braces; the largest known data set has 1.3M."""
_BUNDLED = "bundled:"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
# In a URL or command, a shard name is delimited by white space, slashes, quotes and the delimiters of a URL query.
_BRACES = re.compile(r"[^\s/?&='\"|]*\{.*\}[^\s?#&'\"|]*")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
_TAR = re.compile(r"[^\s/?&='\"|]+\.tar\b")


@dataclass(frozen=True)
class Listing:
    """The shards that a setting names, before their samples are counted."""

    folder: Path
    """Folder of local shards."""
    names: tuple[str, ...]
    """Sorted shard names, as in the manifest. The name of a local shard is its path relative to the folder; that of a
    remote shard is the part of its URL or command that contains the braces, or the file name of a single .tar. Other
    parts of the URL, such as a password, are left out."""
    urls: tuple[str, ...] = ()
    """URLs or `pipe:` commands of remote shards, in the order of `names`; empty for local shards."""
    whole: bool = False
    """Whether `names` contains all shards of the folder."""


def is_table(text: str) -> bool:
    """Return whether a setting names a local csv file."""
    return text.endswith((".csv", ".tsv")) and not is_remote(text)


def refuse_remote(text: str, remote: RemoteSettings) -> None:
    """Check that the settings allow the given shards, if these are remote.

    Raises:
        ValueError: If the settings do not allow the shards, or if an environment variable in the URL is not set. The
            message names the setting or the variable.
    """
    if text.startswith(PIPE):
        if not remote.pipe:
            raise ValueError(
                "a pipe: runs its command in a shell with your rights; if you trust it, set data.remote.pipe=true"
            )
    elif is_remote(text):
        expand(text)
    elif match := _URL.match(text):
        raise ValueError(
            f"{match[0]} is not supported: use one of {', '.join(SCHEMES)}, or a pipe: whose command writes the tar"
        )


def find_shards(text: str, remote: RemoteSettings) -> Listing:
    """List the shards that a text specifies, either by a folder or by their names.

    Raises:
        ValueError: If there are no shards, if the shards are remote and the settings do not allow this, or if the text
            names a csv file.
    """
    refuse_remote(text, remote)
    if is_table(text):
        raise ValueError("a csv file needs no manifest: its rows are counted when a run starts")
    if is_remote(text) or text.endswith(".tar") or "{" in text:
        return list_shards(text)
    return list_folder(resolve_shards(text))


def list_folder(folder: Path) -> Listing:
    """List every .tar file in a folder.

    Raises:
        ValueError: If the folder does not exist or contains no .tar file.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    names = sorted(name for name in os.listdir(folder) if name.endswith(".tar"))
    if not names:
        raise ValueError(f"{folder} contains no .tar file, expected a folder of webdataset shards")
    return Listing(folder, tuple(names), whole=True)


def list_shards(text: str) -> Listing:
    """List the shards that a text specifies with braces, or the single .tar that it names.

    Raises:
        ValueError: If the braces are unbalanced, specify too many shards, or specify a shard twice.
    """
    remote = is_remote(text)
    if remote:
        # Braces in the path take precedence over braces in the query, because the query may be a signature.
        head = text if text.startswith(PIPE) else text.partition("?")[0]
        match = _BRACES.search(head) or _BRACES.search(text) or _TAR.search(head)
        if match is None:
            raise ValueError(
                "a URL or command names its shards by braces, such as {0000..0099}.tar, or names one .tar"
            )
        start, stop = match.span()
    else:
        # The folder is everything up to the last slash before the first brace. The rest is the pattern of names.
        start, stop = text.partition("{")[0].rfind("/") + 1, len(text)
    given = text[start:stop]
    too_many = f"{given} names more than {MAX_SHARDS:,} shards"
    # Check the length of each range first: braceexpand expands the whole range, even if few names are used.
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
    """Return the folder that a text names: a path, or `bundled:<set>` for a data set included in the package.

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
