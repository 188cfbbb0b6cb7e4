"""Log a run to Weights & Biases: its settings, points and final state.

This module replaces DeepSpeed's W&B monitor, which knows neither the settings nor the id of a run. W&B also drops
the monitor's points when a resumed run repeats steps. Only rank 0 talks to W&B. An error may cost points, but it never
stops the run. The package wandb is imported only if a run asks for it.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from disco_ds.config import Config
from disco_ds.config.text_file import write_text
from disco_ds.distributed import comm
from disco_ds.metrics.report import log_errors

WANDB_ID = "wandb_id.txt"
"""File in the run folder with the id of the W&B run. A resumed run logs to the same W&B run."""
UPLOAD_S = "120"
"""Maximum wait for uploads at the end of a run, in seconds; the other ranks wait as well."""


class WandbRun:
    """A W&B run with the interface of DeepSpeed's monitors.

    Its x-axis is the metric `samples`, not W&B's built-in step. The built-in step can only grow, so W&B
    would drop the points that a resumed run repeats.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        os.environ.setdefault("WANDB_FINISH_TIMEOUT", UPLOAD_S)
        id_file = folder / WANDB_ID
        self.run = wandb.init(
            project=config.log.wandb.project,
            name=os.environ.get("WANDB_NAME", folder.name),
            id=id_file.read_text(encoding="utf-8") if id_file.exists() else None,
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json") | {"ranks": comm.size()},
            allow_val_change=True,  # a resumed run may have other settings
        )
        write_text(id_file, self.run.id)
        self.run.define_metric("samples")
        self.run.define_metric("*", step_metric="samples")

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Log points (name, value, samples), all with the same samples. DeepSpeed's monitors have the same method."""
        if events:
            self.run.log({name: value for name, value, _ in events} | {"samples": events[0][2]})

    def close(self, failure: type[BaseException] | None, *_: object) -> None:
        """End the W&B run, and wait up to UPLOAD_S for pending uploads. ExitStack calls this like `__exit__`."""
        with log_errors("W&B"):
            self.run.finish(exit_code=int(failure is not None))


def open_wandb(config: Config, folder: Path, stack: ExitStack) -> WandbRun | None:
    """Start or resume the W&B run that log.wandb asks for, on rank 0. Collective.

    Args:
        config: The recipe.
        folder: The run folder.
        stack: When it is closed, the W&B run ends. An exception that closes it marks the W&B run as failed.

    Raises:
        AgreedError: On every rank, if the package wandb is not installed.
    """
    run = None
    with comm.all_or_none("log.wandb"):
        if config.log.wandb.project is not None and comm.rank() == 0:
            import wandb  # noqa: F401 - a missing package is refused

            with log_errors("W&B gets no points until the run is resumed (see docs/logging.md)"):
                run = WandbRun(config, folder)
                stack.push(run.close)
    return run
