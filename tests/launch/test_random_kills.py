"""Random kills of processes of a launch on two hosts, and a flipped bit in a checkpoint, do not change the result."""

import random
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from disco_ds.launch.launcher import newest_checkpoint
from disco_ds.runs.run_folder import CHECKPOINTS, FINISHED
from helpers.checkpoints import flip
from helpers.cluster import cluster_launch, of_the_run, tool, words
from helpers.dist import run_ranks
from helpers.launched import (
    CASES,
    SAME,
    equal_checkpoints,
    records,
    train_without_launcher,
    wait_for,
    write_recipe,
)

KILLS, SEED, STEPS = 10, 20, 400
RESTART = "disco-ds launch: restart "


def kind_of(process: psutil.Process) -> str | None:
    """Return the role of a process in the launch; None for helper processes of Python."""
    line, name = words(process), process.name()
    if name in ("ssh", "pdsh"):
        return "ssh" if name == "ssh" else None
    if "deepspeed.launcher.launch" in line:
        return "launcher"
    if "deepspeed.launcher.runner" in line:
        return "front end"
    if "disco_ds.train" in line:
        return "rank"
    # The data workers are children of a fork server, with the same command line.
    if is_fork_server(line):
        parent = process.parent()
        return "data worker" if parent and is_fork_server(words(parent)) else None
    return "wrapper" if line[1:4] == ["-m", "disco_ds", "launch"] else None


def is_fork_server(line: list[str]) -> bool:
    return any("multiprocessing.forkserver" in word for word in line)


def kill_one(kind: str, marker: str, draw: random.Random) -> None:
    chosen = [process for process in of_the_run(marker) if kind_of(process) == kind]
    assert chosen, f"no {kind} runs"
    draw.choice(sorted(chosen, key=lambda process: process.pid)).kill()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_random_kills_and_a_flipped_bit_end_bit_identical(
    tmp_path: Path, possible: None, marker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, draw = tmp_path / "run", random.Random(SEED)
    arguments = [
        *write_recipe(folder, CASES["zero1-fp32"]),
        f"steps={STEPS}",
        "checkpoint.every_steps=5",
    ]
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=whole"])
    run, whole = folder / "runs" / "cut", folder / "runs" / "whole"
    arguments += ["name=cut", "--restarts", str(2 * KILLS)]
    # Kill each kind of process at least once.
    kinds = ["rank", "data worker", "launcher", "front end", "ssh", "wrapper"]
    kinds += draw.choices(["rank", "data worker"], k=KILLS - len(kinds))
    draw.shuffle(kinds)
    report = []
    flipped = next(number for number, kind in enumerate(kinds) if number >= 4 and kind == "rank")
    with tool.LocalCluster(hosts=2, slots=1, timeout_s=1700) as cluster, ExitStack() as launches:
        process = launches.enter_context(cluster_launch(cluster, folder, *arguments))
        # A run that is killed before its first checkpoint would start again in another folder.
        wait_for(lambda: newest_checkpoint(run), "a checkpoint", folder)
        for number, kind in enumerate(kinds):
            before = records(run)[-1]["step"] if records(run) else 0
            goal = before + draw.randint(1, 12)
            wait_for(
                lambda goal=goal: records(run) and records(run)[-1]["step"] >= goal,
                f"step {goal}",
                folder,
            )
            time.sleep(draw.random() * 0.3)
            reached, restarts = (
                records(run)[-1]["step"],
                (folder / "log.txt").read_text().count(RESTART),
            )
            kill_one(kind, marker, draw)
            start = time.monotonic()
            if number == flipped:
                time.sleep(0.2)  # wait until a save in progress is renamed
                newest = newest_checkpoint(run)
                assert newest is not None
                flip(max((newest / "engine").iterdir(), key=lambda file: file.stat().st_size))
            if kind == "wrapper":
                # On several hosts, the run continues without the wrapper. Do what a person would: end the run, and
                # start the launch again.
                process.wait(timeout=60)
                for left in of_the_run(marker):
                    with suppress(psutil.NoSuchProcess):
                        left.kill()
                wait_for(lambda: not of_the_run(marker), "every process to end", folder, 120)
                launches.close()
                process = launches.enter_context(
                    cluster_launch(cluster, folder, *arguments, "--resume", "latest")
                )
            else:
                wait_for(
                    lambda n=restarts: (folder / "log.txt").read_text().count(RESTART) > n,
                    "a restart",
                    folder,
                    120,
                )
            wait_for(
                lambda step=reached: records(run)[-1]["step"] > step,
                f"step {reached + 1}",
                folder,
                240,
            )
            report.append(f"{kind} at step {reached}: {time.monotonic() - start:.0f} s")
        assert process.wait(timeout=600) == 0, (folder / "log.txt").read_text()[-3000:]
        assert not of_the_run(marker)
    with capsys.disabled():
        print(f"\nseconds until training was further than before a kill: {', '.join(report)}")
    assert re.search(
        r"step-\d+ is damaged: engine/.*; trying the previous one",
        (folder / "log.txt").read_text(),
    )
    assert (run / FINISHED).exists()
    for mine, other in zip(records(run), records(whole), strict=True):
        assert [mine.get(key) for key in SAME] == [other.get(key) for key in SAME]
    last = f"{CHECKPOINTS}/step-{STEPS:08d}"
    equal_checkpoints(run / last, whole / last)
