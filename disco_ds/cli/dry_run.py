"""`disco-ds train --dry-run`: print the settings of a run, or why it would be refused, without
reading data."""

from __future__ import annotations

import argparse
import json

from disco_ds.cli.messages import fail
from disco_ds.config import Config, load_config, render_ds_config
from disco_ds.launch.hostfile import count_ranks


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: printed. 2: invalid settings.
    """
    try:
        config = load_config(args.config, args.overrides)
        given = args.ranks is not None or args.hostfile
        text = describe_run(
            config, count_ranks(args.ranks, args.hostfile) if given else config.ranks or 1
        )
        # Settings first, because their mistakes are found at once; the model libraries take seconds
        # to import.
        from disco_ds.training.build import check_without_data

        check_without_data(config)
    except ValueError as error:
        return fail(error, code=2)
    print(f"{text}\nData and hosts were not checked; disco-ds doctor does that.")
    return 0


def describe_run(config: Config, ranks: int) -> str:
    """Return the resolved settings, the rendered ds_config and the division of the batch as text."""
    ds_config = json.dumps(render_ds_config(config, ranks), indent=2)
    return f"{config.to_yaml()}\nds_config.json:\n{ds_config}\n\n{config.describe(ranks)}"
