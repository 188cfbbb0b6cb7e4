"""Compare how fast disco_ds and webdataset read shards that are not in the page cache.

    python tools/bench_cold_shards.py            reads from a folder
    python tools/bench_cold_shards.py --fuse     reads through a FUSE mount, with 20 ms per request; needs fuse3

Run both commands as root, because they drop the page cache of the host. With --fuse, rclone mounts a local web server.

Both readers run in a single process and read the image and the caption of every sample. disco_ds reads the samples of a
shard in random order, as in a training run. webdataset reads them in the order of the file. Each shard has 1,000
samples, whose images are random bytes.

Each line of the output belongs to one reader. With --fuse, it shows the time to read all shards with an empty page
cache. Without --fuse, it also shows the time to read them again, now from the page cache.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import webdataset as wds

from disco_ds.data.sources.tar import TarReader

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from helpers.object_store import serve_rclone
from helpers.waiting import wait_for

SAMPLES = 1_000


def write_shards(folder: Path, num_shards: int) -> list[str]:
    rng = random.Random(0)
    names = [f"{number:05d}.tar" for number in range(num_shards)]
    for name in names:
        with tarfile.open(folder / name, "w") as tar:
            for key in range(SAMPLES):
                image = rng.randbytes(rng.randint(20_000, 56_000))
                for extension, data in (("jpg", image), ("txt", b"a caption"), ("json", b"{}")):
                    info = tarfile.TarInfo(f"{key:06d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return names


def read_ours(folder: Path, names: list[str]) -> int:
    reader, rng, count = TarReader(folder, names, 4), random.Random(0), 0
    for shard in range(len(names)):
        for entry in rng.sample(range(SAMPLES), SAMPLES):
            members = reader.read(shard, entry)
            count += len(members["jpg"]) > 0 and len(members["txt"]) > 0
    reader.close()
    return count


def read_webdataset(folder: Path, names: list[str]) -> int:
    shards = [str(folder / name) for name in names]
    samples = wds.WebDataset(shards, shardshuffle=False)
    return sum(len(sample["jpg"]) > 0 and len(sample["txt"]) > 0 for sample in samples)


@contextmanager
def mount(folder: Path, at: Path) -> Iterator[None]:
    """Serve `folder` with a web server, and mount this server at the path `at`."""
    program = str(Path(sys.executable).parent / "rclone")
    with serve_rclone("http", folder, delay_s=0.02) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        command = [program, "mount", ":http:", str(at), "--http-url", url, "--read-only"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                wait_for(lambda: os.path.ismount(at))
                yield
            finally:
                subprocess.run(["fusermount3", "-uz", str(at)], check=False)
                process.terminate()


def drop_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fuse", action="store_true", help="read through a FUSE mount")
    parser.add_argument("--shards", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, at = Path(temporary, "shards"), Path(temporary, "mount")
        folder.mkdir()
        at.mkdir()
        names = write_shards(folder, args.shards)
        for _ in range(args.repeats):
            for name, read in (("disco_ds", read_ours), ("webdataset", read_webdataset)):
                drop_cache()
                if args.fuse:
                    with mount(folder, at):
                        times = [measure(read, at, names)]
                else:
                    times = [measure(read, folder, names) for _ in range(2)]
                print(f"{name:10}", *(f"{seconds:.2f} s" for seconds in times), flush=True)


def measure(read: Callable[[Path, list[str]], int], folder: Path, names: list[str]) -> float:
    """Return the seconds that a reader needs to read all samples."""
    start = time.perf_counter()
    count = read(folder, names)
    assert count == SAMPLES * len(names)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
