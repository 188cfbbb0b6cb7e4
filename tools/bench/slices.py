"""Divide work on a GPU into slices, each of which runs in a separate process and saves its results.

A slice that crashes, hangs or loses its CUDA context does not affect the others. The results are lines of JSON in one
file. A slice that has ended is not repeated, so the work can be interrupted at any time and resumed later.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Record = Callable[..., None]
"""Function that adds a line to the results of the running slice. Its keyword arguments are the fields of the line."""
PATIENCE = 3
"""A slice is stopped after this many times its expected duration."""
PACKAGES = ("torch", "triton", "deepspeed", "open_clip_torch", "inf-cl", "memeff", "siglip-kernel")


@dataclass(frozen=True)
class Slice:
    name: str
    seconds: float
    """Expected duration on a GPU, without the imports."""


@dataclass
class Outcome:
    """What is known about the most recent run of a slice."""

    where: dict[str, Any] = field(default_factory=dict)
    """Date, device and versions of the run."""
    records: list[dict[str, Any]] = field(default_factory=list)
    end: str | None = None
    """How the slice ended: "done", or the reason why it failed or was stopped. None if it has not ended."""
    seconds: float = 0.0


class Results:
    """The results file. Each line is a JSON object {"slice": name, ...}. Several processes may append lines to it."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, **fields: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"slice": name} | fields) + "\n")

    def read(self) -> dict[str, Outcome]:
        """Return the most recent outcome of each slice."""
        found: dict[str, Outcome] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for line in lines:
            try:
                fields = json.loads(line)
            except json.JSONDecodeError:  # the process was killed while it wrote this line
                continue
            name = fields.pop("slice")
            if "where" in fields:
                found[name] = Outcome(fields["where"])
            elif "end" in fields:
                outcome = found.setdefault(name, Outcome())
                outcome.end, outcome.seconds = fields["end"], fields["seconds"]
            else:
                found.setdefault(name, Outcome()).records.append(fields)
        return found


