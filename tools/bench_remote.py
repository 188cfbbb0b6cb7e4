"""Share of a run spent waiting for remote shards, with `data.remote.ahead` and without.

    python tools/bench_remote.py                      a server of 50 MB/s and 200 ms on loopback, for this alone
    python tools/bench_remote.py --load 0.6 0.9       share of the bandwidth that the run needs

The shards are made for it: small images, each beside a member of 100 KB, so that fetching is work and decoding is not.
The device sleeps instead of computing. The first steps, in which the workers and the first shards come, are not
counted, and the cache is too small to keep the epoch.
"""

from __future__ import annotations

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import open_clip
import torch
from bench_data import TOKENIZER, make_jpeg
from numpy.random import default_rng

from disco_ds.config import DataSettings
from disco_ds.data import ImageSpec, Loader, SampleForm, Share, index_shards, load_sources, write_manifest

SHARDS, SAMPLES, MEMBER = 64, 100, 100_000
BATCH, SLOTS, WINDOW, WORKERS = 64, 8, 50, 2
CACHE = 0.4
"""Of the 0.64e9 bytes of an epoch."""
WARM_UP, STEPS = 20, 100


class Link:
    """What all connections share: blocks leave at `rate` bytes per second."""

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
        with suppress(ConnectionError):  # the loader ends while it fetches ahead
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
    """Returns: seconds until the first step, and the share of the others that waits; needed: bytes per second."""
    with tempfile.TemporaryDirectory() as cache:
        remote = {"http": True, "cache": cache, "cache_gb": CACHE, "ahead": ahead}
        text = f"{url}/{{00000..{SHARDS - 1:05d}}}.tar"
        manifest = folder / "manifest.json"
        shape = {"slots": SLOTS, "window": WINDOW, "workers": WORKERS}
        settings = DataSettings(shards=text, manifest=manifest, remote=remote, **shape)
        form = SampleForm(ImageSpec((32, 32), "bicubic", "shortest"), open_clip.get_tokenizer(TOKENIZER), 77, 49408)
        start = time.perf_counter()
        loader = Loader(settings, load_sources(settings), form, Share(0, 1, BATCH, BATCH), 0)
        try:
            waited = 0.0
            for step in range(WARM_UP + STEPS):
                data = loader.read_step()
                _ = data.micro_batches[0]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, nargs="+", default=[0.6, 0.8], help="share of the bandwidth needed")
    parser.add_argument("--rate", type=float, default=50.0, help="of the server, MB/s")
    parser.add_argument("--latency", type=float, default=200.0, help="of an answer, ms")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        make_shards(folder)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        options = (folder, args.rate * 1e6, args.latency / 1000, theirs)
        server = multiprocessing.get_context("spawn").Process(target=serve, args=options, daemon=True)
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
