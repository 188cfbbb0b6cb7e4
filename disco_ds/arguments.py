"""The trainer's command line and its dry run. Light: a dry run imports no open_clip."""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from disco_ds.config import Config, render_ds_config

PACKED = "--packed="
MAX_PACKED = 2**16
"""Characters; Linux allows 2**17 in one argument, and ssh gets the whole command of a host as one."""


def recipe_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """What every command that trains takes."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", required=True, metavar="NAME|FILE", help="a recipe: a bundled name or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. optim.lr=1e-3 deepspeed=zero3")
    resume = "go on from a run folder's last complete checkpoint, or from RUN/checkpoints/step-N"
    parser.add_argument("--resume", metavar="latest|FOLDER", help=resume)
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = recipe_parser("disco_ds.train", "Train a CLIP model from a recipe.")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved run and stop; needs no ranks or data"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=int, metavar="N", help="with --dry-run: for N ranks")
    where.add_argument("--hostfile", type=Path, metavar="F", help="with --dry-run: for the slots of a hostfile")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    parser.add_argument("--launch-word", help=argparse.SUPPRESS)  # launch.py finds its ranks and folder by it
    try:
        argv = unpack(argv)
    except ValueError as error:
        parser.error(str(error))
    return parser.parse_intermixed_args(argv)


def pack(argv: Sequence[str]) -> str:
    """One word for a command line of the trainer's, which no shell on its way to the ranks can change.

    Raises: ValueError where that would be longer than a command line may be.
    """
    text = base64.urlsafe_b64encode(json.dumps(argv).encode()).decode().rstrip("=")
    if len(text) > MAX_PACKED:
        raise ValueError(
            f"the overrides take {len(text):,} characters on the way to the ranks, where {MAX_PACKED:,} have room: "
            "write them into the recipe"
        )
    return PACKED + text


def unpack(argv: Sequence[str]) -> list[str]:
    """A command line with what `pack` has packed in its place. Raises: ValueError for a word that is not pack's."""
    found: list[str] = []
    for word in argv:
        if not word.startswith(PACKED):
            found.append(word)
            continue
        text = word.removeprefix(PACKED)
        try:
            words = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        except ValueError:
            words = None
        if not isinstance(words, list) or not all(isinstance(each, str) for each in words):
            raise ValueError(f"{word} is not what disco-ds launch has packed: it was changed on its way to this rank")
        found += words
    return found


def count_ranks(ranks: int | None, hostfile: Path | None) -> int:
    """World size a dry run is for. Raises: ValueError for a hostfile that is missing, malformed or of no use here."""
    if hostfile is None:
        return 1 if ranks is None else ranks
    return sum(read_hostfile(hostfile).values())


def read_hostfile(path: Path) -> dict[str, int]:
    """Host -> slots. Raises: ValueError where deepspeed could not launch on them."""
    if not path.is_file():
        raise ValueError(f"no hostfile {path}; deepspeed would run on this host alone")
    from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME, DEEPSPEED_ENVIRONMENT_PATHS, fetch_hostfile

    slots: dict[str, int] = fetch_hostfile(str(path))
    if len(slots) > 1:
        _refuse_folder(str(Path.cwd()))
        for variables in (Path(folder, DEEPSPEED_ENVIRONMENT_NAME) for folder in DEEPSPEED_ENVIRONMENT_PATHS):
            for line in variables.read_text(encoding="utf-8").splitlines() if variables.is_file() else ():
                if "=" not in line:
                    raise ValueError(f"{variables}: deepspeed reads lines of NAME=VALUE only, got {line!r}; remove it")
    return slots


def adopt_slurm() -> None:
    """Set the variables of a launcher from those of srun, which knows no RANK; what is set already stays.

    The lead host is the first of the step, where rank 0 is; the port is the job's own, below those that systems lend.
    """
    known = os.environ
    # Slurm sets SLURM_PROCID in a batch script too, which is no task of a step.
    if "RANK" in known or "SLURM_STEP_ID" not in known or "SLURM_PROCID" not in known:
        return
    nodes = known.get("SLURM_STEP_NODELIST") or known.get("SLURM_NODELIST") or ""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    lead = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else "")  # node[003-006,010] -> node003
    job = 100 * int(known.get("SLURM_JOB_ID", "0")) + int(known["SLURM_STEP_ID"])
    known.setdefault("MASTER_ADDR", lead or known.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
    known.setdefault("MASTER_PORT", str(12_000 + job % 20_000))
    known.setdefault("WORLD_SIZE", known.get("SLURM_STEP_NUM_TASKS") or known["SLURM_NTASKS"])
    # With --gpus-per-task each task sees its own GPUs only.
    seen = known.get("CUDA_VISIBLE_DEVICES", "")
    local = int(known.get("SLURM_LOCALID", "0"))
    known.setdefault("LOCAL_RANK", str(local % (seen.count(",") + 1) if seen else local))
    known["RANK"] = known["SLURM_PROCID"]


def refuse_launch() -> None:
    """Raises: ValueError where DeepSpeed's launcher has only warned, and started this rank where nobody wanted it."""
    from deepspeed.launcher.runner import DLTS_HOSTFILE
    from deepspeed.launcher.runner import parse_args as parse_front_end

    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            words = process.cmdline()
            if len(words) > 1 and Path(words[1]).name == "deepspeed":
                hostfile = parse_front_end(words[2:]).hostfile
                if hostfile != DLTS_HOSTFILE and not Path(hostfile).is_file():
                    raise ValueError(f"no hostfile {hostfile}: deepspeed has started this host alone")
    # On several hosts, PYTHONPATH begins with the folder that deepspeed was started in.
    folder = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
    if int(os.environ.get("CROSS_SIZE", "1")) > 1 and folder != str(Path.cwd()):
        _refuse_folder(folder)


def _refuse_folder(folder: str) -> None:
    if re.search(r"[^\w@%+=:,./-]", folder):
        raise ValueError(
            f"working directory {folder!r}: on several hosts deepspeed changes to it without quotes, so that the ranks "
            "start elsewhere; start from a folder without spaces or other characters of the shell's"
        )


def fail(error: Exception, tells: bool, code: int) -> int:
    """Say why this process ends, where it is the one that tells. Returns: code."""
    if tells:
        print(f"error on {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
    return code


def describe_run(config: Config, ranks: int) -> str:
    """The resolved settings, the rendered ds_config and the batch algebra."""
    ds_config = json.dumps(render_ds_config(config, ranks), indent=2)
    return f"{config.to_yaml()}\nds_config.json:\n{ds_config}\n\n{config.describe(ranks)}"
