"""Requests to web servers and object stores, through obstore: http(s)://, s3://, gs://, az:// and hf:// URLs.

Credentials come from the environment, never from a recipe. obstore reads AWS_*, GOOGLE_* and AZURE_*. hf:// uses
HF_TOKEN or the login of huggingface_hub. $NAME in a URL stands for an environment variable. Error messages contain no
part of a URL that may be secret.
"""

from __future__ import annotations

import base64
import random
import re
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import obstore
from obstore.exceptions import (
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from disco_ds.config.data import PIPE, RemoteSettings
from disco_ds.config.secrets import expand

T = TypeVar("T")
BUCKETS = ("s3://", "gs://", "az://")
"""Prefixes of the URLs of object stores, which can list their objects."""
_KEEP_STATUS = {408, 425, 429}
"""HTTP statuses below 500 after which another attempt may succeed. After all other 4xx statuses, it cannot."""
_PLAIN_PATH = re.compile(r"/[\w.~-]+(/[\w.~-]+)*")
_HUB = re.compile(
    r"hf://((?P<kind>datasets|spaces)/)?(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<path>.+)"
)
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


class ChangedError(StoreError):
    """A download must start over: the content has changed or has the wrong size, or the server cannot send a part."""


def locate(url: str, timeout_s: float) -> tuple[Any, str]:
    """Return the obstore store for a URL, and the path of the object in that store.

    Args:
        url: URL of an object. Environment variables in it are expanded.
        timeout_s: Time limit in seconds for connecting, and for each read.

    Raises:
        StoreError: If the URL cannot be used.
    """
    url = expand(url)
    authorization = None
    if found := _HUB.fullmatch(url):
        # Imported here, because only hf:// needs it and the import is slow.
        from huggingface_hub import get_token, hf_hub_url

        kind, revision = found["kind"], found["revision"]
        url = hf_hub_url(
            found["repo"],
            found["path"],
            repo_type=kind and kind.removesuffix("s"),
            revision=revision and urllib.parse.unquote(revision),
        )
        if token := get_token():
            authorization = f"Bearer {token}"
    try:
        parts = urllib.parse.urlsplit(url)
        credentials, _, host = parts.netloc.rpartition("@")
    except ValueError:
        raise StoreError("the URL is malformed", transient=False) from None
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
    if _PLAIN_PATH.fullmatch(parts.path) and not parts.query:
        # All shards on the same server share connections.
        store = _open_store(parts.scheme, f"{parts.scheme}://{host}", timeout_s, authorization)
        return store, parts.path[1:]
    # obstore would escape special characters in a path or query, so open a store for the whole URL.
    whole = urllib.parse.urlunsplit(parts._replace(netloc=host, fragment=""))
    return _open_store(parts.scheme, whole, timeout_s, authorization), ""


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
    with _explain():
        return kinds.get(scheme, HTTPStore)(  # type: ignore[operator]
            base, client_options=client, retry_config={"max_retries": 0}
        )


def read_blocks(
    url: str, timeout_s: float, start: int = 0, tag: str | None = None
) -> tuple[str | None, Generator[Any, None, None]]:
    """Request an object. If `start` is positive, resume a download of the version `tag` from that byte on.

    Returns:
        The object's version (None if it has no strong ETag) and a generator of the blocks of its content. The generator
        may raise StoreError.

    Raises:
        ChangedError: If the version of the object is no longer `tag`, or if the server cannot send only a part of it.
        StoreError: If the request fails.
    """
    # The version in the answer is compared below, because not every server supports If-Match.
    options = {"range": {"offset": start}} if start else {}
    with _explain():
        store, path = locate(url, timeout_s)
        answer = obstore.get(store, path, options=options)  # type: ignore[arg-type]
        found = answer.meta["e_tag"]
    if start and (answer.range[0] != start or found != tag):
        raise ChangedError("it has changed since the last attempt")
    # Objects with the same weak ETag may differ in some bytes (RFC 9110, 13.1.5).
    version = None if found and found.startswith("W/") else found

    def blocks() -> Generator[Any, None, None]:
        with _explain():
            # min_chunk_size=1 returns each block as it arrives, so that an error does not discard earlier blocks.
            yield from answer.stream(min_chunk_size=1)

    return version, blocks()


class Version(NamedTuple):
    """Size and tag of a file. They identify its content without reading it."""

    bytes: int
    """Size in bytes; 0 if it is unknown, as for the output of a command."""
    tag: str
    """ETag or time of the last modification; "" if the server returns neither."""


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
        StoreError: If all attempts fail.
    """

    def read_list(store: Any, path: str) -> dict[str, Version]:
        # `url` may contain environment variables, so do not take it apart.
        pages = obstore.list(store, path, chunk_size=1000)
        return {
            url + item["path"].removeprefix(path): _make_version(item)
            for page in pages
            for item in page
        }

    return _request(url, settings, read_list)


def _request(url: str, settings: RemoteSettings, call: Callable[[Any, str], T]) -> T:
    """Make a small request, in several attempts if necessary.

    Args:
        url: URL of the object or folder.
        settings: Number of attempts and timeout.
        call: Function that makes the request, given the store and the path in it.

    Raises:
        StoreError: The last failure, if all attempts fail.
    """
    for number in range(settings.tries):
        pause(number, settings)
        try:
            with _explain():
                return call(*locate(url, settings.timeout_s))
        except StoreError as error:
            last = error
            if not error.transient:
                break
    raise last


def pause(number: int, settings: RemoteSettings) -> None:
    """Pause before attempt `number`. There is no pause before the first attempt, which is number 0."""
    if number:
        # If many processes fail at the same time, random pauses keep them from retrying at the same time. SystemRandom
        # does not change the state of the trainer's random generator.
        jitter = random.SystemRandom().uniform(0.5, 1.5)
        time.sleep(min(2.0 ** (number - 1), settings.timeout_s / 1.5) * jitter)


def describe(place: str) -> str:
    """Return a path or URL for messages, without user, password and query.

    A `pipe:` command is not shown at all, because any part of it may be secret.
    """
    if place.startswith(PIPE):
        return "its pipe: command"
    shown = re.sub("(?<=://)[^/]*@", "", place)
    return re.sub("[?#].*", "", shown) if shown.startswith("http") else shown


@contextmanager
def _explain() -> Iterator[None]:
    """Turn an error of obstore into a StoreError whose message has no URL."""
    try:
        yield
    except FileNotFoundError:
        raise MissingError("HTTP status 404 Not Found", transient=False) from None
    except NotSupportedError:
        raise ChangedError("the server does not support range requests") from None
    except (BaseError, OSError, ValueError) as error:
        raise _summarize(error) from None


def _summarize(error: Exception) -> StoreError:
    text = str(error)
    code = _CODE.search(text)
    detail = f" ({code[1]})" if code else ""
    if found := _STATUS.search(text):
        status = int(found[1])
        transient = status >= 500 or status in _KEEP_STATUS
        return StoreError(f"HTTP status {status} {found[2]}".rstrip() + detail, transient)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return StoreError("the store denies access" + detail, transient=False)
    if "range" in text.lower() or "NotPartial" in text:
        return ChangedError("the server did not send the requested range")
    for pattern, words in _CAUSES.items():
        if found := re.search(pattern, text):
            return StoreError(words or found[1])
    return StoreError(type(error).__name__)
