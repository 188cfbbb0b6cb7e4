"""Compare the data pipeline with open_clip's on the same shards: samples per second, and samples per CPU second.

    python -m tools.bench.data --jpeg 256 384 512             uses generated shards, with JPEGs of these sizes
    python -m tools.bench.data --shards DIR                   uses the shards in DIR
    PYTHONPATH=open_clip/src python -m tools.bench.data       uses the open_clip of a checkout, such as 4.2

Both pipelines read tars of JPEGs and texts, take a random crop of 0.9 to 1 of an image's area, resize it (bicubic with
antialiasing), and tokenize the text. In both, one worker process passes batches of uint8 pixels to the trainer.

open_clip's pipeline is get_wds_dataset of open_clip_train. It needs an older version of webdataset, so the tool
installs this version in a temporary folder and puts the folder first on the path of open_clip's processes.

The pipelines take turns, with new processes in each turn, and the results are medians over the turns. CPU seconds are
the sum for the trainer and its worker.
"""

import argparse
import io
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
from typing import Any

import numpy
import torch
from PIL import Image

BATCH = 128
WARM_UP = 8
"""Number of batches before the measurement starts. By then, the data worker is running, and open_clip's shuffle buffer
contains its first 1,000 samples."""
SCALE = (0.9, 1.0)
TOKENIZER = "ViT-B-32"
OLD_PACKAGES = ("webdataset==0.2.86", "pandas", "python-dateutil", "pytz", "tzdata", "six")
"""Packages to install for open_clip_train: webdataset below 0.2.96, pandas, and what pandas needs."""


def parse_args() -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shards", type=Path, help="folder of tars with manifest.json (default: generated shards)"
    )
    parser.add_argument("--size", type=int, default=224, help="side of the crops, in pixels")
    parser.add_argument(
        "--jpeg",
        type=int,
        nargs="+",
        default=[224],
        help="sides of the generated images, in pixels; each is measured",
    )
    parser.add_argument(
        "--batches", type=int, default=40, help=f"batches of {BATCH} samples to measure"
    )
    parser.add_argument("--repeats", type=int, default=5)
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


def our_batches(folder: Path, size: int) -> Iterator[Any]:
    import open_clip

    from disco_ds.config import DataSettings
    from disco_ds.data import ImageSpec, InputSpec, Loader, Share, load_manifest
    from disco_ds.models.tokenizer import FastTokenizer

    settings = DataSettings(
        shards=str(folder), workers=1, crop_scale=SCALE, captions={"{txt}": 1.0}
    )
    tokenizer = FastTokenizer(open_clip.get_tokenizer(TOKENIZER))
    inputs = InputSpec(ImageSpec((size, size), "bicubic", "shortest"), tokenizer, 77, 49408)
    loader = Loader(settings, [load_manifest(folder)], inputs, Share(0, 1, BATCH, BATCH), 0)
    try:
        while True:
            data = loader.start_step()
            (batch,) = loader.first_pass()
            image = batch["image"]
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
    command = [sys.executable, "-m", "tools.bench.data", "--side", side, "--shards", str(folder)]
    command += ["--size", str(args.size), "--batches", str(args.batches)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(args: Namespace, folder: Path, old: Path) -> None:
    """Measure both pipelines on the shards in this folder, in turns, and print a row for each."""
    found: dict[str, list[dict[str, float]]] = {"disco_ds": [], "open_clip": []}
    for _ in range(args.repeats):
        for side, runs in found.items():
            runs.append(run_side(side, args, folder, old))
    figures = {}
    for side, runs in found.items():
        wall, figures[side] = (
            statistics.median(run[key] for run in runs) for key in ("wall", "core")
        )
        print(f"{folder.name:12} {side:12} {wall:10.0f} {figures[side]:24.0f}")
    print(
        f"samples per CPU second, disco_ds / open_clip: {figures['disco_ds'] / figures['open_clip']:.2f}",
        flush=True,
    )


def main() -> None:
    args = parse_args()
    if args.side:
        measure(args)
    print(
        f"crops of {args.size} pixels, batches of {BATCH}, one worker, median of {args.repeats} alternating runs"
    )
    print(f"{'JPEG':12} {'':12} {'samples/s':>10} {'samples per CPU second':>24}")
    with tempfile.TemporaryDirectory() as temporary:
        old = Path(temporary, "webdataset")
        install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet"]
        subprocess.run([*install, "--target", str(old), *OLD_PACKAGES], check=True)
        if args.shards:
            compare(args, args.shards, old)
            return
        from disco_ds.data import index_shards, write_manifest

        for side in args.jpeg:
            folder = Path(temporary, f"{side}x{side}")
            folder.mkdir()
            make_shards(folder, side)
            write_manifest(index_shards(folder))
            compare(args, folder, old)


if __name__ == "__main__":
    main()
