"""The cache of remote shards: its limits, its permissions, and files that killed processes leave."""

import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from disco_ds.data import DataError, Manifest
from disco_ds.data.sources.cache import ShardCache, _evict
from disco_ds.data.sources.tar import CacheFullError, TarReader
from helpers.paths import ROOT
from helpers.remote import open_cache
from helpers.shards import write_shards
from helpers.waiting import wait_for
from helpers.web import Server, serve


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_cache_keeps_its_bounds_and_what_is_read(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "even", [10] * 8)
    with serve(shards.folder) as server:
        check_bounds(shards, server, tmp_path)


def check_bounds(shards: Manifest, server: Server, tmp_path: Path) -> None:
    limit = 3.5 * shards.shards[0].bytes
    cache = open_cache(shards, server.url, tmp_path / "cache", cache_gb=limit / 1e9)
    held = cache.open(0)
    for shard in (1, 2, 3, 4, 1, 5, 6, 7):
        cache.open(shard).close()
        assert size_of(cache.folder) <= limit
        assert os.fstat(held.fileno()).st_nlink == 1
    assert server.asked["/00000.tar"] == 1
    assert server.asked["/00001.tar"] in (1, 2)
    # If all shards in the cache are in use, the error suggests a remedy. A single process that needs more shards than
    # fit closes some of its own.
    files = [held, cache.open(6), cache.open(7)]
    with pytest.raises(
        CacheFullError,
        match=r"shard of [\d,]+ bytes.* [\d,]+ bytes .* GB; .*data.remote.cache_gb",
    ):
        cache.open(1)
    for file in files:
        file.close()
    reader = TarReader(cache.folder, shards.shards, 8, cache.open)
    with pytest.warns(UserWarning, match="cache_gb is small"):
        texts = [reader.read(shard, 1)["txt"] for shard in range(8)]
    reader.close()
    local = TarReader(shards.folder, shards.shards, 8)
    assert texts == [local.read(shard, 1)["txt"] for shard in range(8)]
    local.close()
    assert size_of(cache.folder) <= limit


