"""Compare the data pipeline with open_clip's on the same shards: samples per second, and samples per CPU second.

    python tools/bench_data.py                                uses generated shards of 224-pixel JPEGs
    python tools/bench_data.py --shards DIR --size 224        uses the shards in DIR
    PYTHONPATH=open_clip/src python tools/bench_data.py       uses the open_clip of a checkout, such as 4.2
    python tools/bench_data.py --decoders                     measures only the ms per image of two decoders: PIL, and
                                                              torchvision, which our workers use
    python tools/bench_data.py --waits --load 0.8             measures only how long our trainer waits for data. The
                                                              device is simulated: it sleeps. Decoding the samples of
                                                              a step takes 0.8 of the time to compute the step

Both pipelines read tars of JPEGs and texts, take a random crop of 0.9 to 1 of an image's area, resize it (bicubic with
antialiasing), and tokenize the text. In both, one worker process passes batches of uint8 pixels to the trainer.

open_clip's pipeline is get_wds_dataset of open_clip_train. It needs an older version of webdataset, so the tool
installs this version in a temporary folder and puts the folder first on the path of open_clip's processes.

The pipelines take turns, with new processes in each turn, and the results are medians over the turns. CPU seconds are
the sum for the trainer and its worker.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy
import torch
from PIL import Image

from disco_ds.config.data import Pixels
from disco_ds.data import Loader, StepData
from disco_ds.data.pipeline.staging import LEAST_AHEAD

BATCH = 128
WAITS_BATCH = 32
WARM_UP = 8
"""Number of batches before the measurement starts. By then, the worker is running, and open_clip's shuffle buffer
contains the 1,000 samples that it collects first."""
SCALE = (0.9, 1.0)
TOKENIZER = "ViT-B-32"
PANDAS = ("pandas", "python-dateutil", "pytz", "tzdata", "six")
"""Packages to install for open_clip_train: pandas, which it imports, and the dependencies of pandas."""


def parse_args() -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shards", type=Path, help="folder of tars with manifest.json (default: generated shards)"
    )
    parser.add_argument(
        "--size",
        type=int,
        default=224,
        help="side of the generated images and of the crops, in pixels",
    )
    parser.add_argument(
        "--batches", type=int, default=40, help=f"batches of {BATCH} samples to measure"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--webdataset",
        default="0.2.86",
        help="version of webdataset to install for open_clip, which needs a version below 0.2.96",
    )
    parser.add_argument(
        "--decoders", action="store_true", help="only compare decoding and resizing"
    )
    parser.add_argument(
        "--waits", action="store_true", help="only measure waits with a simulated device"
    )
    parser.add_argument(
        "--load",
        type=float,
        default=0.8,
        help="with --waits: time to decode the samples of a step, divided by the time to compute the step",
    )
    parser.add_argument("--side", choices=("disco_ds", "open_clip"), help=argparse.SUPPRESS)
    return parser.parse_args()


def make_shards(folder: Path, size: int, shards: int = 4, samples: int = 1000) -> None:
    """Write shards of JPEGs with captions.

    The images are smooth colors with noise, so that the JPEG files are about as large as those of photographs.
    """
    generator = numpy.random.default_rng(0)
    for number in range(shards):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for key in range(samples):
                words = " ".join(
                    generator.choice(["a", "red", "photo", "of", "two", "small", "birds", "sea"], 9)
                )
                for name, data in (("jpg", make_jpeg(generator, size)), ("txt", words.encode())):
                    info = tarfile.TarInfo(f"{number:05d}{key:04d}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def make_jpeg(generator: numpy.random.Generator, size: int) -> bytes:
    coarse = Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=numpy.uint8))
    pixels = numpy.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC)).astype(
        numpy.int16
    )
    pixels = pixels + generator.normal(0, 12, pixels.shape).astype(numpy.int16)
    jpeg = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8)).save(jpeg, "JPEG", quality=90)
    return jpeg.getvalue()


def compare_decoders(size: int) -> None:
    """Print a table: the CPU time that PIL and torchvision need per JPEG, and the mean difference of their pixels.

    The time includes decoding and resizing.
    """
    from disco_ds.data.images.decode import (
        NUM_CROP_NUMBERS,
        ImageSpec,
        decode_image,
        decode_pixels,
        resize_random_crop,
    )

    torch.set_num_threads(1)
    spec = ImageSpec((size, size))

    def ours(data: bytes) -> torch.Tensor:
        return resize_random_crop(
            decode_pixels(data, 10**8), spec, (1.0, 1.0), (1.0, 1.0), [0.0] * NUM_CROP_NUMBERS
        )

    def pil(data: bytes) -> torch.Tensor:
        image = decode_image(data, 10**8).resize((size, size), Image.Resampling.BICUBIC)
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)

    print(f"{'JPEG side':10} {'PIL ms':>8} {'torchvision ms':>15} {'mean difference':>16}")
    for side in (size * 10 // 9, 2 * size, 4 * size):
        data = [make_jpeg(numpy.random.default_rng(number), side) for number in range(20)]
        times = []
        for decode in (pil, ours):
            start = time.process_time()
            for item in data * 5:
                decode(item)
            times.append(1000 * (time.process_time() - start) / (5 * len(data)))
        difference = (pil(data[0]).float() - ours(data[0]).float()).abs().mean()
        print(f"{side:<10} {times[0]:8.2f} {times[1]:15.2f} {difference:16.2f}")


def open_loader(
    folder: Path, size: int, micro_batch: int, num_micro_batches: int, pixels: Pixels
) -> Loader:
    import open_clip

    from disco_ds.config import DataSettings
    from disco_ds.data import ImageSpec, SampleForm, Share, Staging, load_manifest

    settings = DataSettings(
        shards=str(folder), workers=1, crop_scale=SCALE, captions={"{txt}": 1.0}
    )
    tokenizer = open_clip.get_tokenizer(TOKENIZER)
    form = SampleForm(ImageSpec((size, size), "bicubic", "shortest"), tokenizer, 77, 49408)
    share = Share(0, 1, micro_batch * num_micro_batches, micro_batch)
    return Loader(settings, [load_manifest(folder)], form, share, 0, staging=Staging(pixels))


def show_waits(folder: Path, size: int, load: float) -> None:
    """Print a table: how long a simulated device is idle during a GradAccum step. There is one data worker.

    The column `other %` is the percentage of the step in which the device does not compute. The column `waiting %` is
    the percentage of the step in which it waits for samples that are not decoded yet. `other %` includes `waiting %`.
    The difference between them is the time for copies, and the time that time.sleep takes longer than requested.
    """
    torch.set_num_threads(1)
    print(f"{'pixels':12} {'micro-batches':>13} {'step ms':>8} {'other %':>10} {'waiting %':>13}")
    for pixels, K in itertools.product(get_args(Pixels), (1, 8, 32)):
        loader = open_loader(folder, size, WAITS_BATCH, K, pixels)
        try:
            compute(loader, 0.0)  # the worker starts during this step
            start, steps = time.perf_counter(), max(1, 32 // K)
            for _ in range(
                steps
            ):  # the device computes nothing, so these steps take as long as decoding
                compute(loader, 0.0)
            decoding = (time.perf_counter() - start) / steps
            # A step has K forward passes, K backward passes and K - 1 repeated forward passes. A backward pass takes as
            # long as two forward passes.
            forward = decoding / load / (4 * K - 1)
            time.sleep(
                1.5 * decoding * max(1, LEAST_AHEAD / K)
            )  # let the worker decode ahead, as it does during the slow first step of a run
            for _ in range(2):
                compute(loader, forward)
            steps, waited, start = max(3, 64 // K), 0.0, time.perf_counter()
            for _ in range(steps):
                waited += compute(loader, forward).wait_s
            step = (time.perf_counter() - start) / steps
        finally:
            loader.close()
        busy = forward * (4 * K - 1)
        print(
            f"{pixels:12} {K:13} {1000 * step:8.0f} {100 * (1 - busy / step):10.1f} {100 * waited / steps / step:13.1f}"
        )


def compute(loader: Loader, forward: float) -> StepData:
    """Run a step on a simulated device, whose forward pass takes `forward` seconds."""
    data = loader.start_step()
    for _ in loader.first_pass():
        time.sleep(forward)
    time.sleep(2 * forward)
    for _ in loader.second_pass():
        time.sleep(3 * forward)
    if data.error:
        raise RuntimeError(data.error)
    return data


def our_batches(folder: Path, size: int) -> Iterator[Any]:
    loader = open_loader(folder, size, BATCH, 1, "device")
    try:
        while True:
            data = loader.start_step()
            (batch,) = loader.first_pass()
            image = batch.image
            if data.error:
                raise RuntimeError(data.error)
            yield image
    finally:
        loader.close()


def open_clip_batches(folder: Path, size: int) -> Iterator[Any]:
    import open_clip
    from open_clip.transform import _convert_to_rgb
    from open_clip_train.data import get_wds_dataset
    from torchvision import transforms

    preprocess = transforms.Compose(
        [
            transforms.RandomResizedCrop(
                size, scale=SCALE, interpolation=transforms.InterpolationMode.BICUBIC
            ),
            _convert_to_rgb,
            transforms.PILToTensor(),
        ]
    )
    names = sorted(path.name for path in folder.glob("*.tar"))
    shards = f"{folder}/{{{names[0][:-4]}..{names[-1][:-4]}}}.tar"
    args = Namespace(
        train_data=shards, train_num_samples=10**7, train_data_upsampling_factors=None, dataset_resampled=True,
        seed=0, batch_size=BATCH, workers=1, world_size=1,
    )  # fmt: skip
    info = get_wds_dataset(
        args, preprocess, is_train=True, tokenizer=open_clip.get_tokenizer(TOKENIZER)
    )
    for batch in info.dataloader:
        # open_clip 4 yields dictionaries.
        yield batch["image"] if isinstance(batch, dict) else batch[0]


def measure(args: Namespace) -> None:
    """Measure one pipeline in this process. Print JSON: samples per second (wall) and per CPU second (core)."""
    torch.set_num_threads(1)
    batches = (our_batches if args.side == "disco_ds" else open_clip_batches)(
        args.shards, args.size
    )
    for _ in range(WARM_UP):
        next(batches)
    start, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(args.batches):
        image = next(batches)
    assert image.shape == (BATCH, 3, args.size, args.size), image.shape
    assert image.dtype == torch.uint8, image.dtype
    wall, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    print(json.dumps({"wall": args.batches * BATCH / wall, "core": args.batches * BATCH / cpu}))
    sys.stdout.flush()
    os._exit(0)  # exit without cleanup, because open_clip's loader never ends


def cpu_seconds() -> float:
    """Return the CPU seconds that this process and its running child processes have used."""
    import psutil

    own = resource.getrusage(resource.RUSAGE_SELF)
    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return own.ru_utime + own.ru_stime + sum(times.user + times.system for times in children)


def run_side(side: str, args: Namespace, folder: Path, old: Path) -> dict[str, float]:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if side == "open_clip":
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(old), environment.get("PYTHONPATH")])
        )
    command = [sys.executable, __file__, "--side", side, "--shards", str(folder)]
    command += ["--size", str(args.size), "--batches", str(args.batches)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    args = parse_args()
    if args.side:
        measure(args)
    if args.decoders:
        compare_decoders(args.size)
        return
    with tempfile.TemporaryDirectory() as temporary:
        if args.waits:
            from disco_ds.data import index_shards, write_manifest

            make_shards(Path(temporary), args.size)
            write_manifest(index_shards(Path(temporary)))
            show_waits(Path(temporary), args.size, args.load)
            return
        folder, old = args.shards or Path(temporary, "shards"), Path(temporary, "webdataset")
        wanted = [
            f"webdataset=={args.webdataset}",
            *PANDAS,
            "--no-deps",
            "--quiet",
            "--target",
            str(old),
        ]
        subprocess.run([sys.executable, "-m", "pip", "install", *wanted], check=True)
        if not args.shards:
            from disco_ds.data import index_shards, write_manifest

            folder.mkdir()
            make_shards(folder, args.size)
            write_manifest(index_shards(folder))
        found: dict[str, list[dict[str, float]]] = {"disco_ds": [], "open_clip": []}
        for _ in range(args.repeats):
            for side, runs in found.items():
                runs.append(run_side(side, args, folder, old))
    print(
        f"{args.size}-pixel JPEG, batches of {BATCH}, one worker, median of {args.repeats} alternating runs"
    )
    print(f"{'':12} {'samples/s':>10} {'samples per CPU second':>24}")
    figures = {}
    for side, runs in found.items():
        wall, figures[side] = (
            statistics.median(run[key] for run in runs) for key in ("wall", "core")
        )
        print(f"{side:12} {wall:10.0f} {figures[side]:24.0f}")
    print(
        f"samples per CPU second, disco_ds / open_clip: {figures['disco_ds'] / figures['open_clip']:.2f}"
    )


if __name__ == "__main__":
    main()
