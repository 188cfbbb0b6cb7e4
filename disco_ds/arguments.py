"""The trainer's command line and its dry run. Light: a dry run imports no open_clip."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from disco_ds.config import Config, render_ds_config


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="disco_ds.train", description="Train a CLIP model from a recipe.")
    parser.add_argument("--config", required=True, metavar="NAME|FILE", help="a recipe: a bundled name or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. optim.lr=1e-3 deepspeed=zero3")
    parser.add_argument("--resume", metavar="latest|FOLDER", help="go on from a run folder's last complete checkpoint")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved run and stop; needs no ranks or data"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=int, metavar="N", help="with --dry-run: for N ranks")
    where.add_argument("--hostfile", type=Path, metavar="F", help="with --dry-run: for the slots of a hostfile")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    return parser.parse_intermixed_args(argv)


def count_ranks(ranks: int | None, hostfile: Path | None) -> int:
    """World size a dry run is for. Raises: ValueError for a hostfile that is missing or malformed."""
    if hostfile is None:
        return 1 if ranks is None else ranks
    if not hostfile.is_file():
        raise ValueError(f"no hostfile {hostfile}; deepspeed would run on this host alone")
    from deepspeed.launcher.runner import fetch_hostfile

    return sum(fetch_hostfile(str(hostfile)).values())


def describe_run(config: Config, ranks: int) -> str:
    """The resolved settings, the rendered ds_config and the batch algebra."""
    ds_config = json.dumps(render_ds_config(config, ranks), indent=2)
    return f"{config.to_yaml()}\nds_config.json:\n{ds_config}\n\n{config.describe(ranks)}"
