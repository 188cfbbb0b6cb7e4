"""`disco-ds doctor`, alone or on every rank of a launcher: `deepspeed --module disco_ds.doctor ... --gradients`."""

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
    """Exit code 0: nothing fails, though there may be warnings; 1: something fails."""
    die_with_launcher()
    first, failed = os.environ.get("RANK", "0") == "0", False
    for line in look(args, first, int(os.environ.get("WORLD_SIZE", "1"))):
        failed |= line.status == "fail"
        if first:
            print(line, flush=True)
    return int(failed)


def look(args: argparse.Namespace, first: bool, size: int) -> Iterator[Line]:
    """The lines of all checks; the first rank makes those alone that do not need the others."""
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
        # Not at the top: where these imports fail, the lines about the packages must be printed still.
        try:
            from disco_ds.checks import recipe_checks as here
            from disco_ds.checks.hosts import check_hosts
        except (ImportError, RuntimeError):  # of a broken installation, which a line above explains
            return
        yield from examine("ds_config", lambda: here.check_ds_config(config), Exception)
        start = list(here.check_start(config, ranks))
        yield from start
        failed = {line.check for line in start if line.status == "fail"}
        # 0: not known.
        ranks_here = max(slots.values()) or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        yield from examine("data", lambda: here.check_data(config, ranks, ranks_here), Exception)
        # What has failed above would only fail again under another name.
        if "loss" not in failed:
            yield from examine("kernels", lambda: here.check_kernels(config), Exception)
        if "model" not in failed:
            yield from examine("hosts", lambda: check_hosts(config, slots), Exception)
    if size > 1 or args.gradients:
        from disco_ds.checks.ranks import check_ranks

        yield from check_ranks(config, ranks, first, args.gradients)
