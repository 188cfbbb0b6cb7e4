"""Train unattended: start `deepspeed`, end the processes that it leaves running, and resume after a failure.

    disco-ds launch --hostfile hosts --restarts 3 --config my.yaml runs=/shared/runs

By itself, `deepspeed` returns 0 if its launcher was killed, waits forever for a host that is cut
off, and leaves ranks running on the other hosts. If `deepspeed` is interrupted, it ends every
DeepSpeed job that uses the same Python on its hosts (pkill -f), so this module sends it no signal
except SIGKILL. To stop a run, this module signals the ranks directly on their hosts, where it finds
them by the launch id in their command lines. A run has succeeded if its folder contains
finished.json.

This process does not import torch, and without a hostfile it does not import DeepSpeed either.
"""

import argparse
import json
import os
import re
import secrets
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

from disco_ds.config import Config, load_config
from disco_ds.distributed.launcher import SIGNALS, die_with_parent
from disco_ds.launch.hosts import (
    SSH_OPTIONS,
    check_min_hosts,
    read_hosts,
    report,
    signal_ranks,
    wait_for_hosts,
)
from disco_ds.launch.packing import pack
from disco_ds.runs.messages import fail_rank
from disco_ds.runs.run_folder import FINISHED, LAUNCHED, META, list_complete, split_resume

KEEP_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
"""Options that make ssh notice within 20 s that a host is cut off.

They follow the user's options. ssh uses the first value of each option, so the user's values win.
"""
NAMING_S = 18.0
"""After a host has failed, the ranks on the other hosts have this many seconds to name the lost rank."""
CUT_OFF = 255
"""Exit code of ssh for a lost connection."""
CUT_OFF_S = 2.0
"""If ssh has lost the connection to a host, the ranks on the other hosts have this many seconds to name the lost rank.

They have less time than NAMING_S, because ssh has already waited up to 20 s before it reports a lost connection.
"""
KILLED_S = 120.0
"""After SIGKILL, wait at most this many seconds for all ranks to exit."""
ASK_EVERY_S = 5.0
"""Seconds between two SIGTERMs to ranks that were asked to stop."""
ONE_SIGNAL_S = 2.0
"""Signals that follow each other within this many seconds count as one signal."""
MAX_STUCK = 2
"""The launch fails after this many restarts in a row without a new checkpoint."""
ENDED = re.compile(r"pdsh@\S+: (\S+): ssh (?:exited with exit code (\d+)|killed by signal)")
"""The line that pdsh prints when ssh to a host fails or is killed, or when the launcher on that host fails.

Group 1 is the host. Group 2 is missing if ssh was killed. Otherwise, it is the exit code: CUT_OFF if ssh lost the
connection, or the exit code of the launcher on that host.
"""


