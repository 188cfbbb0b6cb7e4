"""`disco-ds doctor`: print the result of each check. Runs alone or on every rank of a launcher."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from disco_ds.config import load_config
from disco_ds.distributed.launcher import die_with_launcher
from disco_ds.doctor import Line, examine
from disco_ds.doctor.versions import check_versions


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
    # Not imported at the top, so that a package that cannot be imported is reported like other findings.
    try:
        from disco_ds.doctor.hosts import check_host
        from disco_ds.doctor.ranks import check_ranks
        from disco_ds.doctor.recipe_checks import check_data, check_start
        from disco_ds.doctor.samples import check_samples
    except Exception as error:  # a broken installation may raise anything
        remedy = (
            "reinstall the package that cannot be imported; torch and torchvision must be of the same build "
            "(CPU or CUDA)"
        )
        yield Line("fail", "imports", f"{type(error).__name__}: {error}", remedy)
        return
    try:
        config = load_config(args.config, args.overrides)
    except ValueError as error:
        yield Line("fail", "recipe", str(error))
        return
    ranks = size if size > 1 else args.ranks or config.ranks or 1
    if first:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # 0: unknown
        found = set[str]()
        for lines in (
            examine("recipe", lambda: check_start(config, ranks)),
            examine("data", lambda: check_data(config, ranks, ranks_here)),
            examine("samples", lambda: check_samples(config, args.picture)),
        ):
            # Several checks may find the same mistake, for example an unknown model.
            yield from (line for line in lines if line.found not in found)
            found.update(line.found for line in lines)
        yield from examine("runs folder", lambda: check_host(config.runs))
    if size > 1 or args.gradients:
        yield from check_ranks(config, ranks, first, args.gradients)
