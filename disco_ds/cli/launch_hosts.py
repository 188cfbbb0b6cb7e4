"""The hosts of a launch: signal their ranks, wait for lost hosts, and with --min-hosts continue
without them."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from disco_ds.config import Config
from disco_ds.config.recipe_yaml import split_override

REACH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=3")
REACH_S = 6.0
"""Seconds in which all hosts must answer."""
BACK_OFF_S = (2, 4, 8, 16, 32, *[60] * 30)
"""Pauses between attempts to reach lost hosts."""
CHOOSES_HOSTS = {
    "-H",
    "--hostfile",
    "-i",
    "--include",
    "-e",
    "--exclude",
    "--num_nodes",
    "--num_gpus",
    "--num_accelerators",
    "--master_addr",
}
"""Arguments of deepspeed that select hosts and slots of the hostfile."""
Stopped = Callable[[], bool]
FIND = """
import psutil, sys
launch, number, found = sys.argv[1], int(sys.argv[2]), 0
for process in psutil.process_iter():
    try:
        command = process.cmdline()
        mine = any(each.startswith(launch + "-") for each in command)
        if mine and (number == 9 or any(each.startswith("--local_rank") for each in command)):
            process.send_signal(number)
            found += 1
    except psutil.Error:
        pass
print(f"{launch}={found}")
"""
"""Program for a host: signal the ranks of all attempts of a launch, with SIGKILL their launchers
too, and print LAUNCH=NUMBER."""


def signal_ranks(hosts: Sequence[str], launch: str, number: int) -> dict[str, int | None]:
    """Send a signal to the ranks of a launch; SIGKILL goes to their launchers too.

    Ranks of earlier attempts are included: a host that was frozen when they were ended may have
    resumed since.

    Args:
        hosts: The hosts; empty: this host only.
        launch: Id of the launch, with which the ids of its attempts begin.
        number: The signal; 0: none, only count the processes.

    Returns:
        Number of processes found on each host; None for a host that cannot be reached.
    """
    command = [sys.executable, "-c", FIND, launch, str(int(number))]
    reach = ["ssh", *REACH, *shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))]
    places = {host: [*reach, host, shlex.join(command)] for host in hosts} or {"localhost": command}
    started = {
        host: subprocess.Popen(
            place,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for host, place in places.items()
    }
    # A login shell may print lines of its own before and after.
    answer = re.compile(rf"{re.escape(launch)}=(\d+)".encode())
    # One deadline for all hosts, which work in parallel.
    end = time.monotonic() + REACH_S
    found: dict[str, int | None] = dict.fromkeys(places)
    for host, process in started.items():
        try:
            printed, _ = process.communicate(timeout=max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        else:
            match = answer.search(printed)
            found[host] = int(match[1]) if match else None
    return found


def wait_for_hosts(
    hosts: Iterable[str],
    last: Iterable[str],
    launch: str,
    least: int,
    patience_s: float,
    stopped: Stopped,
) -> list[str] | None:
    """Wait until all hosts can be reached, and end the remaining processes of the launch there.

    Args:
        hosts: All hosts.
        last: Hosts of the previous attempt. Other hosts are tried once, without waiting for them.
        launch: Id of the launch.
        least: Number of hosts that suffice after patience_s.
        patience_s: See `least`.
        stopped: Returns whether to give up.

    Returns:
        The hosts for the next attempt; None if there are too few after half an hour.
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
        if enough and (now >= end or not set(missing).intersection(last)):
            away = f"no answer from {', '.join(missing)}"
            report(f"continuing with {len(left)} of {len(hosts)} hosts: {away}")
            return left
        report(f"waiting for {', '.join(missing)}")
        retry_at = now + pause_s
        if enough:
            retry_at = min(retry_at, end)
        while time.monotonic() < retry_at:
            time.sleep(0.2)
            if stopped():
                return None
    return left if enough else None


@contextmanager
def narrow(
    args: argparse.Namespace, config: Config, slots: Mapping[str, int], hosts: Sequence[str]
) -> Iterator[argparse.Namespace]:
    """Yield the arguments for an attempt on some of the hosts, with a hostfile that exists
    inside the block."""
    if len(hosts) == len(slots):
        yield args
        return
    overrides = args.overrides
    if config.ranks is not None:  # otherwise any number is accepted
        overrides = [item for item in overrides if split_override(item)[0] != ["ranks"]]
        overrides.append(f"ranks={sum(slots[host] for host in hosts)}")
    # For a single host, deepspeed would start the ranks here even if it is another host.
    deepspeed = f"{args.deepspeed} --force_multi" if len(hosts) == 1 else args.deepspeed
    with tempfile.NamedTemporaryFile("w", prefix="disco-ds-hosts-") as file:
        file.writelines(f"{host} slots={slots[host]}\n" for host in hosts)
        file.flush()
        changed = {"hostfile": Path(file.name), "overrides": overrides, "deepspeed": deepspeed}
        yield argparse.Namespace(**vars(args) | changed)


def check_min_hosts(args: argparse.Namespace, config: Config, slots: Mapping[str, int]) -> None:
    """Check the arguments that --min-hosts needs.

    Raises:
        ValueError: If the run could not continue after losing a host.
    """
    if not args.min_hosts <= len(slots) > 1:
        raise ValueError(
            f"--min-hosts {args.min_hosts} needs a hostfile with at least that many hosts, and at least two; got "
            f"{len(slots)}"
        )
    if not args.restarts:
        raise ValueError(
            f"--min-hosts {args.min_hosts} needs --restarts: without a restart a lost host ends the run"
        )
    if args.patience < config.lost_after_s:
        raise ValueError(
            f"--patience {args.patience:g} is below lost_after_s ({config.lost_after_s:g}), so ranks of a host that is "
            "cut off may still be running; raise --patience or lower lost_after_s"
        )
    given = {word.partition("=")[0] for word in shlex.split(args.deepspeed)} & CHOOSES_HOSTS
    if given:
        raise ValueError(
            f"--deepspeed {min(given)} cannot be used with --min-hosts: select hosts and slots in the hostfile"
        )
    from disco_ds.plan.fewer_hosts import check_fewer_hosts, read_gpu_gib

    report(check_fewer_hosts(config, list(slots.values()), args.min_hosts, read_gpu_gib()))


def report(text: str) -> None:
    """Print a message of the launch on stderr."""
    with suppress(OSError):  # the terminal, or a `tee`, may be gone
        print(f"disco-ds launch: {text}", file=sys.stderr, flush=True)
