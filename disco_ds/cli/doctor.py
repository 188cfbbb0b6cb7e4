"""`disco-ds doctor`: print the result of each check; alone, or on every rank of a launcher."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator

from disco_ds.checks import Line, examine
from disco_ds.checks.versions import check_versions
from disco_ds.config import Config, load_config
from disco_ds.launch.hostfile import read_hostfile
from disco_ds.launch.watchdog import die_with_launcher


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: no check failed, though there may be warnings. 1: a check failed.
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
        first: Whether this is the first rank, which alone makes the checks that need no other.
        size: Number of ranks that a launcher has started.

    Yields:
        The lines to print.
    """
    if first:
        yield from examine("versions", check_versions, Exception)
    try:
        config = load_config(args.config, args.overrides)
        slots = read_hostfile(args.hostfile) if args.hostfile else {"this host": 0}
    except ValueError as error:
        yield Line("fail", "recipe", str(error))
        return
    ranks = size if size > 1 else sum(slots.values()) or args.ranks or config.ranks or 1
    if first:
        yield from check_here(config, slots, ranks)
    if size > 1 or args.gradients:
        from disco_ds.checks.ranks import check_ranks

        yield from check_ranks(config, ranks, first, args.gradients)


def check_here(config: Config, slots: dict[str, int], ranks: int) -> Iterator[Line]:
    """Run the checks of settings, data and hosts, which need only one rank.

    Args:
        config: The recipe.
        slots: Slots by host; 0 if unknown.
        ranks: Number of ranks of the run.

    Yields:
        The lines to print.
    """
    # Not at the top: if these imports fail, the lines about the packages must still be printed.
    try:
        from disco_ds.checks import recipe_checks as checks
        from disco_ds.checks.hosts import check_hosts
    except (ImportError, RuntimeError):  # the installation is broken; a line above explains it
        return

    def check(name: str, function: Callable[..., Iterable[Line]], *more: object) -> list[Line]:
        return examine(name, lambda: function(config, *more), Exception)

    yield from check("ds_config", checks.check_ds_config)
    yield from check("batch", checks.check_batch, ranks)
    yield from check("log", checks.check_trackers)
    loss = check("loss", checks.check_loss)
    model = check("model", checks.check_towers)
    yield from [*loss, *model]
    # 0: unknown.
    ranks_here = max(slots.values()) or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    yield from check("data", checks.check_data, ranks, ranks_here)
    yield from check("eval", checks.check_eval)
    # With an unknown loss or model, these would only fail again under another name.
    if all(line.status != "fail" for line in loss):
        yield from check("kernels", checks.check_kernels)
    if all(line.status != "fail" for line in model):
        yield from check("hosts", check_hosts, slots)