def test_files_of_the_user_stay_and_are_neither_read_nor_counted(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    sizes = [shard.bytes for shard in shards.shards]
    cache = open_cache(shards, server.url, tmp_path / "cache", cache_gb=1.5 * max(sizes) / 1e9)
    cache.open(0).close()
    (first,) = cache.folder.glob("*.shard")
    mine = [
        folder / name
        for folder in (tmp_path / "cache", cache.folder)
        for name in (
            "mine.tar",
            "mine.shard",
            "x.partial",
            f"{first.stem[:32]}.tar",
            f"{first.stem}.tar",
        )
    ]
    for path in mine:
        path.write_bytes(path.name.encode() * 100_000)
        # Older than all cached shards.
        os.utime(path, (0, 0))
    (cache.folder / f"{'0' * 64}.shard").symlink_to(mine[0])
    for shard in (1, 2, 1, 0):
        with cache.open(shard) as file:
            assert file.read() == (shards.folder / f"0000{shard}.tar").read_bytes()
    assert [path.read_bytes() for path in mine] == [path.name.encode() * 100_000 for path in mine]


def test_folder_and_files_of_the_cache_are_the_users_alone(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        cache = open_cache(shards, server.url, tmp_path / "a" / "b")
        cache.open(0).close()
    finally:
        os.umask(before)
    assert oct(cache.folder.stat().st_mode & 0o777) == "0o700"
    assert {oct(path.stat().st_mode & 0o777) for path in cache.folder.iterdir()} == {"0o600"}


@pytest.mark.parametrize("kind", ["link", "open", "foreign"])
def test_cache_in_a_folder_of_somebody_else_is_refused(
    shards: Manifest,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    cache = open_cache(shards, server.url, tmp_path / "cache")
    cache.folder.parent.mkdir()
    if kind == "link":
        (tmp_path / "other").mkdir(0o700)
        cache.folder.symlink_to(tmp_path / "other")
    else:
        cache.folder.mkdir(0o700)
        cache.folder.chmod(0o777 if kind == "open" else 0o700)
    if kind == "foreign":
        change_owners(monkeypatch, {cache.folder.stat().st_ino: os.geteuid() + 1})
    with pytest.raises(DataError, match=f"{cache.folder} must be a folder"):
        cache.open(1)
    assert not server.asked
    assert not list(cache.folder.iterdir())


def change_owners(monkeypatch: pytest.MonkeyPatch, owners: dict[int, int]) -> None:
    """Pretend that files belong to other users, because changing their owners would require root.

    Args:
        monkeypatch: The fixture.
        owners: Inode -> user id.
    """
    for name in ("fstat", "lstat"):
        real = getattr(os, name)

        def found(path: Any, *, real: Any = real, **kwargs: Any) -> os.stat_result:
            fields = list(real(path, **kwargs))
            fields[4] = owners.get(fields[1], fields[4])
            return os.stat_result(fields)

        monkeypatch.setattr(os, name, found)


def test_shard_that_is_being_fetched_is_waited_for_and_has_its_room(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    server.halves.add("/00001.tar")
    limit = shards.shards[1].bytes + shards.shards[0].bytes / 2
    cache = open_cache(shards, server.url, tmp_path / "cache", cache_gb=limit / 1e9)
    found: list[bytes] = []

    def read() -> None:
        with cache.open(1) as file:
            found.append(file.read())

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.asked["/00001.tar"] > 0)
    time.sleep(0.2)
    assert not found
    server.halves.clear()
    server.resume.set()
    for thread in threads:
        thread.join(300)
    assert found == [(shards.folder / "00001.tar").read_bytes()] * 3
    assert server.asked == {"/00001.tar": 1}
    with cache.open(1), pytest.raises(CacheFullError):
        cache.open(0)


FETCH = """
import pickle, sys
pickle.loads(bytes.fromhex(sys.argv[1])).open(1)
"""


def start_fetch(cache: ShardCache) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-c", FETCH, pickle.dumps(cache).hex()]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})


def test_process_that_waits_for_a_fetch_does_not_wait_for_its_readers(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    """A process waits for a shard that another one fetches. It is suspended until the other one has the shard open.

    The other process then holds the lock of the complete file.
    """
    # The first fetch must not time out while the other process starts.
    cache = open_cache(shards, server.url, tmp_path / "cache", cache_gb=1.0, timeout_s=600)
    server.halves.add("/00001.tar")
    thread = threading.Thread(target=lambda: held.append(cache.open(1)))
    held: list[Any] = []
    thread.start()
    wait_for(lambda: server.asked["/00001.tar"] == 1)
    with start_fetch(cache) as process:
        (partial,) = cache.folder.glob("*.partial")
        wait_for(lambda: str(partial) in opened_by(process.pid))
        process.send_signal(signal.SIGSTOP)
        server.halves.clear()
        server.resume.set()
        thread.join(300)
        process.send_signal(signal.SIGCONT)
        try:
            assert process.wait(300) == 0
        finally:
            process.kill()
    held[0].close()
    assert server.asked == {"/00001.tar": 1}


def opened_by(pid: int) -> set[str]:
    """List the files that a process has open."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(link))
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_shard_that_another_process_completes_first_is_not_fetched_again(
    shards: Manifest, server: Server, tmp_path: Path, ahead: bool
) -> None:
    cache = open_cache(shards, server.url, tmp_path / "cache")
    path = cache._locate(0)
    cache.open(0).close()
    # This process looked for the file before the other one renamed its .partial file, and fetches it only now.
    cache._fetch(0, path, ahead)
    assert server.asked == {"/00000.tar": 1}
    assert {found.name for found in cache.folder.iterdir()} == {".lock", path.name}


class ReplacedPath(type(Path())):  # type: ignore[misc]
    """A path whose file is replaced as soon as it has been opened."""

    def open(self, *args: Any, **kwargs: Any) -> Any:
        file = Path(self).open(*args, **kwargs)  # noqa: SIM115 - the caller closes it
        self.unlink()
        Path(self).write_text("of another process")
        return file


def test_file_that_replaces_an_evicted_one_stays(tmp_path: Path) -> None:
    path = ReplacedPath(tmp_path / "a.partial")
    Path(path).write_text("old")
    assert _evict(path, 3) == (0, 0)
    assert Path(path).read_text() == "of another process"


def test_fetch_that_is_killed_leaves_no_trace(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    server.halves.add("/00001.tar")
    cache = open_cache(
        shards, server.url, tmp_path / "cache", cache_gb=1.5 * shards.shards[1].bytes / 1e9
    )
    with start_fetch(cache) as process:
        wait_for(lambda: server.asked["/00001.tar"] == 1)
        (partial,) = cache.folder.glob("*.partial")
        with open(partial, "rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.kill()
    server.halves.clear()
    # The partial file neither blocks the next fetch nor takes room from another shard.
    cache.open(0).close()
    assert not list(cache.folder.glob("*.partial"))
    with cache.open(1) as file:
        assert file.read() == (shards.folder / "00001.tar").read_bytes()