def parse(parser: argparse.ArgumentParser, argv: Sequence[str], folder: str) -> argparse.Namespace:
    """Add the options that all tools with slices share, and parse `argv`.

    Without --out, the results are written to `folder`.
    """
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help='run only slices whose name matches a pattern, such as "losses *"',
    )
    parser.add_argument(
        "--again", action="store_true", help="also run slices that have already ended"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="stop after this time; do not start slices that are expected to take longer",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run every slice at tiny shapes, to test it; also works on a CPU",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"results as lines of JSON (default: {folder}/results.jsonl)",
    )
    parser.add_argument("--slice", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    # A rehearsal writes to a separate file, so that its results are never mistaken for real ones.
    args.out = args.out or Path(folder, "rehearsal.jsonl" if args.rehearse else "results.jsonl")
    return args


def run(
    slices: Sequence[Slice],
    args: argparse.Namespace,
    jobs: int,
    show: Callable[[str, Outcome], str],
) -> tuple[dict[str, Outcome], int]:
    """Run the slices selected by --only, and print the outcome of each.

    For every slice, a new process runs this program with --slice NAME. Slices that have ended in an earlier call are
    skipped, unless --again is given. A slice is not started if its expected duration exceeds what is left of --budget.

    Args:
        slices: All slices, in the order in which they run.
        args: What `parse` returned.
        jobs: Number of slices that may run at the same time; 1 if they measure time.
        show: Called with the name and outcome of a slice that has ended; returns the text to print.

    Returns:
        The outcomes of the selected slices, including those that ended in earlier calls; and the number of selected
        slices that have not ended. Slices that have never been started have no outcome.
    """
    results, deadline = Results(args.out), time.monotonic() + args.budget
    chosen = [x for x in slices if any(fnmatch.fnmatch(x.name, pattern) for pattern in args.only)]
    if not chosen:
        sys.exit(
            f"no slice matches {' '.join(args.only)}; there are: {', '.join(x.name for x in slices)}"
        )
    before = {} if args.again else results.read()
    todo = [x for x in chosen if x.name not in before or before[x.name].end is None]
    ended: set[str] = set()

    def follow(child: Child) -> None:
        if child.follow(results, deadline):
            ended.add(child.slice.name)
            print(show(child.slice.name, results.read()[child.slice.name]), flush=True)

    turns = threading.Semaphore(jobs)
    with ThreadPoolExecutor(jobs) as pool:
        followed = []
        for x in todo:
            if time.monotonic() + x.seconds < deadline:
                child = Child(x, args)  # only imports modules until its turn comes
                turns.acquire()
                followed.append(pool.submit(follow, child))
                followed[-1].add_done_callback(lambda _: turns.release())
        for future in followed:
            future.result()
    outcomes = results.read()
    return {x.name: outcomes[x.name] for x in chosen if x.name in outcomes}, len(todo) - len(ended)


class Child:
    """The process that runs one slice. Until `follow` is called, it imports modules and then waits."""

    def __init__(self, of: Slice, args: argparse.Namespace):
        self.slice, self.log_path = of, args.out.with_suffix(".log")
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # How Python was told to run this program: a path, or -m and a module.
        program = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
        command = [sys.executable, *program, "--slice", of.name, "--out", str(args.out)]
        command += ["--rehearse"] if args.rehearse else []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self.log, stderr=subprocess.STDOUT
        )

    def follow(self, results: Results, deadline: float) -> bool:
        """Start the slice, wait until it ends, and record how it ended.

        Returns:
            False if the budget is too small to start the slice, or is used up before the slice ends.
        """
        start = time.monotonic()
        left, patience = deadline - start, PATIENCE * self.slice.seconds
        end = self._wait(min(left, patience)) if self.slice.seconds < left else None
        said = self._end()
        if end is None and left < patience:
            return False
        if end is None:
            words = f"ended after {patience:.0f} s"
        else:
            last = (said.strip().splitlines() or [""])[-1][:300]
            words = "done" if end == 0 else f"exit code {end}: {last}"
        results.add(self.slice.name, end=words, seconds=round(time.monotonic() - start, 1))
        return True

    def _wait(self, seconds: float) -> int | None:
        """Tell the process to run its slice. Return its exit code, or None if it has not ended after `seconds`."""
        try:
            self.process.communicate(b"start\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        return self.process.returncode

    def _end(self) -> str:
        """Kill the process if it still runs, append its output to the log of all slices, and return the output."""
        self.process.kill()
        self.process.wait()
        with self.log as log, open(self.log_path, "a", encoding="utf-8") as whole:
            log.seek(0)
            said = log.read()
            whole.write(f"--- {self.slice.name}\n{said}")
        return said


def run_here(args: argparse.Namespace, do: Callable[[Record], None]) -> int:
    """Run in this process the slice that --slice names. First wait until the parent process says that it may start.

    Args:
        args: What `parse` returned.
        do: Runs the slice. It gets the function with which it records results.

    Returns:
        The exit code of this process.
    """
    if not sys.stdin.readline():  # the parent process has ended
        return 1
    results = Results(args.out)
    results.add(args.slice, where=surroundings())
    do(lambda **fields: results.add(args.slice, **fields))
    return 0


@contextmanager
def case(record: Record, **fields: Any) -> Iterator[None]:
    """Catch an error in the `with` block and record it, so that the rest of the slice still runs.

    The record contains the error as `problem`, and `fields`.
    """
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        record(**fields, problem=in_words(error))
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # raises an error, which ends the slice, if the CUDA context is lost


def in_words(error: BaseException) -> str:
    """Return the type of an error, and the first and the last line of its message.

    The cause is in the first line for CUDA errors, and in the last line for errors of a compiler.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ends = dict.fromkeys((*lines[:1], *lines[-1:]))
    return f"{type(error).__name__}: {' ... '.join(line[:200] for line in ends)}"


def surroundings() -> dict[str, Any]:
    """Return the date, the device and the versions of packages, which are printed with the results."""
    import torch

    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {os.cpu_count()} cores"
    )
    return {
        "date": datetime.now().date().isoformat(),
        "device": device,
        "versions": dict(_versions()),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue
