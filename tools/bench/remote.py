"""Measure how long a run waits for remote shards, with and without prefetching, and what its first batch fetches.

    python -m tools.bench.remote                      measures waits; a local server has 50 MB/s and 200 ms latency
    python -m tools.bench.remote --load 0.6 0.9       measures waits of runs that need 0.6 and 0.9 of the bandwidth
    python -m tools.bench.remote --first              computes the bytes that a run fetches before its first batch

Waits are measured with generated shards. Each sample has a small image and another member of 100 KB, so fetching takes
long and decoding does not. Instead of computing, a step sleeps. The first steps are not counted, because the workers
start and the first shards arrive during these steps. The cache is too small for all shards of an epoch.
"""

import argparse
import http.server
import io
import multiprocessing
import os
import tarfile
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import open_clip
import torch
from numpy.random import default_rng

from disco_ds.config import DataSettings
from disco_ds.data import (
    ImageSpec,
    InputSpec,
    Loader,
    Manifest,
    Shard,
    Share,
    index_shards,
    load_sources,
    write_manifest,
)
from disco_ds.data.sources.load import count_slots, mix
from disco_ds.models.tokenizer import FastTokenizer
from tools.bench.data import TOKENIZER, make_jpeg

SHARDS, SAMPLES, MEMBER = 64, 100, 100_000
BATCH, SLOTS, WINDOW, WORKERS = 64, 8, 50, 2
CACHE = 0.4
"""Size of the cache in GB. All shards of the data set together have 0.64 GB."""
DATA_SETS = (("LAION-400M", 41_455, 9_900, 0.24), ("DataComp-1B", 140_000, 9_100, 0.352))
"""For each data set: name, number of shards, samples per shard, GB per shard."""
WARM_UP, STEPS = 20, 100


class Link:
    """A bandwidth limit of `rate` bytes per second, which all connections share."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free = 0.0

    def wait(self, size: int) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / self._rate
            pause = self._free - time.monotonic()
        time.sleep(max(0.0, pause))


class Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args: Any, link: Link, latency_s: float, **options: Any) -> None:
        self._link, self._latency_s = link, latency_s
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        time.sleep(self._latency_s)
        super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with suppress(ConnectionError):  # the loader may close while it is still fetching a shard
            while block := source.read(2**17):
                self._link.wait(len(block))
                outputfile.write(block)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(folder: Path, rate: float, latency_s: float, ready: Connection) -> None:
    handler = partial(Handler, directory=folder, link=Link(rate), latency_s=latency_s)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    ready.send(server.server_port)
    server.serve_forever()


def make_shards(folder: Path) -> None:
    generator = default_rng(0)
    jpegs = [make_jpeg(generator, 32) for _ in range(16)]
    for number in range(SHARDS):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for key in range(SAMPLES):
                members = {"jpg": jpegs[key % 16], "txt": b"a photo", "bin": os.urandom(MEMBER)}
                for name, data in members.items():
                    info = tarfile.TarInfo(f"{key:04d}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    write_manifest(index_shards(folder))


def measure(url: str, folder: Path, ahead: int, needed: float) -> tuple[float, float]:
    """Run the loader. Return the seconds until the first batch, and the fraction of the later time spent waiting.

    `ahead` is the number of shards that each slot prefetches. `needed` is the number of bytes that the run needs per
    second.
    """
    with tempfile.TemporaryDirectory() as cache:
        remote = {"cache": cache, "cache_gb": CACHE, "prefetch_shards": ahead}
        text = f"{url}/{{00000..{SHARDS - 1:05d}}}.tar"
        manifest = folder / "manifest.json"
        shape = {"slots": SLOTS, "window": WINDOW, "workers": WORKERS}
        settings = DataSettings(shards=text, manifest=manifest, remote=remote, **shape)
        inputs = InputSpec(
            ImageSpec((32, 32), "bicubic", "shortest"),
            FastTokenizer(open_clip.get_tokenizer(TOKENIZER)),
            77,
            49408,
        )
        start = time.perf_counter()
        loader = Loader(settings, load_sources(settings), inputs, Share(0, 1, BATCH, BATCH), 0)
        try:
            waited = 0.0
            for step in range(WARM_UP + STEPS):
                data = loader.start_step()
                next(loader.first_pass())
                if data.error:
                    raise RuntimeError(data.error)
                if step == 0:
                    first_s = time.perf_counter() - start
                if step == WARM_UP:
                    begin = time.perf_counter()
                waited += data.wait_s if step > WARM_UP else 0
                time.sleep(BATCH * MEMBER / needed)
            return first_s, waited / (time.perf_counter() - begin)
        finally:
            loader.close()


def count_first(num_shards: int, samples: int, gb: float, batch: int) -> str:
    """Return a line of the table: what the first global batch needs with the default number of slots.

    The line shows the number of slots, the number of shards that are needed, their size in GB, and the seconds that 1
    host and 8 hosts take to fetch them.

    Args:
        num_shards: Number of shards of the data set.
        samples: Samples per shard.
        gb: GB per shard.
        batch: Global batch.
    """
    shards = tuple(Shard(str(i), samples, int(gb * 1e9)) for i in range(num_shards))
    source = Manifest(Path(), shards, tuple(shard.name for shard in shards))
    settings = DataSettings(shards="s3://bucket/{0..1}.tar")
    slots = count_slots(settings, [source], 8)
    order = mix(settings, [source], slots, 0).orders[0]
    entries = [
        islice(order.entries(slot, (0, 0), int), -(-batch // slots)) for slot in range(slots)
    ]
    needed = {entry.shard for entry in chain(*entries)}
    total = len(needed) * gb
    return f"{slots:6} {len(needed):7} {total:14.0f} {total / 1.25:32.0f} {total / 10:8.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--load",
        type=float,
        nargs="+",
        default=[0.6, 0.8],
        help="fractions of the bandwidth that the run needs",
    )
    parser.add_argument("--rate", type=float, default=50.0, help="bandwidth of the server, MB/s")
    parser.add_argument("--latency", type=float, default=200.0, help="latency of a response, ms")
    parser.add_argument(
        "--first",
        action="store_true",
        help="compute the bytes that are fetched before the first batch",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.first:
        print(
            "data          batch  slots  shards  GB, all hosts  s at 1.25 GB/s per host: 1 host  8 hosts"
        )
        for name, num_shards, samples, gb in DATA_SETS:
            for batch in (4096, 32_768):
                print(f"{name:12} {batch:6} {count_first(num_shards, samples, gb, batch)}")
        return
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        make_shards(folder)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        options = (folder, args.rate * 1e6, args.latency / 1000, theirs)
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=options, daemon=True
        )
        server.start()
        url = f"http://127.0.0.1:{ours.recv()}"
        print(f"{'load':>5} {'ahead':>6} {'first step s':>13} {'waiting %':>10}")
        for load in args.load:
            for ahead in (0, 1):
                first_s, share = measure(url, folder, ahead, load * args.rate * 1e6)
                print(f"{load:5.2f} {ahead:6} {first_s:13.1f} {100 * share:10.1f}", flush=True)
        server.terminate()


if __name__ == "__main__":
    main()
