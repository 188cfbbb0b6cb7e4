"""`disco-ds launch` on two or three simulated hosts: overrides, lost hosts, and a restart on fewer hosts."""

import os
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from disco_ds.cli.options import parse_args
from disco_ds.config import load_config
from disco_ds.data import resolve_shards
from disco_ds.runs.messages import LOG
from disco_ds.runs.run_folder import CONFIG
from helpers.cluster import cluster_launch, of_the_run, tool, words
from helpers.dist import run_ranks
from helpers.launched import (
    CASES,
    log_of,
    records,
    same_as_uninterrupted,
    train_without_launcher,
    wait_for,
    write_recipe,
)
from helpers.towers import BPE_SIZE, write_tiny

LOST_AFTER_S = 10
STEPS = 60


def rank_on(name: str, host: str) -> psutil.Process:
    number = str(int(host.removeprefix("host-")) - 1)
    found = [
        p
        for p in of_the_run(name)
        if p.environ().get("RANK") == number and "disco_ds.train" in words(p)
    ]
    return min(found, key=lambda p: p.create_time())


def fault(kind: str, cluster: Any, name: str) -> None:
    if kind == "killed":
        rank_on(name, "host-2").kill()
    else:
        cluster.run(["ip", "link", "set", "port-2", "down"], "switch")


def cluster_recipe(folder: Path) -> list[str]:
    arguments = write_recipe(folder, CASES["zero1-fp32"])
    return [
        *arguments,
        f"steps={STEPS}",
        "checkpoint.every_steps=5",
        f"lost_after_s={LOST_AFTER_S}",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_overrides_arrive_on_both_hosts_as_typed(
    tmp_path: Path, possible: None, marker: str
) -> None:
    folder = tmp_path / "run"
    _, name = write_recipe(folder, CASES["zero1-fp32"])
    recipe = f"a $HOME's {{1,2}} {name}"
    (folder / name).rename(folder / recipe)
    typed = [
        "data.shards=" + str(resolve_shards("bundled:emoji/unseen")) + "/{00000..00001}.tar",
        "data.captions={'{json[caption]}':1,\"{txt}\":2e-1}",
        "eval.caption_key=$(touch ran) `touch ran` $HOME ~ * ? %h %n %% {a,b}",
        "eval.label_key=x;touch ran&touch ran|cat>ran<ran#! \\ \\n''\"{a,b}",
        "name=Füße 猫",
    ]
    run = folder / "runs" / "Füße 猫"
    with tool.LocalCluster(hosts=2, slots=1, timeout_s=550) as cluster:
        with cluster_launch(
            cluster, folder, "--config", recipe, *typed, f"steps={STEPS}"
        ) as process:
            wait_for(lambda: records(run) or process.poll() is not None, "the first step", folder)
            for host in ("host-1", "host-2"):
                command = words(rank_on(marker, host))
                got = parse_args(["train", *command[command.index("disco_ds.train") + 1 :]])
                assert (got.config, got.overrides) == (recipe, [*typed, f"steps={STEPS}"]), host
            assert process.wait(timeout=300) == 0, log_of(folder)[-3000:]
        settings = load_config(run / CONFIG)
        assert settings == load_config(folder / recipe, [*typed, f"steps={STEPS}"])
        assert not (folder / "ran").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_on_one_other_host_starts_and_restarts_there(
    tmp_path: Path, possible: None, marker: str
) -> None:
    folder = tmp_path / "run"
    arguments = [*cluster_recipe(folder), "ranks=1", "--restarts", "1"]
    (folder / "hosts").write_text("host-2 slots=1")
    run = folder / "runs" / "tiny"
    with tool.LocalCluster(hosts=2, slots=1, timeout_s=550) as cluster:
        machine = f"/proc/{cluster.holders['host-2'].pid}/ns/uts"
        with cluster_launch(cluster, folder, *arguments, "--hostfile", "hosts") as process:
            wait_for(lambda: len(records(run)) > 6, "step 7", folder)
            rank = rank_on(marker, "host-1")  # the only rank is rank 0
            assert os.readlink(f"/proc/{rank.pid}/ns/uts") == os.readlink(machine)
            rank.kill()
            assert process.wait(timeout=300) == 0, log_of(folder)[-3000:]
            assert "launch: restart 1 of 1" in log_of(folder)
        wait_for(lambda: not of_the_run(marker), "every process to end", folder, 20)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["killed", "cut"])
