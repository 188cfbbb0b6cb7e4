"""Unattended runs: starts `deepspeed`, ends what it leaves behind, and goes on after a failure.

    disco-ds launch --hostfile hosts --restarts 3 --config my.yaml runs=/shared/runs

`deepspeed` returns 0 where its launcher was killed, waits for ever for a host that is cut off, leaves the other hosts'
ranks to train, and, interrupted, ends every DeepSpeed job of this Python on all its hosts (pkill -f). So it gets no
signal but SIGKILL. Ranks are asked to stop on their own hosts, where they are found by the launch id in their command
line. A run has succeeded if its folder has a finished.json. This process imports neither torch nor, on one host,
DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from disco_ds.cli.launch_hosts import check_min_hosts, narrow, report, signal_ranks, wait_for_hosts
from disco_ds.cli.messages import fail_rank
from disco_ds.cli.packing import pack
from disco_ds.config import Config, load_config
from disco_ds.distributed.hostfile import read_hostfile
from disco_ds.distributed.watchdog import die_with_parent
from disco_ds.metrics.run_folder import FINISHED, LAUNCHED, split_resume
from disco_ds.training.retention import list_complete

KEEP_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
"""ssh notices a host that is cut off after 20 s. It takes the first value it is given, so the user's own come first."""
JOB_HOSTFILE = Path("/job/hostfile")
"""The hostfile that deepspeed reads where none is given."""
NAMING_S = 18.0
"""After a host has ended: the time for the ranks of other hosts to notice that, and to name the lost rank."""
CUT_OFF, CUT_OFF_S = 255, 2.0
"""ssh's exit code for a lost connection. It took 20 s to notice, so the ranks have had their time already."""
ASK_EVERY_S, ONE_SIGNAL_S = 5.0, 2.0
STUCK = 2
"""Restarts in a row without a new checkpoint, after which there are no more."""

ENDED = re.compile(r"pdsh@\S+: (\S+): ssh (?:exited with exit code (\d+)|killed by signal)")


class Signals:
    """The signals this process has received: the first asks the ranks to save and stop, a later one kills them."""

    def __init__(self) -> None:
        self.count, self._last = 0, -ONE_SIGNAL_S
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        self.count += now - self._last >= ONE_SIGNAL_S  # one may come twice: to this process, and to its group
        self._last = now


def supervise(args: argparse.Namespace, config: Config, slots: Mapping[str, int], signals: Signals) -> int:
    """Start the run, and restart it while that helps. Args: slots: by host; empty for this one alone.

    Returns: the exit code, see run.
    """
    resume, folder, newest, stuck = args.resume, None, "", 0
    least, launch_id = args.min_hosts or len(slots), new_launch_id()
    wait = partial(wait_for_hosts, slots, least=least, patience_s=args.patience, stopped=lambda: signals.count > 0)
    # Without --min-hosts all hosts take part in the first attempt, as deepspeed finds them.
    hosts = wait(slots, launch_id) if args.min_hosts else list(slots)
    if hosts is None:
        report(f"not started: it takes {least} hosts that answer")
        return 1
    for attempt in range(args.restarts + 1):
        launch_id = new_launch_id()
        with narrow(args, config, slots, hosts) as given:
            codes = run_once(front_end(given, launch_id, resume), hosts, launch_id, signals, config.timeout_s)
        # A run that is resumed may stand in another folder than the recipe's.
        found, agreed = find_run([config.runs, split_resume(resume)[0].parent if resume else config.runs], launch_id)
        folder = found or folder
        if (code := judge(found, agreed, codes)) != 1:
            return code
        before, newest = newest, newest_checkpoint(folder)
        stuck = stuck + 1 if attempt and newest == before else 0
        # No restart after a signal, without progress, or while too many hosts are away.
        if signals.count or stuck == STUCK or attempt == args.restarts:
            break
        if (left := wait(hosts, launch_id)) is None:
            break
        hosts = left
        # Not "latest": another run of this name may have begun meanwhile.
        resume = str(folder) if newest else args.resume
        report(f"restart {attempt + 1} of {args.restarts}, from {f'{folder}, {newest}' if newest else 'the beginning'}")
    after = f" after {STUCK} restarts without progress" if stuck == STUCK else ""
    report(f"not finished{after}; {f'--resume latest goes on from {newest}' if newest else 'nothing is saved'}")
    return 1


def new_launch_id() -> str:
    return f"launch-{secrets.token_hex(8)}"


def front_end(args: argparse.Namespace, launch_id: str, resume: str | None) -> list[str]:
    # As a module: the script `deepspeed` names its Python in the first line, where a space in the path would end it.
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *shlex.split(args.deepspeed)]
    command += ["--hostfile", str(args.hostfile)] if args.hostfile else []
    # Packed: on several hosts pdsh, ssh and the login shell there would expand what was typed.
    given = [f"--config={args.config}", *([f"--resume={resume}"] if resume else [])]
    if args.allow_change:  # on a restart too: it may go on from the checkpoint of before the change
        given.append(f"--allow-change={','.join(args.allow_change)}")
    packed = pack([*given, *args.overrides])
    return [*command, "--module", "disco_ds.train", "--launch-id", launch_id, packed]


