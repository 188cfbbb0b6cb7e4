"""The doctor: each thing it looks at is broken, and the line that says so is seen."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import yaml
from torch.nn import functional as F

from disco_ds.checks import Line, examine
from disco_ds.checks.here import check_batch, check_data, check_ds_config, check_kernels
from disco_ds.checks.hosts import check_hosts, judge
from disco_ds.checks.probe import probe
from disco_ds.checks.ranks import check_gradients, check_other_hosts, run_alone, shrink
from disco_ds.checks.versions import PACKAGES, check_versions
from disco_ds.cli.main import main
from disco_ds.config import Config
from disco_ds.config.ds_config import find_ds_configs, read_ds_config
from disco_ds.data import index_shards, write_manifest
from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, LossOutput, list_losses
from disco_ds.losses.base import Loss, register_loss
from helpers.dist import free_port, run_ranks
from helpers.minimal import MINIMAL, settings
from helpers.paths import ROOT
from helpers.precisions import MATRIX, ds_config
from helpers.shards import make_sample, write_shards


def statuses(lines: list[Line]) -> list[tuple[str, str]]:
    return [(line.status, line.check) for line in lines]


def the(lines: list[Line], check: str) -> Line:
    (line,) = [line for line in lines if line.check == check]
    return line


# Packages


def test_installed_packages_fit_together() -> None:
    assert statuses(examine("versions", check_versions)) == [("ok", "versions")]


def test_package_outside_of_the_bounds_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version found first, as after an installation by hand."""
    for name, version in (("deepspeed", "0.18.1"), ("triton", "2.0.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    lines = examine("versions", check_versions)
    assert {line.status for line in lines} == {"fail"}
    told = "\n".join(map(str, lines))
    assert "disco_ds 0.1.0 needs deepspeed<0.20,>=0.19.8, got 0.18.1" in told
    assert "-> pip install 'deepspeed<0.20,>=0.19.8'" in told
    assert "needs triton~=" in told
    assert "got 2.0.0" in told


@pytest.mark.slow
def test_torchvision_of_another_build_is_told_in_a_line(tmp_path: Path) -> None:
    """Its operators cannot be loaded: what a CPU build of torch beside a CUDA build of torchvision comes to."""
    original = Path(torchvision.__file__).parent
    shutil.copytree(original, tmp_path / "torchvision", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "disco_ds", "doctor", "--config", "quickstart"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert (
        "fail  versions        import torchvision: RuntimeError: operator torchvision::nms does not exist"
        in done.stdout
    )
    assert "-> torch and torchvision are of different builds" in done.stdout
    assert "Traceback" not in done.stderr


# The ds_config and the batch


@pytest.mark.parametrize("name", sorted(path.stem for path in find_ds_configs().glob("*.json")))
def test_bundled_ds_config_has_nothing_wrong(name: str) -> None:
    lines = examine("ds_config", lambda: check_ds_config(settings(deepspeed=read_ds_config(name, Path()))))
    assert statuses(lines) == [("ok", "ds_config")]


def test_every_wrong_key_of_a_public_ds_config_has_a_line() -> None:
    """Keys as configs of Hugging Face's Trainer, of apex's days and of Megatron have them."""
    given: dict[str, Any] = {
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "steps_per_print": 2000,
        "amp": {"enabled": False, "opt_level": "O2"},
        "elasticity": {"enabled": False},
        "wallclock_breakdown": False,
        "overlap_comm": True,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2, "offload_optimiser": {"device": "cpu"}, "communication_data_type": "fp16"},
    }
    lines = examine("ds_config", lambda: check_ds_config(settings(deepspeed=given)))
    failing = [line.found for line in lines if line.status == "fail"]
    expected = [
        "ds_config key train_batch_size and the recipe's global_batch own the same value; remove it",
        "ds_config key gradient_clipping and the recipe's optim.clip_norm own the same value",
        "ds_config key optimizer and the recipe's optim own the same value",
        "ds_config key steps_per_print and the recipe's log.every_steps own",
        "ds_config key amp is not supported: use torch_autocast",
        "ds_config key elasticity is not supported: DeepSpeed 0.19 has removed it",
        "ds_config: unknown key wallclock_breakdown; did you mean wall_clock_breakdown?",
        "ds_config: unknown key overlap_comm; it belongs into zero_optimization",
        "ds_config: unknown key zero_optimization.offload_optimiser; did you mean offload_optimizer?",
        "ds_config: unknown key zero_optimization.communication_data_type; it belongs to the top level",
    ]
    assert len(failing) == len(expected)
    assert all(found.startswith(words) for found, words in zip(failing, expected, strict=True))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"stage": 2, "cpu_offload": True},
            "zero_optimization.cpu_offload is deprecated in DeepSpeed 0.19: the name is ",
        ),
        ({"stage": 2, "allgather_partitions": True}, "zero_optimization.allgather_partitions is not read by DeepSpeed"),
        ({"stage": 2, "reduce_bucket_size": "auto"}, "zero_optimization.reduce_bucket_size is auto"),
        ({"stage": 0, "overlap_comm": True}, "zero_optimization.overlap_comm has no effect at ZeRO 0"),
        (
            {"stage": 1, "stage3_max_live_parameters": 1e9},
            "zero_optimization.stage3_max_live_parameters has no effect at",
        ),
        ({"stage": 3, "allgather_bucket_size": 5e8}, "zero_optimization.allgather_bucket_size has no effect at ZeRO 3"),
    ],
)
def test_key_without_effect_is_a_warning(given: dict[str, Any], words: str) -> None:
    lines = examine("ds_config", lambda: check_ds_config(settings(deepspeed={"zero_optimization": given})))
    assert statuses(lines) == [("warn", "ds_config")]
    assert lines[0].found.startswith(words)


