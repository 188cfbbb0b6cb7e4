"""Measure how long a run waits for remote shards, with and without prefetching, and how many bytes it fetches.

    python tools/bench_remote.py                      measures waits; a local server has 50 MB/s and 200 ms latency
    python tools/bench_remote.py --load 0.6 0.9       measures waits of runs that need 0.6 and 0.9 of the bandwidth
    python tools/bench_remote.py --ratio              measures bytes fetched per byte used at the default settings
    python tools/bench_remote.py --first              computes the bytes that a run fetches before its first batch
    python tools/bench_remote.py --manifest           measures a manifest with as many shards as DataComp-1B: its size
                                                      when it is sent to a data worker, and the CPU time to unpack it

Waits are measured with generated shards. Each sample has a small image and another member of 100 KB, so fetching takes
long and decoding does not. Instead of computing, a step sleeps. The first steps are not counted, because the workers
start and the first shards arrive during these steps. The cache is too small for all shards of an epoch.

--ratio simulates LAION-400M and DataComp-1B, each with its real number of shards. The number of slots and the size of
the cache are the defaults for these data sets on a host with enough disk space. To save time, the simulated shards have
25 samples instead of 10,000, and the windows have 10 samples instead of 4,096.
"""

from __future__ import annotations

import argparse
import http.server
import io
import multiprocessing
import os
import pickle
import tarfile
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import open_clip
import torch
from bench_data import TOKENIZER, make_jpeg
from numpy.random import default_rng

from disco_ds.config import DataSettings
from disco_ds.config.data import LEAST_CACHE_GB, RemoteSettings
from disco_ds.data import (
    ImageSpec,
    Loader,
    Manifest,
    SampleForm,
    Shard,
    Share,
    Staging,
    index_shards,
    load_sources,
    write_manifest,
)
from disco_ds.data.remote.cache_size import sum_bytes
from disco_ds.data.sources.load import count_slots, mix

SHARDS, SAMPLES, MEMBER = 64, 100, 100_000
BATCH, SLOTS, WINDOW, WORKERS = 64, 8, 50, 2
CACHE = 0.4
"""Size of the cache in GB. The shards of an epoch have 0.64 GB."""
DATA_SETS = (("LAION-400M", 41_455, 9_900, 0.24), ("DataComp-1B", 140_000, 9_100, 0.352))
"""For each data set: name, number of shards, samples per shard, GB per shard."""
WARM_UP, STEPS = 20, 100
SMALL, RATIO_SHARDS = 25, 12
"""For --ratio: number of samples per shard, and number of shards that each slot reads during the measurement."""


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
        form = SampleForm(
            ImageSpec((32, 32), "bicubic", "shortest"),
            open_clip.get_tokenizer(TOKENIZER),
            77,
            49408,
        )
        start = time.perf_counter()
        loader = Loader(settings, load_sources(settings), form, Share(0, 1, BATCH, BATCH), 0)
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


