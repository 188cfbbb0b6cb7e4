"""`disco-ds train --dry-run`: the settings that a run would have. Light: no open_clip is imported."""

from __future__ import annotations

import argparse
import json

from disco_ds.cli.messages import fail
from disco_ds.config import Config, load_config, render_ds_config
from disco_ds.distributed.hostfile import count_ranks


def run(args: argparse.Namespace) -> int:
    """Exit code 0: printed; 2: a mistake in the settings."""
    try:
        print(describe_run(load_config(args.config, args.overrides), count_ranks(args.ranks, args.hostfile)))
    except ValueError as error:
        return fail(error, code=2)
    return 0


def describe_run(config: Config, ranks: int) -> str:
    """The resolved settings, the rendered ds_config and how the batch is made up."""
    ds_config = json.dumps(render_ds_config(config, ranks), indent=2)
    return f"{config.to_yaml()}\nds_config.json:\n{ds_config}\n\n{config.describe(ranks)}"
