"""The hosts of a launch: read the hostfile, signal ranks, and wait for lost hosts."""

import argparse
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from disco_ds.config import Config
from disco_ds.config.text_file import read_text
from disco_ds.runs.messages import show

LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*\s+slots=[1-9]\d{0,3}\s*)?(#.*)?", re.ASCII)
"""A line of a hostfile: empty, a comment, or a host and its number of slots (ranks)."""
SSH_OPTIONS = "PDSH_SSH_ARGS_APPEND"
"""Environment variable with the user's options for ssh."""
REACH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=3")
"""Options that make ssh fail quickly if a host cannot be reached, and never ask for a password."""
REACH_S = 6.0
"""A host that does not answer within this many seconds counts as unreachable."""
BACK_OFF_S = (2, 4, 8, 16, 32, *[60] * 30)
"""Pauses in seconds between attempts to reach lost hosts."""
SIGNAL_PROGRAM = """
import psutil, sys
launch, number, count = sys.argv[1], int(sys.argv[2]), 0
for process in psutil.process_iter():
    try:
        command = process.cmdline()
        of_launch = any(each.startswith(launch + "-") for each in command)
        if of_launch and (number == 9 or any(each.startswith("--local_rank") for each in command)):
            process.send_signal(number)
            count += 1
    except psutil.Error:
        pass
print(f"{launch}={count}")
"""
"""Python program that sends a signal to the ranks of all attempts of a launch on the host where it runs.

SIGKILL is also sent to the ranks' launchers. The program then prints LAUNCH=COUNT, where COUNT is the number of
processes signaled.
"""


def read_hosts(path: Path, options: Sequence[str]) -> dict[str, int]:
    """Return the hosts on which `deepspeed` would start ranks, and the number of ranks on each.

    Args:
        path: The hostfile.
        options: Other options of `deepspeed`, which may select hosts and slots.

    Returns:
        Host -> number of ranks; empty if all ranks start on this machine.

    Raises:
        ValueError: If the hostfile is missing or malformed, if it does not contain a selected host or slot, or if
            `deepspeed` could not start ranks on other hosts because of the working directory's name.
    """
    for number, line in enumerate(read_text(path, "hostfile").splitlines(), 1):
        if not LINE.fullmatch(line.strip()):
            # DeepSpeed would silently use the beginning of the line, and would pass the host name to a shell.
            raise ValueError(
                f"{path}, line {number}: expected `host slots=GPUs`, got {line[:80]!r}"
            )
    from deepspeed.launcher import runner

    given = runner.parse_args([*options, "script"])
    hosts = runner.parse_inclusion_exclusion(
        runner.fetch_hostfile(str(path)), given.include, given.exclude
    )
    hosts = runner.apply_num_nodes_and_gpus(hosts, given.num_nodes, given.num_gpus)
    if given.no_ssh or (len(hosts) == 1 and is_this_machine(*hosts)):
        return {}
    folder = str(Path.cwd())
    if shlex.quote(folder) != folder:
        raise ValueError(
            f"deepspeed does not quote the working directory {folder!r} in the commands that it sends to other "
            "hosts, so ranks would start elsewhere: use a path without spaces and shell characters"
        )
    return {host: len(slots) for host, slots in hosts.items()}


def is_this_machine(host: str) -> bool:
    """Return whether a host of a hostfile has the name or an address of this machine."""
    try:
        # This fails if the address belongs to another machine.
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True


def signal_ranks(hosts: Sequence[str], launch: str, number: int) -> dict[str, int | None]:
    """Send a signal to the ranks of a launch. SIGKILL is also sent to their launchers.

    Ranks of earlier attempts are included, because their host may have been frozen when they should
    have been killed, and may have recovered since.

    Args:
        hosts: The hosts; empty means this machine only.
        launch: Id of the launch. The ids of its attempts begin with it.
        number: The signal's number; 0 means only to count the processes.

    Returns:
        Number of processes found on each host; None for a host that cannot be reached.
    """
    program = [sys.executable, "-c", SIGNAL_PROGRAM, launch, f"{number:d}"]
    ssh = ["ssh", *REACH, *shlex.split(os.environ.get(SSH_OPTIONS, ""))]
    commands = [[*ssh, host, shlex.join(program)] for host in hosts] or [program]
    # Contact all hosts at the same time, so that many hosts take no longer than one.
    with ThreadPoolExecutor(len(commands)) as pool:
        counts = pool.map(partial(_ask, launch), commands)
        return dict(zip(hosts or ["localhost"], counts, strict=True))


def _ask(launch: str, command: Sequence[str]) -> int | None:
    """Run SIGNAL_PROGRAM and return the count that it prints; None without an answer in REACH_S."""
    try:
        answer = subprocess.run(
            command,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            errors="replace",
            timeout=REACH_S,
        ).stdout
    except subprocess.TimeoutExpired:
        return None
    # A login shell may print other lines.
    count = re.search(rf"{re.escape(launch)}=(\d+)", answer)
    return int(count[1]) if count else None


def wait_for_hosts(
    hosts: Iterable[str],
    last: Iterable[str],
    launch: str,
    least: int,
    patience_s: float,
    stopped: Callable[[], bool],
) -> list[str] | None:
    """Wait until enough hosts answer, and kill all processes of earlier attempts on them.

    If at least `least` hosts answer, this function waits at most patience_s for the other hosts of the previous
    attempt, and does not wait for any other host.

    Args:
        hosts: All hosts.
        last: Hosts of the previous attempt.
        launch: Id of the launch.
        least: Minimum number of hosts for the next attempt.
        patience_s: Seconds to wait for hosts of the previous attempt.
        stopped: Returns whether to stop waiting.

    Returns:
        The hosts for the next attempt; None if fewer than `least` hosts answer within half an hour, or if `stopped`
        returned true.
    """
    hosts = list(hosts)
    end = time.monotonic() + patience_s
    for pause_s in BACK_OFF_S:
        counts = signal_ranks(hosts, launch, signal.SIGKILL)
        missing = [host for host in hosts if counts[host] is None]
        left = [host for host in hosts if host not in missing]
        if not missing:
            return left
        now = time.monotonic()
        enough = len(left) >= least
        names = ", ".join(missing)
        if enough and (now >= end or not set(missing).intersection(last)):
            report(f"continuing with {len(left)} of {len(hosts)} hosts: no answer from {names}")
            return left
        report(f"waiting for {names}")
        retry_at = now + pause_s
        if enough:
            retry_at = min(retry_at, end)
        while time.monotonic() < retry_at:
            time.sleep(0.2)
            if stopped():
                return None
    return left if enough else None


def check_min_hosts(args: argparse.Namespace, config: Config, slots: Mapping[str, int]) -> None:
    """Check that the run can continue on any selection of at least --min-hosts hosts.

    Raises:
        ValueError: If the global batch or data.slots cannot be divided evenly among every possible number of ranks, or
            if the hostfile or the --deepspeed arguments cannot be combined with --min-hosts.
    """
    if any(word.startswith(("-i", "-e", "--in", "--ex", "--num")) for word in args.deepspeed):
        raise ValueError(
            "--min-hosts selects the hosts, so --deepspeed must not: remove the options that select hosts or slots "
            f"from '{shlex.join(args.deepspeed)}', and list in the hostfile only the hosts and slots to use"
        )
    if not args.min_hosts <= len(slots) > 1:
        raise ValueError(
            f"--min-hosts {args.min_hosts} needs a hostfile with at least that many hosts, and at "
            f"least two; got {len(slots)}"
        )
    # Imported here, because this imports torch.
    from disco_ds.data.sources.load import count_slots, load_sources

    selections = {(0, 0)}  # number of hosts and of ranks of every selection of hosts
    for ranks in slots.values():
        selections |= {(hosts + 1, total + ranks) for hosts, total in selections}
    multiple = math.lcm(*(total for hosts, total in selections if hosts >= args.min_hosts))
    num_slots = count_slots(config.data, load_sources(config.data), ranks=1)
    settings = [("data.slots", num_slots, multiple)]
    for stage in config.stage_configs:
        settings.append(("global_batch", stage.global_batch, multiple * stage.micro_batch))
    for name, value, factor in settings:
        if value % factor:
            raise ValueError(
                f"--min-hosts {args.min_hosts}: for every number of ranks that may be left, {name} must be a multiple "
                f"of {factor:,}, got {value}; change it, or raise --min-hosts"
            )


def report(text: str) -> None:
    """Print a message of the launch on stderr."""
    show(text, "disco-ds launch")