class SameHandler(http.server.SimpleHTTPRequestHandler):
    """Answers every request with the same shard, and records the path of the request in `asked`."""

    def __init__(self, *args: Any, body: bytes, asked: list[str], **options: Any) -> None:
        self._body, self._asked = body, asked
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        self._asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self._body)))
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(self._body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def name_shards(num_shards: int, samples: int, size: int, url: str) -> Manifest:
    names = [f"{number:06d}.tar" for number in range(num_shards)]
    shards = tuple(Shard(name, samples, size) for name in names)
    return Manifest(Path(), shards, tuple(f"{url}/{name}" for name in names))


def measure_ratio(num_shards: int, gb: float, hosts: int) -> str:
    """Simulate the first host of a run with the default number of slots, and return a line of the table.

    Args:
        num_shards: Number of shards of the data set.
        gb: Size of a shard in GB.
        hosts: Number of hosts. Each has one rank.
    """
    data = DataSettings(shards="unused")
    real = name_shards(num_shards, 10_000, int(gb * 1e9), "")
    slots = count_slots(data, [real], hosts)
    used, wanted = sum_bytes(data, [real], slots // hosts)
    room = max(wanted, 1e9 * LEAST_CACHE_GB)
    body, asked = make_body(), list[str]()
    handler = partial(SameHandler, body=body, asked=asked)
    with (
        tempfile.TemporaryDirectory() as cache,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        small = name_shards(num_shards, SMALL, len(body), f"http://127.0.0.1:{server.server_port}")
        remote = RemoteSettings(cache=cache, cache_gb=room / gb * len(body) / 1e18)
        shape = {
            "slots": slots,
            "window": SMALL * 4096 // 10_000,
            "workers": WORKERS,
            "remote": remote,
        }
        data = data.model_copy(update=shape)
        form = SampleForm(ImageSpec((32, 32)), open_clip.get_tokenizer(TOKENIZER), 77, 49408)
        loader = Loader(
            data,
            [replace(small, remote=remote)],
            form,
            Share(0, hosts, slots, slots // hosts),
            0,
            staging=Staging(ranks_here=1),
        )
        counts = []
        for step in range(RATIO_SHARDS * SMALL):
            if step % SMALL == 0:
                counts.append(len(asked))
            data_of_step = loader.start_step()
            next(loader.first_pass())
            if data_of_step.error:
                raise RuntimeError(data_of_step.error)
        loader.close()
        server.shutdown()
    # Between two counts, every slot reads as many samples as a shard has. The first quarter of the counts is left out,
    # because the cache is still being filled.
    first = RATIO_SHARDS // 4
    ratio = (counts[-1] - counts[first]) / (len(counts) - 1 - first) / (slots // hosts)
    return f"{slots:5} {hosts:5} {used / 1e9:10.0f} {room / 1e9:9.0f} {ratio:13.2f}"


def make_body() -> bytes:
    file, generator = io.BytesIO(), default_rng(0)
    with tarfile.open(fileobj=file, mode="w") as tar:
        for key in range(SMALL):
            for name, content in (("jpg", make_jpeg(generator, 8)), ("txt", b"a photo")):
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def count_first(num_shards: int, samples: int, gb: float, batch: int) -> str:
    """Count the shards that the first global batch needs with the default number of slots. Return a line of the table.

    The line also shows the size of these shards in GB and the seconds to fetch them.
    """
    shards = tuple(Shard(str(i), samples, int(gb * 1e9)) for i in range(num_shards))
    source = Manifest(Path(), shards, tuple(shard.name for shard in shards))
    settings = DataSettings(shards="s3://bucket/{0..1}.tar")
    slots = count_slots(settings, [source], 8)
    order = mix(settings, [source], slots, 0).orders[0]
    places = ((slot, offset) for slot in range(slots) for offset in range(-(-batch // slots)))
    needed = {order.locate(slot, *order.settle(slot, 0, offset))[0] for slot, offset in places}
    total = len(needed) * gb
    return f"{slots:6} {len(needed):7} {total:14.0f} {total / 1.25:32.0f} {total / 10:8.0f}"


def measure_manifest() -> str:
    """Pickle a manifest with as many shards as DataComp-1B, as for a data worker, and unpickle it.

    Return a line with its size and the CPU time to unpack it.
    """
    _, num_shards, samples, gb = DATA_SETS[1]
    names = [f"{i:06d}.tar" for i in range(num_shards)]
    shards = tuple(Shard(name, samples, int(gb * 1e9) + i) for i, name in enumerate(names))
    urls = tuple(f"s3://bucket/datacomp/{name}" for name in names)
    packed = pickle.dumps(Manifest(Path(), shards, urls))
    start = time.process_time()
    pickle.loads(packed)
    seconds = time.process_time() - start
    return f"{num_shards:,} shards: {len(packed) / 1e6:.1f} MB, unpacked in {seconds:.2f} s of CPU time"


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
    parser.add_argument(
        "--manifest",
        action="store_true",
        help="measure the size of a large manifest and the time to unpack it",
    )
    parser.add_argument("--ratio", action="store_true", help="measure bytes fetched per byte used")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.manifest:
        print(measure_manifest())
        return
    if args.first:
        print(
            "data          batch  slots  shards  GB, all hosts  s at 1.25 GB/s per host: 1 host  8 hosts"
        )
        for name, num_shards, samples, gb in DATA_SETS:
            for batch in (4096, 32_768):
                print(f"{name:12} {batch:6} {count_first(num_shards, samples, gb, batch)}")
        return
    if args.ratio:
        print(f"{'':12} slots hosts  in use GB  cache GB  fetched/used")
        for name, num_shards, _, gb in DATA_SETS:
            for hosts in (1, 8):
                print(f"{name:12} {measure_ratio(num_shards, gb, hosts)}", flush=True)
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
