"""`disco-ds train --dry-run`: print the settings of a run, or the reason why the run would be refused.

It reads no data.
"""

from __future__ import annotations

import argparse
import json

from disco_ds.config import Config, find_late, load_config, make_schedule, render_ds_config
from disco_ds.runs.messages import show


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: the settings were printed.

    Raises:
        ValueError: If a run with these settings would refuse to start.
    """
    config = load_config(args.config, args.overrides)
    ranks = args.ranks or config.ranks or 1
    if config.epochs is None and not args.resume:
        make_schedule(config)
    num_steps = config.num_steps if config.epochs is None else None
    for problem in find_late(config, num_steps, config.epochs):
        show(problem, "warning")
    text = describe_run(config, ranks)
    # Imported only now, because importing the model libraries takes seconds. Mistakes in the settings
    # are reported before that.
    from disco_ds.metrics.tracking import check_packages
    from disco_ds.training.build import check_without_data

    check_without_data(config)
    # The run may take place on another machine, which has the packages.
    try:
        check_packages(config)
    except ValueError as error:
        show(error, "warning")
    print(f"{text}\nData and hosts are not checked here; disco-ds doctor does that.")
    return 0


def describe_run(config: Config, ranks: int) -> str:
    """Return the resolved settings, the rendered ds_config, the batch and the length of the run as text."""
    ds_config = json.dumps(render_ds_config(config.stage_configs[0], ranks), indent=2)
    return f"{config.to_yaml()}\nds_config.json:\n{ds_config}\n\n{config.describe(ranks)}"
