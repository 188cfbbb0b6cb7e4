"""Requests to web servers and object stores, and downloads of remote shards.

URLs begin with http(s)://, s3://, gs://, az:// or hf://. A shard can also be the output of a shell command
(`pipe:COMMAND`). Credentials come from the environment, never from a recipe. obstore reads AWS_*, GOOGLE_* and AZURE_*.
hf:// uses HF_TOKEN or the login of huggingface_hub. $NAME in a URL stands for an environment variable. Error messages
contain no part of a URL or command that may be secret.

Alternatives considered: obstore's retries (the worker would appear to hang during them) and webdataset's gopen (it
ignores some failed commands and does not check the HTTP status).
"""

import base64
import os
import random
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import lru_cache

# `wait` uses poll(). select() would not accept file descriptors above 1,023.
from multiprocessing.connection import wait
from typing import Any, BinaryIO, NamedTuple, TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from disco_ds.config.data import DEFAULT_CACHE_GB, PIPE, RemoteSettings
from disco_ds.config.secrets import expand
from disco_ds.data.errors import DataError

T = TypeVar("T")
BUCKETS = ("s3://", "gs://", "az://")
"""Prefixes of the URLs of object stores, which can list their objects."""
_BLOCK = 2**20
_TRANSIENT_STATUS = {408, 425, 429}
"""HTTP statuses below 500 after which another attempt may succeed. After all other 4xx statuses, it cannot."""
_PLAIN_PATH = re.compile(r"/[\w.~-]+(/[\w.~-]+)*")
_HUB = re.compile(r"hf://(datasets/|spaces/)?([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")
"""Matches the kind of repository, its name, a revision and a path."""
_STATUS = re.compile(r"status code: (\d+) ?([A-Za-z -]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
"""Matches an error code of S3, Google or Azure, such as ExpiredToken."""
_CAUSES = {
    "TimedOut|kind: Timeout": "timed out",
    "MissingContentLength": "the server does not state the length of the content",
    "IncompleteBody": "the connection ended before the end of the content",
    "dns error": "the host name is unknown",
    r"message: \"([\w ]+)\"": "",
    "(invalid peer certificate: [\\w ]+)": "",
}
"""Maps patterns in obstore's error descriptions to the reason to report. If the reason is "", the text that the
pattern's group matched is reported."""


class StoreError(Exception):
    """A request failed. The message is the reason, without secrets."""

    def __init__(self, reason: str, transient: bool = True) -> None:
        super().__init__(reason)
        self.transient = transient
        """True if another attempt may succeed."""


class MissingError(StoreError, FileNotFoundError):
    """The server answered that the object does not exist."""


class Version(NamedTuple):
    """Size and tag of a file. They identify its content without reading it."""

    bytes: int
    """Size in bytes; 0 if it is unknown, as for the output of a command."""
    tag: str
    """ETag or time of the last modification; "" if the server returns neither."""


class _Progress(threading.local):
    """A count that grows with every sign of progress, such as a received block. It shows that a data worker is alive.

    The count is the last integer of `count`, in memory that the worker shares with the trainer. Other threads of the
    worker have separate counts, so that the trainer notices a hung reading thread even while other threads prefetch.
    """

    def __init__(self) -> None:
        self.count: Any = [0]

    def add(self) -> None:
        self.count[-1] += 1


progress = _Progress()


def fetch(
    url: str, name: str, file: BinaryIO, settings: RemoteSettings, size: int | None = None
) -> None:
    """Download a remote shard into an open file, in several attempts if necessary.

    Args:
        url: Address of the shard, or `pipe:COMMAND`.
        name: Name of the shard in messages.
        file: File to write to.
        settings: Number of attempts, timeout and size limit.
        size: Expected size in bytes; None allows any size up to the limit.

    Raises:
        DataError: If all attempts fail. The message contains the URL, without secrets, and the last failure.
    """
    limit_gb = settings.cache_gb or DEFAULT_CACHE_GB
    most = size or limit_gb * 1e9  # content without a stated length could fill the disk

    def attempt() -> None:
        # Other processes may be waiting for this file. The new file time shows them that the download is still running.
        os.utime(file.fileno())
        progress.add()
        done = 0
        read = _read_command if url.startswith(PIPE) else _read_url
        with (
            closing(read(url, settings.timeout_s)) as blocks,
            open(file.fileno(), "wb", closefd=False) as target,
        ):
            target.seek(0)
            for block in blocks:
                progress.add()
                target.write(block)
                done += len(block)
                if done > most:
                    break
        if size not in (None, done):
            raise StoreError(
                f"{done:,} bytes arrived, but the manifest says {size:,}; if the shard was replaced, index it again"
            )
        if done > most:
            raise StoreError(
                f"it is larger than the limit for a shard, data.remote.cache_gb ({limit_gb:g} GB)",
                transient=False,
            )
        file.truncate(done)

    try:
        _retry(attempt, settings)
    except StoreError as error:
        raise DataError(f"shard {name} cannot be fetched from {describe(url)}: {error}") from None


@contextmanager
def fetch_temporary(url: str, name: str, settings: RemoteSettings) -> Iterator[BinaryIO]:
    """Download a remote shard into an unnamed temporary file.

    Raises:
        DataError: If all attempts fail.
    """
    with tempfile.TemporaryFile(buffering=0) as file:
        fetch(url, name, file, settings)
        yield file


def _read_url(url: str, timeout_s: float) -> Generator[Any, None, None]:
    with _explain():
        answer = obstore.get(*locate(url, timeout_s))
        # min_chunk_size=1 returns each block as it arrives, as a sign of progress.
        yield from answer.stream(min_chunk_size=1)


def _read_command(url: str, timeout_s: float) -> Generator[bytes, None, None]:
    # The command gets its own session, so that it can be killed with all processes that it has started.
    with subprocess.Popen(
        url.removeprefix(PIPE),
        shell=True,
        stdout=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    ) as process:
        assert process.stdout is not None
        limit = f"{timeout_s:g} s (a tenth of timeout_s)"
        try:
            block = b" "
            while block:
                if not wait([process.stdout.fileno()], timeout_s):
                    raise StoreError(f"the command wrote nothing for {limit}")
                if block := process.stdout.read(_BLOCK):
                    yield block
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise StoreError(f"the command did not exit within {limit}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise StoreError(f"the command exited with status {process.returncode}")


def read_version(url: str, settings: RemoteSettings) -> Version:
    """Return the version of an object.

    Raises:
        MissingError: If the object does not exist.
        StoreError: If all attempts fail.
    """

    def read(store: Any, path: str) -> Version:
        try:
            return _make_version(obstore.head(store, path))
        except BaseError:  # signed URLs may allow only GET
            return _make_version(obstore.get(store, path, options={"range": (0, 1)}).meta)

    return _request(url, settings, read)


def _make_version(meta: Any) -> Version:
    # obstore sets the time to 1970 if the server does not return it.
    time = meta["last_modified"]
    return Version(meta["size"], meta["e_tag"] or (time.isoformat() if time.timestamp() else ""))


def read_object(url: str, settings: RemoteSettings) -> bytes:
    """Return the content of a small object.

    Raises:
        MissingError: If the object does not exist.
        StoreError: If all attempts fail.
    """
    return _request(url, settings, lambda store, path: bytes(obstore.get(store, path).bytes()))


def list_objects(url: str, settings: RemoteSettings) -> dict[str, Version]:
    """List the objects in the folder `url` of a bucket and in its sub-folders. The URL ends with a slash.

    Returns:
        The version of each object, keyed by URL.

    Raises:
        ValueError: If all attempts fail.
    """

    def read_list(store: Any, path: str) -> dict[str, Version]:
        # `url` may contain environment variables, so do not take it apart.
        return {
            url + item["path"].removeprefix(path): _make_version(item)
            for page in obstore.list(store, path, chunk_size=1000)
            for item in page
        }

    try:
        return _request(url, settings, read_list)
    except StoreError as error:
        raise ValueError(f"{url} cannot be listed: {error}") from None


def _request(url: str, settings: RemoteSettings, call: Callable[[Any, str], T]) -> T:
    """Make a small request: return what `call` returns for the store and the path in it. Raises StoreError."""

    def attempt() -> T:
        with _explain():
            return call(*locate(url, settings.timeout_s))

    return _retry(attempt, settings)


def _retry(attempt: Callable[[], T], settings: RemoteSettings) -> T:
    """Return the result of the first attempt that succeeds.

    Raises:
        StoreError: The last failure, if all attempts fail or another attempt cannot help.
    """
    for number in range(settings.tries):
        if number:
            # If many processes fail at the same time, random pauses keep them from retrying at the same time.
            # SystemRandom does not change the state of the trainer's random generator.
            jitter = random.SystemRandom().uniform(0.5, 1.5)
            time.sleep(min(2.0 ** (number - 1), settings.timeout_s / 1.5) * jitter)
        try:
            return attempt()
        except StoreError as error:
            progress.add()
            last = type(error)(f"{error}; tries: {number + 1}", error.transient)
            if not error.transient:
                break
    raise last


def locate(url: str, timeout_s: float) -> tuple[Any, str]:
    """Return the obstore store for a URL, and the path of the object in that store.

    Args:
        url: URL of an object. Environment variables in it are expanded.
        timeout_s: Time limit in seconds for connecting, and for each read.

    Raises:
        ValueError: If the URL cannot be used. The message may contain secrets.
    """
    url = expand(url)
    authorization = None
    if hub := _HUB.fullmatch(url):
        # Imported here, because only hf:// needs it and the import is slow.
        from huggingface_hub import constants, get_token

        kind, repository, revision, path = hub.groups(default="")
        url = f"{constants.ENDPOINT}/{kind}{repository}/resolve/{revision or 'main'}/{urllib.parse.quote(path)}"
        if token := get_token():
            authorization = f"Bearer {token}"
    parts = urllib.parse.urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    if url.startswith(BUCKETS):
        # The rest is the key, which may contain # and ?.
        key = url.partition("://")[2].partition("/")[2]
        return _open_store(parts.scheme, host, timeout_s, None), key
    if credentials:
        user, _, password = urllib.parse.unquote(credentials).partition(":")
        # obstore ignores credentials in a URL, so send them in a header. After a redirect, obstore does not send the
        # header to another host.
        pair = base64.b64encode(f"{user}:{password}".encode()).decode()
        authorization = f"Basic {pair}"
    # obstore would escape special characters in a path or query, so open a store for the whole URL.
    base, path = urllib.parse.urlunsplit(parts._replace(netloc=host, fragment="")), ""
    if _PLAIN_PATH.fullmatch(parts.path) and not parts.query:
        # All shards on the same server share connections.
        base, path = f"{parts.scheme}://{host}", parts.path[1:]
    return _open_store(parts.scheme, base, timeout_s, authorization), path


@lru_cache(64)
def _open_store(scheme: str, base: str, timeout_s: float, authorization: str | None) -> Any:
    limit = timedelta(seconds=timeout_s)
    client: dict[str, Any] = {
        "connect_timeout": limit,
        "read_timeout": limit,
        # A large shard may take any amount of time, as long as data keeps arriving.
        "timeout": timedelta(days=7),
        "allow_http": True,
    }
    if authorization:
        client["default_headers"] = {"Authorization": authorization}
    kinds = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    # obstore must not retry: the caller does, and reports each attempt as progress.
    return kinds.get(scheme, HTTPStore)(  # type: ignore[operator]
        base, client_options=client, retry_config={"max_retries": 0}
    )


def describe(location: str) -> str:
    """Return a path or URL for messages, without user, password and query.

    A `pipe:` command is not shown at all, because any part of it may be secret.
    """
    if location.startswith(PIPE):
        return "its pipe: command"
    shown = re.sub("(?<=://)[^/]*@", "", location)
    return re.sub("[?#].*", "", shown) if shown.startswith("http") else shown


@contextmanager
def _explain() -> Iterator[None]:
    """Turn an error of obstore into a StoreError whose message has no URL."""
    try:
        yield
    except FileNotFoundError:
        raise MissingError("HTTP status 404 Not Found", transient=False) from None
    except (BaseError, OSError, ValueError) as error:
        raise _summarize(error) from None


def _summarize(error: Exception) -> StoreError:
    text = str(error)
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        detail = f" ({code[1]})" if code else ""
        transient = int(status[1]) >= 500 or int(status[1]) in _TRANSIENT_STATUS
        return StoreError(f"HTTP status {status[1]} {status[2]}".rstrip() + detail, transient)
    for pattern, reason in _CAUSES.items():
        if match := re.search(pattern, text):
            return StoreError(reason or match[1])
    return StoreError(type(error).__name__)
