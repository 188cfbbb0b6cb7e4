"""Unattended runs: start `deepspeed`, end the processes that it leaves behind, and resume after a
failure.

    disco-ds launch --hostfile hosts --restarts 3 --config my.yaml runs=/shared/runs

By itself, `deepspeed` returns 0 if its launcher was killed, waits forever for a host that is cut
off, and leaves ranks on the other hosts running. When interrupted, it ends every DeepSpeed job of
this Python on all its hosts (pkill -f). So it never gets a signal except SIGKILL. Ranks are asked
to stop on their own hosts, where they are found by the id in their command line. A run has
succeeded if its folder has a finished.json.

This process does not import torch, and on one host it does not import DeepSpeed either.
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

from disco_ds.checkpoints.retention import list_complete
from disco_ds.cli.launch_hosts import check_min_hosts, narrow, report, signal_ranks, wait_for_hosts
from disco_ds.cli.messages import fail_rank
from disco_ds.cli.packing import pack
from disco_ds.config import Config, load_config
from disco_ds.launch.hostfile import read_hostfile
from disco_ds.launch.watchdog import die_with_parent
from disco_ds.runs.run_folder import FINISHED, LAUNCHED, split_resume

KEEP_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
"""ssh options that notice a host that is cut off within 20 s.

ssh uses the first value of an option, so these follow the user's options.
"""
JOB_HOSTFILE = Path("/job/hostfile")
"""The hostfile that deepspeed reads by default."""
NAMING_S = 18.0
"""Time for the ranks of other hosts to notice that a host has ended, and to name the lost rank."""
CUT_OFF = 255
"""Exit code of ssh for a lost connection."""
CUT_OFF_S = 2.0
"""Replaces NAMING_S for a lost connection, because ssh needed 20 s to notice it."""
ASK_EVERY_S = 5.0
"""Time between two SIGTERMs to ranks that were asked to stop."""
ONE_SIGNAL_S = 2.0
"""Several signals within this time count as one."""
MAX_STUCK = 2
"""There are no more restarts after this many in a row without a new checkpoint."""

ENDED = re.compile(r"pdsh@\S+: (\S+): ssh (?:exited with exit code (\d+)|killed by signal)")


class Signals:
    """Counts signals to this process. The first asks the ranks to save and stop, a second one
    kills them."""

    def __init__(self) -> None:
        self.count = 0
        self._last = -ONE_SIGNAL_S
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        # The same signal may arrive twice: for this process and for its group.
        if now - self._last >= ONE_SIGNAL_S:
            self.count += 1
        self._last = now


def supervise(
    args: argparse.Namespace, config: Config, slots: Mapping[str, int], signals: Signals
) -> int:
    """Start the run, and restart it while that helps.

    Args:
        args: The command's arguments.
        config: The recipe.
        slots: Slots by host; empty: this host only.
        signals: The signals that this process has received.

    Returns:
        The exit code, see run.
    """
    resume = args.resume
    folder = None
    newest = ""
    stuck = 0
    least = args.min_hosts or len(slots)
    launch = new_launch_id()
    wait = partial(
        wait_for_hosts,
        slots,
        launch=launch,
        least=least,
        patience_s=args.patience,
        stopped=lambda: signals.count > 0,
    )
    # Without --min-hosts the first attempt uses all hosts, and deepspeed checks them.
    hosts = wait(slots) if args.min_hosts else list(slots)
    if hosts is None:
        report(f"not started: fewer than {least} hosts answer")
        return 1
    for attempt in range(args.restarts + 1):
        attempt_id = f"{launch}-{attempt}"
        with narrow(args, config, slots, hosts) as given:
            command = front_end(given, attempt_id, resume)
            codes = run_once(command, hosts, launch, signals, config.timeout_s)
        # A resumed run may be in another folder than the recipe's.
        places = [config.runs, split_resume(resume)[0].parent if resume else config.runs]
        found, agreed = find_run(places, attempt_id)
        folder = found or folder
        code = judge(found, agreed, codes)
        if code != 1:
            return code
        previous = newest
        newest = newest_checkpoint(folder)
        stuck = stuck + 1 if attempt and newest == previous else 0
        if signals.count or stuck == MAX_STUCK or attempt == args.restarts:
            break
        remaining = wait(hosts)
        if remaining is None:
            break
        hosts = remaining
        # Not "latest": another run of this name may have started meanwhile.
        resume = str(folder) if newest else args.resume
        start = f"{folder}, {newest}" if newest else "the beginning"
        report(f"restart {attempt + 1} of {args.restarts}, from {start}")
    after = f" after {MAX_STUCK} restarts without progress" if stuck == MAX_STUCK else ""
    hint = f"--resume latest continues from {newest}" if newest else "there is no checkpoint"
    report(f"not finished{after}; {hint}")
    return 1


def new_launch_id() -> str:
    """Return a random id for this launch; its attempt N has the id `launch-HEX-N`."""
    return f"launch-{secrets.token_hex(8)}"


def front_end(args: argparse.Namespace, attempt_id: str, resume: str | None) -> list[str]:
    """Return the command line of `deepspeed` for one attempt."""
    # As a module, because the #! line of the script `deepspeed` breaks if the path has a space.
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *shlex.split(args.deepspeed)]
    if args.hostfile:
        command += ["--hostfile", str(args.hostfile)]
    trainer = [f"--config={args.config}"]
    if resume:
        trainer.append(f"--resume={resume}")
    if args.allow_change:  # on a restart too: it may resume from a checkpoint before the change
        trainer.append(f"--allow-change={','.join(args.allow_change)}")
    # Packed, because on several hosts pdsh, ssh and the login shell would expand the arguments.
    packed = pack([*trainer, *args.overrides])
    return [*command, "--module", "disco_ds.train", "--launch-id", attempt_id, packed]


def run_once(
    command: Sequence[str],
    hosts: Sequence[str],
    launch: str,
    signals: Signals,
    patience_s: float,
) -> set[int]:
    """Run deepspeed until none of its processes is left on any host that can be reached.

    Args:
        command: Command line of deepspeed.
        hosts: The hosts if there are several; empty: this host only.
        launch: Id of the launch; the command line of every rank contains that of its attempt.
        signals: The signals that this process has received.
        patience_s: How long ranks may take to stop.

    Returns:
        The exit codes of the hosts whose launcher has failed; if none has, deepspeed's exit code.
    """
    user_options = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    # In a new session, so that a terminal's signals reach only this process. It is killed when this
    # process ends.
    process = subprocess.Popen(
        command,
        env=os.environ | {"PDSH_SSH_ARGS_APPEND": f"{user_options} {KEEP_ALIVE}".strip()},
        start_new_session=True,
        preexec_fn=die_with_parent,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    failed: dict[str, int] = {}
    reader = threading.Thread(target=follow, args=(process.stderr, failed), daemon=True)
    reader.start()
    end = asked_at = float("inf")
    try:
        while (ended := process.poll() is not None) or time.monotonic() < end:
            now = time.monotonic()
            # After a signal the ranks have patience_s to save and end. SIGTERM is repeated, because
            # some may still be starting.
            if signals.count and (asked_at > now or now - asked_at > ASK_EVERY_S):
                end = min(end, now + patience_s)
                asked_at = now
                signal_ranks(hosts, launch, signal.SIGTERM)
            if signals.count > 1:
                break
            # A host has failed or deepspeed has ended: the remaining ranks have time to name the
            # lost one.
            if failed or ended:
                limit_s = patience_s if signals.count else NAMING_S
                if CUT_OFF in failed.values():
                    limit_s = CUT_OFF_S
                end = min(end, now + limit_s)
            if ended and (now > end or not any(signal_ranks(hosts, launch, 0).values())):
                break
            time.sleep(0.2)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        left = signal_ranks(hosts, launch, signal.SIGKILL)
        process.wait()
        reader.join(2)
    for host, count in left.items():
        if count is None:
            report(
                f"{host} cannot be reached: its ranks end by themselves lost_after_s after they have lost the others"
            )
    return set(failed.values()) or {process.returncode}


def follow(lines: IO[str], failed: dict[str, int]) -> None:
    """Forward what deepspeed prints, and note which hosts have failed, because pdsh would wait for
    the others.

    Args:
        lines: stderr of deepspeed.
        failed: Gets the exit code of each failed host.
    """
    with lines:
        for line in lines:
            with suppress(OSError):
                print(line, end="", file=sys.stderr, flush=True)
            if found := ENDED.match(line):
                # If its ssh is killed, the ranks of a host keep running, so it counts as cut off
                # too.
                host = found[1]
                code = failed[host] = int(found[2] or CUT_OFF)
                end = "is cut off" if code == CUT_OFF else f"has ended with exit code {code}"
                report(f"{host} {end}")


def find_run(places: Sequence[Path], attempt_id: str) -> tuple[Path | None, int | None]:
    """Find the run folder of an attempt.

    Args:
        places: Folders of run folders.
        attempt_id: Id of the attempt.

    Returns:
        The run folder, and the exit code that the ranks have agreed on; None if unknown.
    """
    for place in places:
        for path in place.glob(f"*/{LAUNCHED}"):
            # The file may belong to another run that is just writing it, or to another program.
            with suppress(OSError, ValueError, RecursionError):
                record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
                if isinstance(record, dict) and record.get("launch") == attempt_id:
                    return path.parent, record["code"]
    return None, None


def judge(folder: Path | None, agreed: int | None, codes: set[int]) -> int:
    """Return the exit code of a run, which may differ from deepspeed's.

    Args:
        folder: The run folder, if there is one.
        agreed: Exit code that the ranks have agreed on, if any.
        codes: Exit codes of the launchers.
    """
    if folder and (folder / FINISHED).exists():
        return 0
    # The ranks' agreement takes precedence over the exit codes of their launchers.
    if agreed:
        return agreed
    return next((code for code in (2, 3) if code in codes), 1)


def newest_checkpoint(folder: Path | None) -> str:
    """Return the name of the last complete checkpoint; empty if there is none."""
    complete = list_complete(folder) if folder else []
    return complete[-1].name if complete else ""


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: the run is finished. 1: it failed. 2: invalid settings or data, found before
        any work. 3: a signal has stopped it after a save.
    """
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