def test_switches_that_slow_every_step_and_towers_that_do_not_listen_are_warnings() -> None:
    given = {"wall_clock_breakdown": True, "flops_profiler": {"enabled": False}, "comms_logger": {"enabled": True}}
    given["timers"] = {"throughput": {"enabled": True}}
    given["activation_checkpointing"] = {"partition_activations": True}
    lines = examine("ds_config", lambda: check_ds_config(settings(deepspeed=given)))
    assert [line.found.split()[0] for line in lines] == [
        "wall_clock_breakdown",
        "comms_logger",
        "activation_checkpointing",
        "timers.throughput",
    ]
    assert {line.status for line in lines} == {"warn"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"devce": "cpu"}}}, "offload_optimizer.devce"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "large"}}, "reduce_bucket_size"),
        ({"fp16": {"enabled": True}}, "fp16.enabled at ZeRO 0 is refused"),
        ({"zero_optimization": []}, "zero_optimization must be a mapping"),
    ],
)
def test_value_that_deepspeed_or_we_refuse_is_a_line(given: dict[str, Any], words: str) -> None:
    lines = examine("ds_config", lambda: check_ds_config(settings(deepspeed=given)))
    assert statuses(lines) == [("fail", "ds_config")]
    assert words in lines[0].found


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        ({}, 4, "ok    batch           global batch 64 = 4 ranks x 16 micro-batch x 1 micro-batches per rank"),
        ({}, 3, "fail  batch           global_batch 64 is not a multiple of ranks x micro_batch"),
        ({"ranks": 8}, 4, "fail  batch           the recipe is for 8 ranks, this run has 4"),
        ({"micro_batch": 2}, 32, "warn  batch           micro_batch 2 leaves a GPU idle"),
        ({"global_batch": 8192}, 2, "warn  batch           256 micro-batches per rank and step"),
    ],
)
def test_batch_that_does_not_divide_or_is_odd_is_told(changes: dict[str, Any], ranks: int, expected: str) -> None:
    (line,) = examine("batch", lambda: check_batch(settings(**changes), ranks), ValueError)
    assert str(line).startswith(expected)


# The data


def data_of(folder: Path | str, **changes: Any) -> Config:
    data = {"shards": str(folder), "source": "shards", "image_key": "png", "workers": 2, **changes}
    return settings(data=data)


def look_at_data(config: Config, ranks: int = 1) -> list[Line]:
    return examine("data", lambda: check_data(config, ranks), ValueError, OSError)


def test_kernels_that_do_not_run_are_a_warning_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(loss={"name": "disco_fused"})
    assert statuses(list(check_kernels(config))) == [("ok", "kernels")]  # on a CPU torch computes the tiles
    monkeypatch.setattr(comm, "local_device", lambda: torch.device("cuda", 7))
    (line,) = check_kernels(config)
    assert line.status == "warn"
    assert line.found.startswith("Triton's do not run here: ")
    assert "C compiler" in line.remedy