def test_lost_host_ends_the_attempt_and_the_run_resumes(
    kind: str,
    tmp_path: Path,
    possible: None,
    marker: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    arguments = cluster_recipe(folder)
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=whole"])
    arguments, run = [*arguments, "name=cut"], folder / "runs" / "cut"
    times = {}
    with tool.LocalCluster(hosts=2, slots=1, timeout_s=1100) as cluster:
        # The hosts are configured without keep-alives, so the launch has to add them.
        cluster.run(["sed", "-i", "/ServerAlive/d", "/etc/ssh/ssh_config"])
        with cluster_launch(cluster, folder, *arguments) as process:
            wait_for(
                lambda: any(record["step"] >= 15 for record in records(run)), "step 15", folder
            )
            start = time.monotonic()
            fault(kind, cluster, marker)
            named = "error on host-1: rank 0 stops: rank 1 on host-2 (last step "
            wait_for(
                lambda: named in log_of(folder), "the lost rank's name", folder, LOST_AFTER_S + 10
            )
            times["named"] = time.monotonic() - start
            assert process.wait(timeout=60) == 1
            times["returned"] = time.monotonic() - start
            wait_for(lambda: not of_the_run(marker), "every process to end", folder, 20)
            times["nothing left"] = time.monotonic() - start
        assert max(times.values()) < 30, times
        cluster.run(["ip", "link", "set", "port-2", "up"], "switch")
        with cluster_launch(
            cluster, folder, *arguments, "--resume", "latest", "--restarts", "1"
        ) as process:
            wait_for(
                lambda: any(record["step"] >= 35 for record in records(run)), "step 35", folder
            )
            start = time.monotonic()
            fault(kind, cluster, marker)
            if kind == "cut":
                wait_for(
                    lambda: "launch: waiting for host-2" in log_of(folder), "the wait", folder, 60
                )
                cluster.run(["ip", "link", "set", "port-2", "up"], "switch")
            wait_for(
                lambda: "launch: restart 1 of 1, from runs/cut, step-000000" in log_of(folder),
                "it",
                folder,
                60,
            )
            times["restarted"] = time.monotonic() - start
            assert process.wait(timeout=300) == 0, log_of(folder)[-3000:]
            assert not of_the_run(marker)
    with capsys.disabled():
        print(
            f"\nhost-2 {kind}: "
            + ", ".join(f"{what} after {took:.1f} s" for what, took in times.items())
        )
    same_as_uninterrupted(run, folder / "runs" / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("returns", [False, True], ids=["for good", "returns"])
def test_run_continues_without_a_lost_host(
    returns: bool, tmp_path: Path, possible: None, marker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three hosts compute the same losses of the same samples, in three micro-batches instead of two."""
    folder = tmp_path / "run"
    arguments = [*cluster_recipe(folder), "global_batch=24", "data.slots=6"]
    # Use a model without dropout, because its random numbers would depend on the number of ranks.
    arguments.append(f"model.name={write_tiny(folder, BPE_SIZE)}")
    run_ranks(train_without_launcher, 3, folder, [*arguments, "name=whole"])
    arguments, run = [*arguments, "ranks=3", "name=cut"], folder / "runs" / "cut"
    arguments += ["--restarts", "2", "--min-hosts", "2", "--patience", str(LOST_AFTER_S)]
    times = {}
    with (
        tool.LocalCluster(hosts=3, slots=1, timeout_s=850) as cluster,
        cluster_launch(cluster, folder, *arguments) as process,
    ):
        wait_for(lambda: any(record["step"] >= 15 for record in records(run)), "step 15", folder)
        start = time.monotonic()
        cluster.run(["ip", "link", "set", "port-3", "down"], "switch")
        if not returns:
            cluster.holders["host-3"].kill()
        left_out = "launch: continuing with 2 of 3 hosts: no answer from host-3"
        wait_for(lambda: left_out in log_of(folder), "host-3 to be left out", folder, 90)
        times["restarted"] = time.monotonic() - start
        last = records(run)[-1]["step"]
        wait_for(lambda: records(run)[-1]["step"] > last, "a step of two hosts", folder, 90)
        times["trained on"] = time.monotonic() - start
        if returns:
            cluster.run(["ip", "link", "set", "port-3", "up"], "switch")
            wait_for(
                lambda: records(run)[-1]["step"] >= last + 11,
                "a checkpoint of two hosts",
                folder,
                90,
            )
            rank_on(marker, "host-2").kill()
        assert process.wait(timeout=300) == 0, log_of(folder)[-3000:]
        wait_for(lambda: not of_the_run(marker), "every process to end", folder, 20)
    ranks = re.findall(r"global batch 24 = (\d) ranks? x micro-batch 4 x (\d) ", log_of(folder))
    assert ranks == [("3", "2"), ("2", "3"), *([("3", "2")] if returns else [])]
    changes = re.findall(r"from step \d+ on, (\w+) is (\d+) instead of", (run / LOG).read_text())
    assert changes == [("ranks", n) for n, _ in ranks[1:]]
    pairs = list(zip(records(run), records(folder / "runs" / "whole"), strict=True))
    assert all(
        (mine["step"], mine["ids"]) == (other["step"], other["ids"]) for mine, other in pairs
    )
    off = max(abs(mine["loss"] - other["loss"]) for mine, other in pairs)
    with capsys.disabled():
        took = ", ".join(f"{what} after {seconds:.1f} s" for what, seconds in times.items())
        print(f"\nhost-3 lost: {took}; losses differ by {off:.1e} at most")
    assert off < 1e-5
