"""The trainer's command line and its dry run. Light: a dry run imports no open_clip."""

from __future__ import annotations

import argparse
import base64
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from disco_ds.config import Config, render_ds_config

PACKED = "--packed="
MAX_PACKED = 2**16
"""Characters; Linux allows 2**17 in one argument, and ssh gets the whole command of a host as one."""


def recipe_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser of the arguments that every command that trains takes."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", required=True, metavar="NAME|FILE", help="a recipe: a bundled name or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. optim.lr=1e-3 deepspeed=zero3")
    resume = "go on from a run folder's last complete checkpoint, or from RUN/checkpoints/step-N"
    parser.add_argument("--resume", metavar="latest|FOLDER", help=resume)
    return parser


def make_parser() -> argparse.ArgumentParser:
    parser = recipe_parser("disco_ds.train", "Train a CLIP model from a recipe.")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved run and stop; needs no ranks or data"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=int, metavar="N", help="with --dry-run: for N ranks")
    where.add_argument("--hostfile", type=Path, metavar="F", help="with --dry-run: for the slots of a hostfile")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    parser.add_argument("--launch-word", help=argparse.SUPPRESS)  # launch.py finds its ranks and folder by it
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = make_parser()
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


def fail(error: Exception, tells: bool, code: int) -> int:
    """Say why this process ends, where it is the one that tells. Returns: code."""
    if tells:
        print(f"error on {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
    return code


def describe_run(config: Config, ranks: int) -> str:
    """The resolved settings, the rendered ds_config and the batch algebra."""
    ds_config = json.dumps(render_ds_config(config, ranks), indent=2)
    return f"{config.to_yaml()}\nds_config.json:\n{ds_config}\n\n{config.describe(ranks)}"