def test_shards_that_are_whole_are_fine(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [40, 30, 20])
    lines = look_at_data(data_of(tmp_path / "data", captions={"{txt}": 0.5, "{json[keywords]}": 0.5}))
    assert statuses(lines) == [("ok", "manifest"), ("ok", "samples"), ("ok", "data.slots"), ("ok", "length")]
    assert lines[1].found == "82 read, 0 broken, 0 without caption"
    assert statuses(look_at_data(settings())) == [("ok", "samples"), ("ok", "data.slots"), ("ok", "length")]
    (line,) = (line for line in look_at_data(settings(steps=None, epochs=1e-9)) if line.check == "length")
    assert (line.status, "is less than one global_batch" in line.found) == ("fail", True)


def test_shard_that_was_cut_off_fails_its_count_and_its_samples(tmp_path: Path) -> None:
    write_shards(tmp_path, [20, 30, 20])
    os.truncate(tmp_path / "00002.tar", 12_345)
    lines = look_at_data(data_of(tmp_path))
    assert the(lines, "manifest").status == "fail"
    assert "00002.tar has 3 samples, was counted with 20" in the(lines, "manifest").found
    assert the(lines, "samples").status == "fail"
    assert "the tar has 3 complete samples: " in the(lines, "samples").found


def test_tars_joined_to_one_are_a_warning(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "data", [20] * 3).folder / "00001.tar"
    path.write_bytes(2 * path.read_bytes())
    write_manifest(index_shards(path.parent))
    line = the(look_at_data(data_of(path.parent)), "manifest")
    assert line.status == "warn"
    assert "00001.tar has an end mark at byte" in line.found


def test_manifest_that_is_stale_or_missing_fails(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [20, 20, 20, 20, 20, 20])
    write_shards(tmp_path / "other", [40])
    # Neither first, nor middle, nor last: found because its time or size has changed.
    shutil.copy(tmp_path / "other" / "00000.tar", tmp_path / "data" / "00004.tar")
    line = the(look_at_data(data_of(tmp_path / "data")), "manifest")
    assert line.status == "fail"
    assert "00004.tar has 40 samples, was counted with 20" in line.found
    write_shards(tmp_path / "same", [20])
    shutil.copy(tmp_path / "same" / "00000.tar", tmp_path / "data" / "00004.tar")
    os.utime(tmp_path / "data" / "00004.tar", (1, 1))
    assert the(look_at_data(data_of(tmp_path / "data")), "manifest").status == "warn"
    (tmp_path / "data" / "manifest.json").unlink()
    (line,) = look_at_data(data_of(tmp_path / "data"))
    assert line.status == "fail"
    assert f"there is no {tmp_path / 'data' / 'manifest.json'}; count the shards: disco-ds index" in line.found


