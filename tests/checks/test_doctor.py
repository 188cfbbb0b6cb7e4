"""`disco-ds doctor` on one host reports each problem in a separate line."""

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from disco_ds.checks.recipe import (
    check_data,
    check_ds_config,
    check_kernels,
    check_start,
)
from disco_ds.checks.report import Line, examine
from disco_ds.checks.samples import check_samples, draw_pairs, read_samples
from disco_ds.cli.main import main
from disco_ds.config import Config
from disco_ds.config.ds_config import find_ds_configs, read_ds_config
from disco_ds.config.recipe import TeacherSettings
from disco_ds.data import DataError, Loader, Share, Staging, augment, load_sources
from disco_ds.data.samples import SampleKey
from disco_ds.data.stored import find_stored
from disco_ds.distributed import comm
from disco_ds.eval.model import read_input_spec
from disco_ds.models.clip import build_model, build_tokenizer
from disco_ds.training.engine import prepare
from helpers.minimal import settings
from helpers.paths import ROOT
from helpers.shards import encode, noise, write_shards
from helpers.web import serve


def statuses(lines: list[Line]) -> list[tuple[str, str]]:
    return [(line.status, line.check) for line in lines]


def the(lines: list[Line], check: str) -> Line:
    (line,) = [line for line in lines if line.check == check]
    return line


def data_of(folder: Path | str, **changes: Any) -> Config:
    data = {"shards": str(folder), "source": "shards", "image_key": "png", "workers": 2, **changes}
    # A checkpoint is due before the end of the 100 steps.
    checkpoint = {"every_steps": 50}
    return settings(data=data, model={"name": "quickstart"}, checkpoint=checkpoint)


# Packages


@pytest.mark.slow
def test_torchvision_of_another_build_is_reported_in_a_line(tmp_path: Path) -> None:
    """torchvision's operators cannot be loaded, as if it were built for CUDA and torch for the CPU."""
    original = Path(torchvision.__file__).parent
    shutil.copytree(
        original, tmp_path / "torchvision", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "disco_ds", "doctor", "--config", "quickstart"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert (
        "fail  imports         RuntimeError: operator torchvision::nms does not exist"
        in done.stdout
    )
    assert "torch and torchvision must be of the same build" in done.stdout
    assert "Traceback" not in done.stderr


# The ds_config and the batch


def start(config: Config, ranks: int = 1) -> Line:
    return the(examine("recipe", check_start(config, ranks)), "recipe")


@pytest.mark.parametrize("name", sorted(path.stem for path in find_ds_configs().glob("*.json")))
def test_bundled_ds_config_has_nothing_wrong(name: str) -> None:
    check_ds_config(settings(deepspeed=read_ds_config(name, Path())))


def test_every_wrong_key_of_a_public_ds_config_has_a_line() -> None:
    """The ds_config has keys that are common in configs of Hugging Face's Trainer, apex and Megatron."""
    given: dict[str, Any] = {
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "steps_per_print": 2000,
        "amp": {"enabled": False, "opt_level": "O2"},
        "elasticity": {"enabled": True},
        "wallclock_breakdown": False,
        "overlap_comm": True,
        "activation_checkpointing": {"partition_activations": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "offload_optimiser": {"device": "cpu"},
            "communication_data_type": "fp16",
        },
    }
    expected = [
        "ds_config key train_batch_size is set by the recipe's global_batch;",
        "ds_config key gradient_clipping is set by the recipe's optim.clip_norm;",
        "ds_config key optimizer is set by the recipe's optim;",
        "ds_config key steps_per_print is set by the recipe's log.every_steps;",
        "ds_config key amp is not supported: use torch_autocast",
        "ds_config key elasticity is not supported: DeepSpeed 0.19 has removed it",
        "ds_config: unknown key wallclock_breakdown; did you mean wall_clock_breakdown?",
        "ds_config: unknown key overlap_comm",
        "ds_config key activation_checkpointing is set by the recipe's model.activation_checkpointing;",
        "ds_config: unknown key zero_optimization.offload_optimiser; did you mean offload_optimizer?",
        "ds_config: unknown key zero_optimization.communication_data_type",
    ]
    line = start(settings(deepspeed=given))
    assert line.status == "fail"
    found = line.found.split("\n  ")
    assert len(found) == len(expected)
    assert all(text.startswith(words) for text, words in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"devce": "cpu"}}},
            "offload_optimizer.devce",
        ),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "large"}}, "reduce_bucket_size"),
        ({"fp16": {"enabled": True}}, "fp16.enabled at ZeRO 0 is refused"),
        ({"zero_optimization": []}, "zero_optimization must be a mapping"),
    ],
)
def test_refused_value_fails(given: dict[str, Any], words: str) -> None:
    line = start(settings(deepspeed=given))
    assert (line.status, words in line.found) == ("fail", True)


