"""Many ranks on one machine start, save, resume with fewer ranks, and name a lost rank.

DISCO_DS_TEST_RANKS=64 sets the number of ranks to 64, and to 48 after the resume. `pytest -rP` prints the times.
"""

import os
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_ds.config import load_config
from disco_ds.distributed import comm
from disco_ds.runs.run_folder import CHECKPOINTS
from disco_ds.training.build import build
from disco_ds.training.loop import train
from helpers.dist import run_ranks, start_ranks
from helpers.tiny_run import recipe

RANKS = int(os.environ.get("DISCO_DS_TEST_RANKS", "8"))
FEWER = RANKS * 3 // 4
MIDDLE = RANKS // 2
OPTIONS = [
    "micro_batch=2",
    "checkpoint.every_steps=5",
    "lost_after_s=120",
    "timeout_s=900",
    "log.tensorboard=false",
]


def sized(ranks: int) -> list[str]:
    """Return settings that fit this number of ranks and three quarters of it, with a sample for every slot."""
    return [
        f"global_batch={6 * ranks}",
        f"data.slots={3 * ranks}",
        "data.shards=bundled:emoji/train",
    ]


def run(path: Path, resume: str | None, *overrides: str) -> tuple[dict[str, float], set[str]]:
    """Build a run and train.

    Returns:
        The seconds of building and of training, and the checkpoint files that this rank opened while building.
    """
    opened: set[str] = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | Path) and arguments[1] in ("r", "rb"):
            opened.add(str(arguments[0]))

    sys.addaudithook(note)
    start = time.monotonic()
    with ExitStack() as stack:
        training = build(load_config(path, [*OPTIONS, *overrides]), resume, stack)
        built, read = time.monotonic(), {name for name in opened if f"/{CHECKPOINTS}/" in name}
        train(training)
        return {"build": built - start, "train and save": time.monotonic() - built}, read


def report(what: str, ranks: int, results: list[Any]) -> None:
    longest = {key: max(times[key] for times, _ in results) for key in results[0][0]}
    print(
        f"{ranks} ranks, {what}: "
        + ", ".join(f"{key} {seconds:.1f} s" for key, seconds in longest.items())
    )


def die(number: int, port: int, folder: Path, path: Path) -> None:
    """Run one rank of a run in which the rank MIDDLE kills itself in the second step."""
    with (folder / f"{number}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(RANK=str(number), WORLD_SIZE=str(FEWER), LOCAL_RANK=str(number))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with comm.session(900), ExitStack() as stack:
        training = build(load_config(path, [*OPTIONS, "steps=50", *sized(RANKS)]), "latest", stack)

        def before(module: Any, arguments: Any) -> None:
            if number == MIDDLE and training.heartbeat.progress.step >= 11:
                (folder / "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        training.loss.register_forward_pre_hook(before)
        train(training)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_many_ranks_start_save_go_on_as_fewer_and_name_a_lost_one(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    sizes = sized(RANKS)
    report("start, 5 steps", 4, run_ranks(run, 4, path, None, "steps=5", "name=few", *sized(4)))
    report("start, 5 steps", RANKS, run_ranks(run, RANKS, path, None, "steps=5", *sizes))
    # With the same number of ranks, each rank reads its own files, its share of those to verify, and rank 0's file.
    results = run_ranks(run, RANKS, path, "latest", "steps=6", *sizes)
    report("resume, 1 step", RANKS, results)
    readers = Counter(Path(name).name for _, names in results for name in names)
    assert sum(readers.values()) < 7 * RANKS
    assert {name for name, count in readers.items() if count > 3} == {
        "mp_rank_00_model_states.pt",  # DeepSpeed reads it on every rank
        "rank_00000.pt",
    }
    # With another number of ranks, each rank verifies and gathers only its share.
    results = run_ranks(run, FEWER, path, "latest", "steps=10", *sizes)
    report("resume, 4 steps", FEWER, results)
    readers = Counter(Path(name).name for _, names in results for name in names)
    assert {name for name, count in readers.items() if count > 3} == {"rank_00000.pt"}
    # The survivors name the rank that is killed.
    with start_ranks(die, FEWER, tmp_path, path) as ranks:
        for process in ranks:
            process.join(600)
        assert sorted({process.exitcode for process in ranks}) == [-signal.SIGKILL, 1]
    seconds = time.time() - float((tmp_path / "killed").read_text())
    print(f"{FEWER} ranks: all had ended {seconds:.1f} s after rank {MIDDLE} was killed")
    for number in set(range(FEWER)) - {MIDDLE}:
        assert f"rank {number} stops: rank {MIDDLE} on " in (tmp_path / f"{number}.log").read_text()