def run_once(
    command: Sequence[str], hosts: Sequence[str], launch_id: str, signals: Signals, patience_s: float
) -> set[int]:
    """Run deepspeed until nothing of it is left on any host that can be reached.

    Args:    hosts: several hosts; empty for this one alone; launch_id: an argument of every rank's command line;
             patience_s: how long ranks that were asked to stop may take.
    Returns: the exit codes of the hosts whose launcher has failed, or else deepspeed's own.
    """
    own = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    environment = os.environ | {"PDSH_SSH_ARGS_APPEND": f"{own} {KEEP_ALIVE}".strip()}
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    # A session of its own, so that only this process gets what a terminal sends. It is killed when this process ends.
    process = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=die_with_parent, **pipes)
    failed: dict[str, int] = {}
    reader = threading.Thread(target=follow, args=(process.stderr, failed), daemon=True)
    reader.start()
    end = asked_at = float("inf")
    try:
        while (ended := process.poll() is not None) or time.monotonic() < end:
            now = time.monotonic()
            # Asked by a signal: the ranks get patience_s to save and end, and SIGTERM again every few seconds.
            if signals.count and (asked_at > now or now - asked_at > ASK_EVERY_S):
                end, asked_at = min(end, now + patience_s), now
                signal_ranks(hosts, launch_id, signal.SIGTERM)  # repeatedly: some may still be starting
            if signals.count > 1:
                break
            # A host has failed, or deepspeed has ended: the ranks that are left get time to name what they have lost.
            if failed or ended:
                cut_off = CUT_OFF in failed.values()
                end = min(end, now + (CUT_OFF_S if cut_off else patience_s if signals.count else NAMING_S))
            if ended and (now > end or not any(signal_ranks(hosts, launch_id, 0).values())):
                break
            time.sleep(0.2)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        left = signal_ranks(hosts, launch_id, signal.SIGKILL)
        process.wait()
        reader.join(2)
    for host, count in left.items():
        if count is None:
            report(
                f"{host} cannot be reached: its ranks end by themselves, lost_after_s after they have lost the others"
            )
    return set(failed.values()) or {process.returncode}


def follow(lines: IO[str], failed: dict[str, int]) -> None:
    """Pass on what deepspeed prints, and note the hosts that have failed: pdsh would wait for the others."""
    with lines:
        for line in lines:
            with suppress(OSError):
                print(line, end="", file=sys.stderr, flush=True)
            if found := ENDED.match(line):
                # Without its ssh a host's ranks train on, unheard: it is cut off too.
                code = failed[found[1]] = int(found[2] or CUT_OFF)
                report(f"{found[1]} {'is cut off' if code == CUT_OFF else f'has ended, exit code {code}'}")


def find_run(places: Sequence[Path], launch_id: str) -> tuple[Path | None, int | None]:
    """Find the run folder of a launch, and the exit code its ranks agreed on; None for what is not known."""
    for path in (path for place in places for path in place.glob(f"*/{LAUNCHED}")):
        # The file may be another run's that is just being written, or another program's.
        with suppress(OSError, ValueError, RecursionError):
            record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
            if isinstance(record, dict) and record.get("launch") == launch_id:
                return path.parent, record["code"]
    return None, None


def judge(folder: Path | None, agreed: int | None, codes: set[int]) -> int:
    """The exit code of a run, which may differ from what deepspeed has returned."""
    if folder and (folder / FINISHED).exists():
        return 0
    # What the ranks have agreed on counts more than the exit codes of their launchers.
    return agreed or next((code for code in (2, 3) if code in codes), 1)


def newest_checkpoint(folder: Path | None) -> str:
    """The name of the last complete checkpoint; empty if there is none."""
    complete = list_complete(folder) if folder else []
    return complete[-1].name if complete else ""


def run(args: argparse.Namespace) -> int:
    """Exit code 0: the run has done all its steps; 1: it failed; 2: a mistake in settings or data, found before any
    work; 3: asked to stop by a signal, and saved."""
    if args.hostfile is None and JOB_HOSTFILE.is_file():
        args.hostfile = JOB_HOSTFILE
    try:
        config = load_config(args.config, args.overrides)
        slots = read_hostfile(args.hostfile) if args.hostfile else {}
        front_end(args, "", args.resume)  # refuses overrides that are too long
        if args.min_hosts is not None:
            check_min_hosts(args, config, slots)
    except ValueError as error:
        return fail_rank(error, code=2)
    return supervise(args, config, slots if len(slots) > 1 else {}, Signals())