def test_batch_that_does_not_divide_fails() -> None:
    for changes, ranks, status, words in (
        ({}, 4, "ok", "= 4 ranks x"),
        ({}, 3, "fail", "not a multiple of ranks x micro_batch (3 x 16 = 48)"),
        ({"ranks": 8}, 4, "fail", "the recipe expects 8 ranks, but this run has 4"),
    ):
        line = start(settings(**changes), ranks)
        assert (line.status, words in line.found) == (status, True), line


# The data


def look_at_data(config: Config, ranks: int = 1, ranks_here: int | None = None) -> list[Line]:
    errors = (ValueError, OSError)
    lines = examine("data", check_data(config, ranks, ranks_here), errors)
    found = {line.found for line in lines}
    more = examine("samples", check_samples(config), errors)
    return lines + [line for line in more if line.found not in found]


def test_kernels_that_do_not_run_are_a_warning_with_their_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = settings(loss={"name": "disco_fused"})
    assert check_kernels(config) == ("ok", "kernels", "torch computes the loss", "")
    monkeypatch.setattr(comm, "local_device", lambda: torch.device("cuda", 7))
    line = check_kernels(config)
    assert line.status == "warn"
    assert line.found.startswith("Triton does not run here: ")
    assert "C compiler" in line.remedy


