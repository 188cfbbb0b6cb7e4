"""Shards that img2dataset has written: a stored example, and, as a slow test, new ones from a local web server.

img2dataset needs webdataset < 0.3, so it runs in a separate environment. The stored example, tests/data/img2dataset,
was written by `download` below from emoji of disco_ds/assets/emoji/validation. Their license is there.
"""

import csv
import http.server
import json
import os
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from disco_ds.cli.main import main
from disco_ds.config.data import DataSettings
from disco_ds.data import (
    InputSpec,
    Loader,
    Manifest,
    Share,
    load_manifest,
    load_sources,
    read_all,
    resolve_shards,
)
from disco_ds.data.sources.tar import TarReader
from helpers.shards import CONTEXT, SPEC, VOCAB, tokenize

STORED = Path(__file__).parent / "img2dataset"
PER_SHARD = 3
MISSING = (1, 5)
"""Numbers of the images that are missing on the server."""
NUM = 2 * PER_SHARD


def write_images(folder: Path) -> list[str]:
    """Write some bundled emoji as files, except the missing ones, and return all captions."""
    manifest = load_manifest(resolve_shards("bundled:emoji/validation"))
    reader = TarReader(manifest.folder, manifest.shards, 1)
    captions = []
    for number in range(NUM):
        sample = reader.read(0, number)
        captions.append(sample["txt"].decode())
        if number not in MISSING:
            (folder / f"{number}.png").write_bytes(sample["png"])
    reader.close()
    return captions


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve the folder at a URL on this host."""
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=folder)
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def download(program: Path, scratch: Path) -> tuple[Path, list[str]]:
    """Run img2dataset to write two shards; return their folder and the captions it was given."""
    (scratch / "images").mkdir()
    captions = write_images(scratch / "images")
    with serve(scratch / "images") as url:
        with open(scratch / "urls.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["url", "caption"])
            rows.writerows(
                [f"{url}/{number}.png", caption] for number, caption in enumerate(captions)
            )
        command = [str(program), f"--url_list={scratch / 'urls.csv'}", "--input_format=csv"]
        command += [
            "--url_col=url",
            "--caption_col=caption",
            "--output_format=webdataset",
            "--compute_hash=None",
        ]
        command += [
            f"--output_folder={scratch / 'shards'}",
            f"--number_sample_per_shard={PER_SHARD}",
        ]
        command += [
            "--image_size=32",
            "--resize_mode=center_crop",
            "--processes_count=1",
            "--thread_count=4",
        ]
        quiet = {**os.environ, "NO_ALBUMENTATIONS_UPDATE": "1"}
        subprocess.run(
            command, check=True, timeout=180, cwd=scratch, env=quiet, stdout=subprocess.DEVNULL
        )
    return scratch / "shards", captions


def check_folder(folder: Path, captions: list[str]) -> None:
    """Check the manifest and the samples of the folder, and read a training step from it."""
    assert {path.name for path in folder.iterdir()} >= {
        "00000.tar",
        "00000.parquet",
        "00000_stats.json",
    }
    manifest = load_manifest(folder)
    stats = [
        json.loads(
            (folder / shard.name)
            .with_suffix("")
            .with_name(f"{shard.name[:5]}_stats.json")
            .read_text()
        )
        for shard in manifest.shards
    ]
    assert manifest.sizes == [stat["successes"] for stat in stats]
    assert manifest.num_samples == NUM - len(MISSING)
    expected = sorted(caption for number, caption in enumerate(captions) if number not in MISSING)
    data = DataSettings(
        shards=str(folder), workers=0, captions={"{txt}": 0.5, "{json[caption]}": 0.5}
    )
    read = list(read_all(manifest, data, SPEC, 0, 1, "{txt}"))
    assert sorted(caption for _, caption, _ in read) == expected
    check_training(data, captions)


def check_training(data: DataSettings, captions: list[str]) -> None:
    (manifest,) = load_sources(data)
    assert isinstance(manifest, Manifest)
    share = Share(0, 1, manifest.num_samples, manifest.num_samples // 2)
    loader = Loader(data, [manifest], InputSpec(SPEC, tokenize, CONTEXT, VOCAB), share, 0)
    loader.start_step()
    batches = list(loader.first_pass())
    loader.close()
    assert sorted(int(i) for batch in batches for i in batch["index"]) == list(
        range(manifest.num_samples)
    )
    assert loader.position.broken == 0
    seen = {bytes(row[row > 0].tolist()) for batch in batches for row in batch["text"]}
    assert seen <= {caption.encode()[:CONTEXT] for caption in captions}


def test_stored_output_of_img2dataset_is_indexed_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for path in STORED.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    assert main(["index", str(folder), "--workers=0"]) == 0
    (tmp_path / "images").mkdir()
    check_folder(folder, write_images(tmp_path / "images"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_img2dataset_into_training(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    programs = tmp_path / "env" / "bin"
    pip = [
        str(programs / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "img2dataset",
        "webdataset<0.3",
    ]
    subprocess.run(pip, check=True, timeout=600)
    folder, captions = download(programs / "img2dataset", tmp_path)
    assert main(["index", str(folder), "--workers=0"]) == 0
    check_folder(folder, captions)
    assert main(["index", str(folder), "--check", "--workers=0"]) == 0


if __name__ == "__main__":
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(download(Path(sys.argv[1]), Path(scratch))[0], STORED)