class Signals:
    """A counter of signals to this process.

    The first signal asks the ranks to save and stop. A second signal ends them immediately.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last = -ONE_SIGNAL_S
        for number in (*SIGNALS, signal.SIGHUP):
            # Leave ignored signals ignored, such as SIGHUP under nohup.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        # A single request may arrive as two signals, one to this process and one to its process group.
        if now - self._last >= ONE_SIGNAL_S:
            self.count += 1
        self._last = now


def supervise(
    args: argparse.Namespace, config: Config, slots: Mapping[str, int], signals: Signals
) -> int:
    """Start the run, and restart it after failures.

    Args:
        args: The command's arguments.
        config: The recipe.
        slots: Number of ranks per host; empty means this machine only.
        signals: The signals that this process has received.

    Returns:
        The exit code of the command. The docstring of `run` lists the codes.
    """
    resume = args.resume
    folder = None
    newest: Path | None = None
    written = 0
    stuck = 0
    least = args.min_hosts or len(slots)
    # The id of attempt N is LAUNCH-N.
    launch = f"launch-{secrets.token_hex(8)}"
    wait = partial(
        wait_for_hosts,
        slots,
        launch=launch,
        least=least,
        # Wait at least lost_after_s: until then, the ranks on a host that was cut off may still be running.
        patience_s=max(args.patience, config.lost_after_s),
        stopped=lambda: signals.count > 0,
    )
    # Without --min-hosts, the first attempt uses all hosts, and deepspeed itself checks that they answer.
    hosts = wait(slots) if args.min_hosts else list(slots)
    if hosts is None:
        stopped = "a signal ended the wait" if signals.count else f"fewer than {least} hosts answer"
        report(f"not started: {stopped}")
        return 1
    for attempt in range(args.restarts + 1):
        attempt_id = f"{launch}-{attempt}"
        command = front_end(args, config, slots, hosts, attempt_id, resume)
        codes = run_once(command, hosts, launch, signals, config.timeout_s)
        # The run that is resumed may be in a folder other than the recipe's `runs`.
        parents = [config.runs]
        if resume:
            parents.append(split_resume(resume)[0].resolve().parent)
        attempt_folder, agreed = find_run(parents, attempt_id)
        folder = attempt_folder or folder
        code = judge(attempt_folder, agreed, codes)
        # The first attempt has accepted the settings, so a later refusal has another cause, such as a failed read.
        if code in (0, 3) or (code == 2 and attempt == 0):
            return code
        previous, newest = written, newest_checkpoint(folder)
        # Compare modification times, not names: a new checkpoint of the same step may have replaced a damaged one.
        written = (newest / META).stat().st_mtime_ns if newest else 0
        stuck = stuck + 1 if attempt and written == previous else 0
        if signals.count or stuck == MAX_STUCK or attempt == args.restarts:
            break
        hosts = wait(hosts)
        if hosts is None:
            break
        # Do not use "latest", because another run of this name may have started in the meantime.
        resume = str(folder) if newest else args.resume
        start = "the beginning"
        if resume:
            start = f"{folder}, {newest.name}" if newest else f"--resume {resume}"
        report(f"restart {attempt + 1} of {args.restarts}, from {start}")
    hint = "no checkpoint was saved"
    if newest:
        hint = f"--resume latest continues from {newest.name}"
    report(f"not finished; {hint}")
    return 1


def front_end(
    args: argparse.Namespace,
    config: Config,
    slots: Mapping[str, int],
    hosts: Sequence[str],
    attempt_id: str,
    resume: str | None,
) -> list[str]:
    """Return the command line of `deepspeed` for one attempt.

    Args:
        args: The command's arguments.
        config: The recipe.
        slots: Number of ranks per host; empty means this machine only.
        hosts: The hosts of `slots` that this attempt uses.
        attempt_id: Id of the attempt.
        resume: What to resume from, as in --resume.
    """
    # Run it as a module: the #! line of the `deepspeed` script fails if the path of Python has a space.
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *args.deepspeed]
    if args.hostfile:
        command += ["--hostfile", str(args.hostfile)]
    # Otherwise, deepspeed would start the ranks of a single host on this machine.
    if len(hosts) == 1:
        command.append("--force_multi")
    overrides = args.overrides
    if len(hosts) < len(slots):
        command.append(f"--include={'@'.join(hosts)}")
        if config.ranks is not None:
            overrides = [item for item in overrides if not item.startswith("ranks=")]
            overrides.append(f"ranks={sum(slots[host] for host in hosts)}")
    trainer = [f"--config={args.config}"]
    if resume:
        trainer.append(f"--resume={resume}")
    # Restarts also need --allow-change, because their checkpoint may have been saved before the change.
    if args.allow_change:
        trainer.append(f"--allow-change={','.join(args.allow_change)}")
    # The arguments are packed, because pdsh and the login shells of other hosts would expand them.
    packed = pack([*trainer, *overrides])
    return [*command, "--module", "disco_ds.train", "--launch-id", attempt_id, packed]


def run_once(
    command: Sequence[str],
    hosts: Sequence[str],
    launch: str,
    signals: Signals,
    patience_s: float,
) -> set[int]:
    """Run one attempt. Return when no process of the attempt is left on any host that can be reached.

    Args:
        command: Command line of deepspeed.
        hosts: The hosts; empty means this machine only.
        launch: Id of the launch.
        signals: The signals that this process has received.
        patience_s: Time in seconds that the ranks have to save and stop after a signal.

    Returns:
        The exit codes of the launchers that failed on their hosts. If none failed, deepspeed's exit code.
    """
    user_options = os.environ.get(SSH_OPTIONS, "")
    # deepspeed runs in a new session, so that it does not get the terminal's signals. It is killed
    # when this process ends.
    process = subprocess.Popen(
        command,
        env=os.environ | {SSH_OPTIONS: f"{user_options} {KEEP_ALIVE}".strip()},
        start_new_session=True,
        preexec_fn=die_with_parent,
        stderr=subprocess.PIPE,
        errors="replace",
    )
    failed: dict[str, int] = {}
    reader = threading.Thread(target=follow, args=(process.stderr, failed), daemon=True)
    reader.start()
    end = asked_at = float("inf")
    try:
        while (ended := process.poll() is not None) or time.monotonic() < end:
            now = time.monotonic()
            # After a signal, the ranks have patience_s seconds to save and exit. SIGTERM is repeated,
            # because some ranks may still be starting and not handle it yet.
            if signals.count and (asked_at > now or now - asked_at > ASK_EVERY_S):
                end = min(end, now + patience_s)
                asked_at = now
                signal_ranks(hosts, launch, signal.SIGTERM)
            if signals.count > 1:
                break
            # After a failure, the remaining ranks get some time to name the lost rank.
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
        # A killed rank holds the lock of the run folder and GPU memory until the kernel has freed its host memory.
        end = time.monotonic() + KILLED_S
        while any(signal_ranks(hosts, launch, 0).values()) and time.monotonic() < end:
            time.sleep(0.2)
        process.wait()
        reader.join(2)
    for host, count in left.items():
        if count is None:
            report(
                f"{host} cannot be reached; its ranks end by themselves lost_after_s seconds after "
                "they lose contact with the other ranks"
            )
    return set(failed.values()) or {process.returncode}


def follow(lines: IO[str], failed: dict[str, int]) -> None:
    """Forward what deepspeed prints on stderr, and collect the hosts that have failed.

    The failed hosts must be read from stderr, because pdsh itself does not exit until all hosts are done.

    Args:
        lines: stderr of deepspeed.
        failed: Dict to which this function adds each failed host and the exit code of its launcher.
    """
    with lines:
        for line in lines:
            with suppress(OSError):
                print(line, end="", file=sys.stderr, flush=True)
            if match := ENDED.match(line):
                # No exit code means that ssh was killed. The ranks on that host keep running, so the
                # host counts as cut off.
                host = match[1]
                code = failed[host] = int(match[2] or CUT_OFF)
                end = "is cut off" if code == CUT_OFF else f"has ended with exit code {code}"
                report(f"{host} {end}")


def find_run(parents: Sequence[Path], attempt_id: str) -> tuple[Path | None, int | None]:
    """Find the run folder of an attempt.

    Args:
        parents: Folders that contain run folders.
        attempt_id: Id of the attempt.

    Returns:
        The run folder and the exit code that the ranks have agreed on. Each is None if unknown.
    """
    for parent in parents:
        for path in parent.glob(f"*/{LAUNCHED}"):
            # Ignore a malformed file: another program may have written it.
            with suppress(OSError, ValueError, LookupError, TypeError):
                record = json.loads(path.read_bytes())
                if record["launch"] == attempt_id:
                    return path.parent, record["code"]
    return None, None


def judge(folder: Path | None, agreed: int | None, codes: set[int]) -> int:
    """Return the exit code of an attempt.

    It is 0 if the run is finished. Otherwise, it is the code that the ranks agreed on. Without such a code, it is 2 if
    a launcher ended with code 2, 3 if a launcher ended with code 3, and 1 in all other cases.

    Args:
        folder: The run folder, if there is one.
        agreed: Exit code that the ranks have agreed on, if any.
        codes: Exit codes of the launchers.
    """
    if folder and (folder / FINISHED).exists():
        return 0
    # The ranks' agreement takes precedence over the exit codes of their launchers.
    return agreed or next((code for code in (2, 3) if code in codes), 1)


def newest_checkpoint(folder: Path | None) -> Path | None:
    """Return the last complete checkpoint of a run folder, or None if there is none."""
    return next(reversed(list_complete(folder)), None) if folder else None


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: finished. 1: failed. 2: invalid settings or data, found before any work. 3:
        stopped by a signal, after saving a checkpoint.
    """
    try:
        config = load_config(args.config, args.overrides)
        slots = read_hosts(args.hostfile, args.deepspeed) if args.hostfile else {}
        if args.min_hosts is not None:
            check_min_hosts(args, config, slots)
    except ValueError as error:
        return fail_rank(error, 2)
    return supervise(args, config, slots, Signals())