def drawn(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
    """Replace the image of a sample by one with more than one color."""
    return sample | {"png": encode(noise(40 + index % 5, 30 + index % 3))}


def test_share_that_a_filter_keeps_and_the_passes_are_reported(tmp_path: Path) -> None:
    def score(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return drawn(index, sample) | {"json": json.dumps({"score": index / 100}).encode()}

    write_shards(tmp_path / "data", [40, 30, 30], score)
    config = data_of(tmp_path / "data", filter={"score": {"min": 0.7}})
    line = the(look_at_data(config), "data.filter")
    # The run has 100 steps of 64 samples, and the filter keeps 30 samples.
    expected = "keeps about 30.0% of the samples: the run makes 213.3 passes over them"
    assert (line.status, line.found) == ("ok", expected)
    config = data_of(tmp_path / "data", filter={"similarity": {"min": 0.3}})
    with pytest.raises(DataError, match="similarity; their fields: score"):
        look_at_data(config)
    # If no sample can be read, that is reported, and not that a field is missing.
    (tmp_path / "t.csv").write_text("path,title\ngone.png,a\n")
    changes = {
        "image_key": "path",
        "captions": {"{title}": 1.0},
        "filter": {"title": {"in": ["a"]}},
    }
    line = the(look_at_data(data_of(tmp_path / "t.csv", **changes)), "samples")
    assert "gone.png cannot be read" in line.found


def test_shards_that_are_whole_are_fine(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [40, 30, 20], drawn)
    lines = look_at_data(
        data_of(tmp_path / "data", captions={"{txt}": 0.5, "{json[keywords][0]}": 0.5})
    )
    assert statuses(lines) == [
        ("ok", "manifest"),
        ("ok", "data.slots"),
        ("ok", "length"),
        ("ok", "samples"),
    ]
    assert lines[3].found.startswith("90 read, 0 broken; captions 3 to ")
    assert lines[3].found.endswith("0% fill the context, 90 of 90 are different")
    synthetic = settings(model={"name": "quickstart"}, checkpoint={"every_steps": 50})
    assert statuses(look_at_data(synthetic)) == [
        ("ok", "data.slots"),
        ("ok", "length"),
        ("ok", "samples"),
    ]
    line = the(
        look_at_data(settings(steps=None, epochs=1e-9, model={"name": "quickstart"})), "data"
    )
    assert (line.status, "global_batch=64 is larger than the whole run" in line.found) == (
        "fail",
        True,
    )


def test_truncated_shard_is_a_warning_that_counts_its_lost_samples(tmp_path: Path) -> None:
    write_shards(tmp_path, [20, 30, 20])
    os.truncate(tmp_path / "00002.tar", 12_345)
    lines = look_at_data(data_of(tmp_path))
    assert the(lines, "manifest").status == "warn"
    assert "1 changed since they were indexed, such as 00002.tar" in the(lines, "manifest").found
    assert the(lines, "samples").status == "warn"
    assert "70 read, 0 broken" in the(lines, "samples").found
    assert "damaged after 3 samples, and the rest is lost: " in the(lines, "samples").found


def test_manifest_that_is_missing_fails(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [20])
    (tmp_path / "data" / "manifest.json").unlink()
    (line,) = look_at_data(data_of(tmp_path / "data"))
    assert line.status == "fail"
    assert f"{tmp_path / 'data' / 'manifest.json'}" in line.found
    assert "disco-ds index" in line.found


def test_broken_images_and_missing_captions_are_counted(tmp_path: Path) -> None:
    def damage(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        if index % 10 == 3:
            return sample | {"png": sample["png"][:40]}
        return (
            {key: data for key, data in sample.items() if key != "txt"}
            if index % 10 == 5
            else sample
        )

    write_shards(
        tmp_path / "few", [30] * 3, lambda index, sample: damage(index if index < 10 else 0, sample)
    )
    line = the(look_at_data(data_of(tmp_path / "few")), "samples")
    assert line.status == "warn"
    assert line.found.startswith("90 read, 2 broken; the last: 00000.tar/0005: caption '{txt}'")
    write_shards(tmp_path / "many", [30] * 3, damage)
    line = the(look_at_data(data_of(tmp_path / "many")), "samples")
    assert line.status == "fail"
    assert line.found.startswith("90 read, 18 broken; ")
    line = the(look_at_data(data_of(tmp_path / "many", image_key="webp")), "samples")
    assert line.found.startswith("90 read, 90 broken; ")
    assert "no image under webp; the sample has png, " in line.found


def write_csv(folder: Path, num: int, **changed: dict[int, Any]) -> Config:
    """Write a csv file with `num` rows and their images. `changed`: column or "image" -> row -> value."""
    rows = ["file,title"]
    for number in range(num):
        name = changed.get("file", {}).get(number, f"{number}.png")
        rows.append(f"{name},{changed.get('title', {}).get(number, f'words {number}')}")
        image = changed.get("image", {}).get(number, drawn(number, {})["png"])
        (folder / f"{number}.png").write_bytes(image)
    (folder / "pairs.csv").write_text("\n".join(rows))
    return data_of(folder / "pairs.csv", image_key="file", captions={"{title}": 1.0})


def test_every_row_of_a_csv_is_checked(tmp_path: Path) -> None:
    lines = look_at_data(write_csv(tmp_path, 900))
    assert the(lines, "rows").found == "900 checked, 0 broken"
    # An empty file, an empty caption and a missing file.
    changed = {"image": {301: b""}, "title": {505: ""}, "file": {703: "gone.png"}}
    line = the(look_at_data(write_csv(tmp_path, 900, **changed)), "rows")
    assert (line.status, line.found[:21]) == ("warn", "900 checked, 3 broken")
    assert "gone.png" in line.found
    assert "pairs.csv/line 705" in line.found
    changed["image"] = dict.fromkeys(range(301, 321), b"")
    line = the(look_at_data(write_csv(tmp_path, 900, **changed)), "rows")
    assert (line.status, line.found[:22]) == ("fail", "900 checked, 22 broken")


def test_one_damaged_image_in_a_hundred_is_found(tmp_path: Path) -> None:
    def damage(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return drawn(index, sample) | ({"png": b"damaged"} if index % 100 == 42 else {})

    write_shards(tmp_path, [100] * 20, damage)
    line = the(look_at_data(data_of(tmp_path)), "samples")
    assert (line.status, "400 read, 0 broken" in line.found) == ("warn", False)


def test_images_of_one_color_are_a_warning(tmp_path: Path) -> None:
    write_shards(
        tmp_path, [64], lambda index, sample: sample if index % 10 == 0 else drawn(index, sample)
    )
    line = the(look_at_data(data_of(tmp_path)), "samples")
    assert line.status == "warn"
    assert "11% of the images have only one color" in line.found
    assert "data.image_key" in line.remedy


def test_cache_without_room_for_the_shards_in_use_fails(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "data", [20] * 8)
    cache_gb = 6.5 * shards.shards[0].bytes / 1e9
    with serve(shards.folder) as server:
        remote = {"cache": str(tmp_path / "cache"), "cache_gb": cache_gb}
        names = {"manifest": str(shards.folder / "manifest.json"), "remote": remote, "window": 8}
        config = data_of(f"{server.url}/{{00000..00007}}.tar", **names)
        (line,) = [
            line for line in look_at_data(config, ranks=2, ranks_here=2) if line.status == "fail"
        ]
        assert "the 8 slots of this host read and prefetch up to" in line.found
        assert "fewer data.slots than 8" in line.found
        # With two hosts, each has half of the slots.
        assert "fail" not in [line.status for line in look_at_data(config, ranks=8, ranks_here=2)]


def test_too_few_slots_fail_and_too_few_samples_are_a_warning(tmp_path: Path) -> None:
    write_shards(tmp_path, [10] * 4)
    (line,) = [line for line in look_at_data(data_of(tmp_path), ranks=3) if line.status == "fail"]
    assert (
        "the data order has 4 slots (the default for 4 shards), not a multiple of the number of ranks (3)"
        in line.found
    )
    lines = look_at_data(data_of(tmp_path), ranks=4)
    assert the(lines, "data.slots").found == "4, 1 per rank"
    assert ("warn", "data") in statuses(lines), "the batch of 64 is larger than the 40 samples"


def test_dropped_samples_are_not_broken_and_uncounted_shards_are_read(tmp_path: Path) -> None:
    write_shards(tmp_path, [20, 30, 20], drawn)
    selected = the(
        look_at_data(data_of(tmp_path, filter={"label": {"in": ["label 1"]}})), "samples"
    )
    assert (selected.status, "70 read, 0 broken" in selected.found) == ("ok", True)
    # The labels are those of id % 3, so 23 of 70 samples remain.
    assert "47 dropped by data.filter" in selected.found
    (tmp_path / "manifest.json").unlink()
    whole = the(look_at_data(data_of(tmp_path, index="none")), "samples")
    assert (whole.status, "70 read, 0 broken" in whole.found) == ("ok", True)


def test_equal_captions_and_captions_that_fill_the_context_are_warnings(tmp_path: Path) -> None:
    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        if index % 4:  # three of four captions are equal, and the fourth is longer than the context
            return sample | {"txt": b"a dog"}
        return drawn(index, sample) | {"txt": b"photo %d " % index + b"of a cat " * 20}

    write_shards(tmp_path, [32], change)
    line = the(look_at_data(data_of(tmp_path)), "samples")
    assert line.status == "warn"
    for words in (
        "captions 4 to 20 tokens (mean 8.0), 25% fill the context, 9 of 32 are different",
        "75% of them are 'a dog'",
    ):
        assert words in line.found
    assert "--picture" in line.remedy


def test_stored_embeddings_of_another_width_are_named(tmp_path: Path) -> None:
    for name, width in (("one", 4), ("other", 6)):
        file = io.BytesIO()
        np.save(file, np.ones(width))
        stored = {"img.npy": file.getvalue(), "txt.npy": file.getvalue()}
        write_shards(tmp_path / name, [3], lambda index, sample, stored=stored: sample | stored)
    sources = [{"shards": str(tmp_path / name)} for name in ("one", "other")]
    teacher = TeacherSettings(image="img.npy", text="txt.npy")
    config = data_of("unused", shards=None, sources=sources)
    lines = examine("samples", check_samples(config.model_copy(update={"teacher": teacher})))
    assert statuses(lines) == [("fail", "samples")]
    assert "img.npy has a width of 6, but the width of the other samples" in lines[0].found


@pytest.mark.parametrize("stored", [False, True])
def test_picture_shows_what_training_sees(stored: bool, tmp_path: Path) -> None:
    """The picture shows the crop, augmentation, caption and tokens of the run's first epoch, with stored views too."""
    file = io.BytesIO()
    np.save(file, np.ones(4))
    members = {"img.npy": file.getvalue(), "txt.npy": file.getvalue()}
    write_shards(tmp_path / "data", [20], lambda index, sample: drawn(index, sample) | members)
    config = data_of(tmp_path / "data", workers=0, slots=1, augment={"rotate_degrees": 30})
    teacher = TeacherSettings(image="img.npy", text="txt.npy") if stored else None
    config = config.model_copy(update={"teacher": teacher})
    model = build_model(config.model)
    spec = read_input_spec(model, build_tokenizer(config.model, model))
    (source,) = load_sources(config.data)
    if teacher:
        spec = replace(spec, stored=find_stored([config.data], teacher, [source]))
    findings = read_samples(source, config.data, spec, SampleKey(config.seed, 0, 0))
    loader = Loader(config.data, [source], spec, Share(0, 1, 20, 20), config.seed, None, Staging())
    loader.start_step()
    (batch,) = loader.first_pass()
    images = prepare(config, batch)[0]
    rows = {index: row for row, index in enumerate(batch["index"].tolist())}
    assert len(findings.samples) == 20
    for sample in findings.samples:
        row = rows[sample["index"]]
        assert torch.equal(batch["text"][row], sample["text"])
        key = torch.tensor([sample["view_key"]])
        image = augment(sample["image"][None], key, config.data.augment)[0]
        assert torch.allclose(images[row], image, atol=1e-6)
    loader.close()
    lines = examine("samples", check_samples(config, tmp_path / "samples.png"))
    assert the(lines, "picture").status == "ok"
    with Image.open(tmp_path / "samples.png") as picture:
        assert picture.size == (960, 760)


def test_caption_that_is_not_valid_unicode_is_drawn(tmp_path: Path) -> None:
    draw_pairs([(torch.zeros(3, 8, 8), "half a pair: \ud83d", "")], tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_missing_shard_that_was_skipped_is_no_problem(tmp_path: Path) -> None:
    """`disco-ds index --missing skip` records a missing shard with 0 samples, so the doctor must not report it."""
    write_shards(tmp_path / "data", [4, 4])
    (tmp_path / "data" / "00000.tar").unlink()
    remote = {"cache": str(tmp_path / "cache")}
    with serve(tmp_path / "data") as server:
        url, manifest = f"{server.url}/{{00000..00001}}.tar", str(tmp_path / "m.json")
        assert main(["index", url, "--to", manifest, "--missing", "skip"]) == 0
        config = data_of(url, manifest=manifest, remote=remote, slots=2)
        line = the(look_at_data(config), "samples")
    assert line.status == "ok"
    assert line.found.startswith("4 read, 0 broken")


def test_only_three_remote_shards_are_fetched(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [2] * 5)
    with serve(tmp_path / "data") as server:
        part = {
            "shards": f"{server.url}/{{00000..00004}}.tar",
            "manifest": str(tmp_path / "m.json"),
        }
        assert main(["index", part["shards"], "--to", part["manifest"], "--workers=0"]) == 0
        remote = {"cache": str(tmp_path / "cache")}
        config = data_of("unused", shards=None, sources=[part], remote=remote, slots=2)
        assert the(look_at_data(config), "samples").found.startswith("6 read, 0 broken")