def test_broken_images_and_missing_captions_are_counted_apart(tmp_path: Path) -> None:
    def damage(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        if index % 10 == 3:
            return sample | {"png": sample["png"][:40]}
        return {key: data for key, data in sample.items() if key != "txt"} if index % 10 == 5 else sample

    write_shards(tmp_path / "few", [30] * 3, lambda index, sample: damage(index if index < 10 else 0, sample))
    line = the(look_at_data(data_of(tmp_path / "few")), "samples")
    assert line.status == "warn"
    assert line.found.startswith("90 read, 1 broken, 1 without caption; the last: 00000.tar/0005: caption '{txt}'")
    write_shards(tmp_path / "many", [30] * 3, damage)
    line = the(look_at_data(data_of(tmp_path / "many")), "samples")
    assert line.status == "fail"
    assert line.found.startswith("90 read, 9 broken, 9 without caption; ")
    line = the(look_at_data(data_of(tmp_path / "many", image_key="webp")), "samples")
    assert line.found.startswith("90 read, 81 broken, 9 without caption; ")
    assert "no image under webp; the sample has png, " in line.found


def test_rows_of_a_csv_whose_images_are_gone_fail(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(make_sample(0)["png"])
    rows = [f"{number}.png,words {number}" for number in range(20)]
    (tmp_path / "pairs.csv").write_text("\n".join(["file,title", *rows]))
    lines = look_at_data(data_of(tmp_path / "pairs.csv", image_key="file", captions={"{title}": 1.0}))
    assert the(lines, "samples").status == "fail"
    assert "19.png cannot be read" in the(lines, "samples").found


def test_too_few_slots_and_samples_are_told(tmp_path: Path) -> None:
    write_shards(tmp_path, [10] * 4)
    (line,) = [line for line in look_at_data(data_of(tmp_path), ranks=3) if line.status == "fail"]
    assert "the data order has 4 slots (the default for 4 shards), not a multiple of 3 ranks" in line.found
    lines = look_at_data(data_of(tmp_path, workers=4), ranks=4)
    assert the(lines, "data.slots").status == "warn"
    assert "4 for 4 ranks x 4 workers" in the(lines, "data.slots").found
    assert ("warn", "data") in statuses(lines), "64 of 40 samples"


# Hosts


@pytest.fixture
def own_report(tmp_path: Path) -> dict[str, Any]:
    token = tmp_path / "token"
    token.touch()
    return probe({"packages": PACKAGES, "folder": str(tmp_path), "token": str(token)})


def test_hosts_where_nobody_listens_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("no ssh here")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", f"-p {free_port()} -o StrictHostKeyChecking=no")
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    Path("recipe.yaml").write_text(yaml.safe_dump(MINIMAL))
    Path("hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    assert main(["doctor", "--config", "recipe.yaml", "--hostfile", "hosts"]) == 1
    told = capsys.readouterr().out
    assert "fail  ssh             127.0.0.1: ssh: connect to host 127.0.0.1 port" in told
    assert "fail  ssh             localhost: ssh: connect to host localhost port" in told
    assert told.count("Connection refused (exit code 255)") == 2
    assert not list(tmp_path.glob(".shared-*"))
    Path("hosts").write_text("127.0.0.1 slot=1\n")
    assert main(["doctor", "--config", "recipe.yaml", "--hostfile", "hosts"]) == 1
    assert (
        "fail  recipe          hosts, line 1: expected `host slots=GPUs`, got '127.0.0.1 slot=1'"
        in capsys.readouterr().out
    )


def test_what_a_host_says_is_held_against_this_one(own_report: dict[str, Any]) -> None:
    """What cannot be had here, GPUs and a driver, changed in a real report."""
    own_report["disk"] = 1e12

    def lines(
        mine: dict[str, Any] | None = None, slots: int = 2, need: int = 0, **changes: Any
    ) -> list[tuple[str, str]]:
        return statuses(list(judge("host", own_report | changes, own_report | (mine or {}), slots, need)))

    assert lines() == [("warn", "GPUs")]
    assert lines(devices=2) == []
    assert lines(devices=1, mine={"devices": 2}) == [("fail", "GPUs")]
    assert lines(driver=True) == [("fail", "GPUs")]
    assert lines(devices=2, offset=2.5) == lines(devices=2, offset=-2.5) == [("warn", "clocks")]
    assert lines(devices=2, offset=1.5) == []
    assert lines(devices=2, disk=1e9) == [("warn", "runs folder")]
    assert lines(devices=2, need=own_report["memory"] // 2) == []
    assert lines(devices=2, need=own_report["memory"] // 2 + 1) == [("fail", "memory")]


def test_memory_that_the_buffers_of_the_data_would_fill_fails(tmp_path: Path) -> None:
    config = settings(runs=str(tmp_path / "runs"), data={"source": "synthetic", "prefetch": 1_000_000})
    lines = examine("hosts", lambda: check_hosts(config, {"this host": 0}), ValueError, OSError)
    line = the(lines, "memory")
    assert line.status == "fail"
    assert f"the images of a rank need {1_000_001 * 16 * 3 * 224**2 / 2**20:,.0f}" in line.found


# The ranks: their data, the step, the collectives


def on_hosts(homes: list[str]) -> list[Line]:
    """Each rank as if on a host of its own, with its own ~."""
    os.environ.update(LOCAL_RANK="0", HOME=homes[comm.rank()])
    return list(check_other_hosts(data_of("~/shards")))


def test_data_that_another_host_lacks_or_has_broken_are_told_with_its_name(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("first", "other", "lacks", "broken")]
    for home in (*homes[:2], homes[3]):
        write_shards(home / "shards", [20, 20])
    assert "ok    data            read on 1 more host(s)" in str(run_ranks(on_hosts, 2, list(map(str, homes)))[0][0])
    write_shards(homes[3] / "shards", [20, 20], lambda index, sample: sample | {"png": sample["png"][:50]})
    lines = run_ranks(on_hosts, 3, [str(homes[i]) for i in (0, 2, 3)])[0]
    host = socket.gethostname()
    assert statuses(lines) == [("fail", "data"), ("fail", "samples")], lines
    assert lines[0].found.startswith(f"{host}: data.shards: ")
    assert lines[1].found.startswith(f"{host}: 40 read, 40 broken")


class Local(Loss):
    """InfoNCE that forgets the other ranks: each contrasts its own pairs only."""

    def forward(self, embeddings: Embeddings) -> LossOutput:
        logits = embeddings.scale * embeddings.image @ embeddings.text.T
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        return LossOutput(loss, {"loss": comm.all_reduce_sum(loss) / comm.size()})


def small_settings(loss: str, given: dict[str, Any], ranks: int, micro_batches: int) -> Config:
    shape = {"micro_batch": 64, "global_batch": 64 * ranks * micro_batches}
    two_views = {"model": {"two_views": True}, "data": {"augment": {"zoom": 0.1}}} if loss == "nt_xent" else {}
    return shrink(settings(loss={"name": loss}, deepspeed=given, **shape, **two_views), ranks)


Case = tuple[str, dict[str, Any], int]
"""Loss, ds_config, micro-batches."""


def alone(cases: list[Case], ranks: int) -> bytes:
    """Pickled: torch would hand tensors on by files that end with this process."""
    register_loss("local")(Local)
    return pickle.dumps([run_alone(small_settings(loss, given, ranks, count)) for loss, given, count in cases])


def on_ranks(cases: list[Case], answers: bytes) -> list[Line]:
    register_loss("local")(Local)
    lines = []
    for (loss, given, count), answer in zip(cases, pickle.loads(answers), strict=True):
        lines += check_gradients(small_settings(loss, given, comm.size(), count), answer)
    return lines


def judge_steps(cases: list[Case], ranks: int = 2) -> list[Line]:
    (answers,) = run_ranks(alone, 1, cases, ranks)
    return run_ranks(on_ranks, ranks, cases, answers)[0]


def test_loss_that_forgets_the_other_ranks_is_found_by_its_gradient() -> None:
    right, wrong = judge_steps([("disco", ds_config("fp32", 1), 2), ("local", ds_config("fp32", 1), 1)])
    assert right.status == "ok"
    assert "disco, 2 ranks x 2 micro-batches, ZeRO 1, fp32" in right.found
    assert right.found.endswith("allowed 1.0e-05; disco, 2 ranks x 2 micro-batches, ZeRO 1, fp32")
    assert wrong.status == "fail"
    assert float(wrong.found.split()[0]) > 0.01


@pytest.mark.slow
def test_step_of_every_precision_and_stage_is_right_and_a_wrong_loss_is_not() -> None:
    lines = judge_steps(
        [case for pair in MATRIX for case in (("disco", ds_config(*pair), 2), ("local", ds_config(*pair), 1))]
    )
    assert [line.status for line in lines] == ["ok", "fail"] * len(MATRIX), lines


@pytest.mark.slow
def test_step_of_every_loss_is_right() -> None:
    lines = judge_steps([(name, ds_config("fp32", 1), 2) for name in list_losses()])
    assert [line.status for line in lines] == ["ok"] * len(list_losses()), lines


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_doctor_under_a_launcher_looks_at_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ports = ["--master_port", str(free_port())]
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", "2", *ports]
    command += ["--module", "disco_ds.doctor", "--config", "quickstart", "--gradients"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("ok    gradients", "ok    all_gather", "ok    reduce_scatter", "ok    all_reduce", "ok    samples"):
        assert done.stdout.count(words) == 1
    assert not list(tmp_path.iterdir())
    command += ["global_batch=120", "micro_batch=32"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "fail  batch           global_batch 120 is not a multiple" in done.stdout
