"""`disco-ds doctor`, alone or on every rank of a launcher: `deepspeed --module disco_ds.doctor ... --gradients`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from disco_ds.config import load_config
from disco_ds.distributed.hostfile import read_hostfile
from disco_ds.distributed.watchdog import die_with_launcher
from disco_ds.doctor import Line, examine
from disco_ds.doctor.versions import check_versions


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="disco-ds doctor", description="Look at a run before it is started.")
    parser.add_argument("--config", required=True, metavar="NAME|FILE", help="a recipe: a bundled name or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train")
    parser.add_argument("--hostfile", type=Path, metavar="F", help="look at its hosts too, over ssh if it has several")
    parser.add_argument("--ranks", type=int, metavar="N", help="that the run will have (default: as the recipe says)")
    parser.add_argument("--gradients", action="store_true", help="try a step of these ranks against one process")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: all is well, or might be better; 1: something fails."""
    args = make_parser().parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    die_with_launcher()
    first, failed = os.environ.get("RANK", "0") == "0", False
    for line in look(args, first, int(os.environ.get("WORLD_SIZE", "1"))):
        failed |= line.status == "fail"
        if first:
            print(line, flush=True)
    return int(failed)


def look(args: argparse.Namespace, first: bool, size: int) -> Iterator[Line]:
    """The table, by the first rank up to where the others are needed."""
    if first:
        yield from examine("versions", check_versions, Exception)
    try:
        config = load_config(args.config, args.overrides)
        slots = read_hostfile(args.hostfile) if args.hostfile else {"this host": 0}
        asked = sum(slots.values()) if args.hostfile else args.ranks or config.ranks or 1
        ranks = size if size > 1 else asked
    except ValueError as error:
        yield Line("fail", "recipe", str(error))
        return
    if first:
        try:
            from disco_ds.doctor.here import check_batch, check_data, check_ds_config, check_kernels
            from disco_ds.doctor.hosts import check_hosts
        except (ImportError, RuntimeError):  # a line above says why
            return
        yield from examine("ds_config", lambda: check_ds_config(config), Exception)
        yield from examine("batch", lambda: check_batch(config, ranks), Exception)
        yield from examine("kernels", lambda: check_kernels(config), Exception)
        yield from examine("data", lambda: check_data(config, ranks), Exception)
        yield from examine("hosts", lambda: check_hosts(config, slots), Exception)
    if size > 1 or args.gradients:
        from disco_ds.doctor.ranks import look_at_ranks

        yield from look_at_ranks(config, ranks, first, args.gradients)


if __name__ == "__main__":
    sys.exit(main())
