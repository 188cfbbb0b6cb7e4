"""The hosts of a launch: asked whether they can be reached, waited for, and with --min-hosts left out."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from disco_ds.config import Config
from disco_ds.config.recipe_yaml import split_override

REACH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=3")
REACH_S = 6.0
"""Seconds in which all hosts must have answered."""
BACK_OFF_S = (2, 4, 8, 16, 32, *[60] * 30)
"""Pauses between attempts to reach lost hosts."""
CHOOSES_HOSTS = {"-H", "--hostfile", "-i", "--include", "-e", "--exclude"}
CHOOSES_HOSTS |= {"--num_nodes", "--num_gpus", "--num_accelerators", "--master_addr"}
"""Arguments of deepspeed that change which hosts and slots of the hostfile are used."""
Stopped = Callable[[], bool]
FIND = """
import os, psutil, sys
launch_id, number, found = sys.argv[1], int(sys.argv[2]), 0
for process in psutil.process_iter():
    try:
        command = process.cmdline()
        mine = launch_id in command and process.pid != os.getpid()
        if mine and (number == 9 or any(each.startswith("--local_rank") for each in command)):
            process.send_signal(number)
            found += 1
    except psutil.Error:
        pass
print(found)
"""
"""Program for a host: it signals the ranks of a launch, with SIGKILL its launchers too, and prints their number."""


def signal_ranks(hosts: Sequence[str], launch_id: str, number: int) -> dict[str, int | None]:
    """Send a signal (0: none) to this launch's ranks, SIGKILL to their launchers too.

    Returns: the number of processes found on each host; None for a host that could not be reached.
    """
    command = [sys.executable, "-c", FIND, launch_id, str(int(number))]
    reach = ["ssh", *REACH, *shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))]
    places = {host: [*reach, host, shlex.join(command)] for host in hosts} or {"localhost": command}
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    started = {host: subprocess.Popen(place, start_new_session=True, **options) for host, place in places.items()}
    # All hosts at once, within one deadline.
    end, found = time.monotonic() + REACH_S, dict.fromkeys(places)
    for host, process in started.items():
        try:
            said, _ = process.communicate(timeout=max(end - time.monotonic(), 0.1))
            found[host] = int(said)
        except (subprocess.TimeoutExpired, ValueError):
            process.kill()
            process.communicate()
    return found


def wait_for_hosts(
    hosts: Iterable[str], last: Iterable[str], launch_id: str, least: int, patience_s: float, stopped: Stopped
) -> list[str] | None:
    """Wait until all hosts can be reached, and end what is left of the launch there.

    Args:    last: hosts of the attempt before: another one is asked once, and not waited for; least: number of hosts
             that suffice after patience_s; stopped: asked whether to give up.
    Returns: the hosts to go on with; None where too few came back in half an hour.
    """
    hosts, end = list(hosts), time.monotonic() + patience_s
    for pause_s in BACK_OFF_S:
        counts = signal_ranks(hosts, launch_id, signal.SIGKILL)
        missing = [host for host in hosts if counts[host] is None]
        left, now = [host for host in hosts if host not in missing], time.monotonic()
        if not missing:
            return left
        enough = len(left) >= least
        if enough and (now >= end or not set(missing).intersection(last)):
            away = f"{', '.join(missing)} {'does' if len(missing) == 1 else 'do'} not answer"
            report(f"going on with {len(left)} of {len(hosts)} hosts: {away}")
            return left
        report(f"waiting for {', '.join(missing)}")
        while time.monotonic() < now + (min(pause_s, end - now) if enough else pause_s):
            time.sleep(0.2)
            if stopped():
                return None
    return left if enough else None


@contextmanager
def narrow(
    args: argparse.Namespace, config: Config, slots: Mapping[str, int], hosts: Sequence[str]
) -> Iterator[argparse.Namespace]:
    """The arguments for an attempt on some of the hosts, whose hostfile is there for the block."""
    if len(hosts) == len(slots):
        yield args
        return
    overrides = args.overrides
    if config.ranks is not None:  # else any number is accepted
        overrides = [item for item in overrides if split_override(item)[0] != ["ranks"]]
        overrides.append(f"ranks={sum(slots[host] for host in hosts)}")
    # deepspeed would start a single host's ranks here, whichever host that is.
    deepspeed = f"{args.deepspeed} --force_multi" if len(hosts) == 1 else args.deepspeed
    with tempfile.NamedTemporaryFile("w", prefix="disco-ds-hosts-") as file:
        file.writelines(f"{host} slots={slots[host]}\n" for host in hosts)
        file.flush()
        changed = {"hostfile": Path(file.name), "overrides": overrides, "deepspeed": deepspeed}
        yield argparse.Namespace(**vars(args) | changed)


def check_min_hosts(args: argparse.Namespace, config: Config, slots: Mapping[str, int]) -> None:
    """Raises: ValueError for a --min-hosts that a lost host would make fail."""
    if not args.min_hosts <= len(slots) > 1:
        raise ValueError(
            f"--min-hosts {args.min_hosts} needs a hostfile of as many hosts, two at least; got {len(slots)}"
        )
    if not args.restarts:
        raise ValueError(f"--min-hosts {args.min_hosts} goes with --restarts: without one a lost host ends the run")
    if args.patience < config.lost_after_s:
        raise ValueError(
            f"--patience {args.patience:g} is below lost_after_s ({config.lost_after_s:g}): ranks of a host that is "
            "cut off may still be running then; raise --patience, or lower lost_after_s"
        )
    given = {word.partition("=")[0] for word in shlex.split(args.deepspeed)} & CHOOSES_HOSTS
    if given:
        raise ValueError(f"--deepspeed {min(given)} with --min-hosts: say in the hostfile which hosts and slots to use")
    from disco_ds.plan.fewer_hosts import check_fewer_hosts, read_gpu_gib

    report(check_fewer_hosts(config, list(slots.values()), args.min_hosts, read_gpu_gib()))


def report(text: str) -> None:
    with suppress(OSError):  # of a terminal, or a `tee`, that is gone
        print(f"disco-ds launch: {text}", file=sys.stderr, flush=True)
