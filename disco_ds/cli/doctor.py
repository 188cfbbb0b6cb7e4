"""`disco-ds doctor`: print the result of each check. Runs alone or on every rank of a launcher."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from disco_ds.checks import Line, examine
from disco_ds.checks.versions import check_versions
from disco_ds.config import load_config
from disco_ds.launch.hostfile import read_hostfile
from disco_ds.launch.watchdog import die_with_launcher


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: no check failed (there may be warnings). 1: a check failed.
    """
    die_with_launcher()
    first = os.environ.get("RANK", "0") == "0"
    failed = False
    for line in check_all(args, first, int(os.environ.get("WORLD_SIZE", "1"))):
        failed |= line.status == "fail"
        if first:
            print(line, flush=True)
    return int(failed)


def check_all(args: argparse.Namespace, first: bool, size: int) -> Iterator[Line]:
    """Run all checks.

    Args:
        args: The command's arguments.
        first: Whether this is the first rank. The other ranks skip the checks that need only one rank.
        size: Number of ranks that a launcher has started.

    Yields:
        The lines to print.
    """
    if first:
        yield from examine("versions", check_versions)
    # Not imported at the top: if these imports fail, the lines about the packages must still be printed.
    try:
        from disco_ds.checks.hosts import check_hosts
        from disco_ds.checks.ranks import check_ranks
        from disco_ds.checks.recipe_checks import check_data, check_start
    except (ImportError, RuntimeError):
        if not first:
            raise
        return  # the installation is broken; a line above explains it
    try:
        config = load_config(args.config, args.overrides)
        slots = read_hostfile(args.hostfile) if args.hostfile else {"this host": 0}
    except ValueError as error:
        yield Line("fail", "recipe", str(error))
        return
    ranks = size if size > 1 else sum(slots.values()) or args.ranks or config.ranks or 1
    if first:
        yield from check_start(config, ranks)
        # 0 means that the number is unknown.
        ranks_here = max(slots.values()) or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        yield from examine("data", lambda: check_data(config, ranks, ranks_here))
        yield from examine("hosts", lambda: check_hosts(config.runs, slots))
    if size > 1 or args.gradients:
        yield from check_ranks(config, ranks, first, args.gradients)
