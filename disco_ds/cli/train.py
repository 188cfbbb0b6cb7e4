"""`disco-ds train`: train a recipe. Under a launcher, every rank runs this command."""

from __future__ import annotations

import os

from disco_ds.cli.options import Train
from disco_ds.config import load_config
from disco_ds.distributed.launcher import die_with_launcher
from disco_ds.runs.messages import fail_rank, say, set_up_logging


def run(args: Train) -> int:
    """Run the command.

    Returns:
        Exit code 0: finished, or --resume auto found a finished run. 1: failed. 2: invalid
        settings or data, found before any work. 3: stopped by a signal, after saving.
    """
    is_rank_0 = set_up_logging()
    # Otherwise this rank would keep training after its launcher has died.
    die_with_launcher()
    problem: ValueError | None = None
    try:
        config = load_config(args.config, args.overrides)
        if is_rank_0:
            say(f"{config.name}: loading the libraries, the data and the model")
    except ValueError as error:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return fail_rank(error, 2)
        problem = error
    # Imported here, because these imports take several seconds.
    import torch

    from disco_ds.distributed.comm import AgreedError, RendezvousError
    from disco_ds.run import refuse_recipe, train_session

    try:
        if problem is not None:
            refuse_recipe(problem)
        train_session(config, args.resume, args.allow_change, args.launch_id, is_command=True)
    except RendezvousError as error:
        return fail_rank(error, 1)
    except torch.OutOfMemoryError:
        return 1  # already reported
    except AgreedError as error:
        if problem is not None:
            fail_rank(error, error.exit_code, speaks=is_rank_0)
        return error.exit_code  # already reported
    return 0
