"""Log a run to Weights & Biases: settings, points, images and its final state.

This module replaces DeepSpeed's W&B monitor, which knows neither the settings nor the id of a run. W&B also drops
the monitor's points when a resumed run repeats steps. Only rank 0 talks to W&B. After the start,
an error may cost points, but it never stops the run. The package wandb is imported only if a run asks for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disco_ds.config import Config
from disco_ds.config.text_file import write_text
from disco_ds.distributed import comm
from disco_ds.metrics.report import log_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray

WANDB_ID = "wandb_id.txt"
"""File in the run folder with the id of the W&B run. A resumed run logs to the same W&B run."""
START_S = 60.0
"""Maximum wait for W&B's server at the start of a run; the other ranks wait as well."""
UPLOAD_S = 120.0
"""Maximum wait for uploads at the end of a run; the other ranks wait as well."""

logger = logging.getLogger(__name__)


def check_packages(config: Config) -> None:
    """Check that the packages of the requested trackers are installed.

    Raises:
        ValueError: If the settings ask for W&B or Comet and its package is missing.
    """
    for setting, package, is_used in (
        ("log.wandb", "wandb", config.log.wandb.project is not None),
        ("deepspeed.comet", "comet_ml", config.deepspeed.get("comet", {}).get("enabled", False)),
    ):
        # W&B creates a folder wandb/ in the working directory. Python finds this folder as a package, too, but
        # the package has no `origin`, because the folder contains no Python file.
        if is_used and not getattr(find_spec(package), "origin", None):
            raise ValueError(
                f"{setting} needs the package {package}, which is not installed: "
                f"pip install {package}, or remove {setting}"
            )


def open_wandb(config: Config, folder: Path, stack: ExitStack) -> WandbRun | None:
    """Start or resume the W&B run that log.wandb asks for, on rank 0. Collective.

    Args:
        config: The recipe.
        folder: The run folder.
        stack: When it is closed, the W&B run ends with the exit code WandbRun.exit_code.

    Raises:
        ValueError: On every rank, if W&B has no API key or rejects the settings.
    """
    run = None
    with comm.all_or_none("log.wandb"):
        if config.log.wandb.project is not None and comm.rank() == 0:
            run = WandbRun(config, folder)
            stack.callback(run.close)
    return run


class WandbRun:
    """A W&B run with the interface of DeepSpeed's monitors.

    Its x-axis is the metric `samples`, not W&B's built-in step. The built-in step can only grow, so W&B
    would drop the points that a resumed run repeats.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        for name, seconds in (("INIT", START_S), ("FINISH", UPLOAD_S)):
            limit = min(seconds, config.timeout_s / 4)
            os.environ.setdefault(f"WANDB_{name}_TIMEOUT", f"{limit:g}")
        id_file = folder / WANDB_ID
        given: dict[str, Any] = {
            "project": config.log.wandb.project,
            "name": os.environ.get("WANDB_NAME", folder.name),
            "id": id_file.read_text(encoding="utf-8") if id_file.exists() else None,
            "resume": "allow",
            "dir": str(folder),
            "config": config.model_dump(mode="json") | {"ranks": comm.size()},
            "allow_val_change": True,  # a resumed run may have other settings
        }
        try:
            run = wandb.init(**given, mode=None)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ValueError(f"{str(error).rstrip('.')}; or set WANDB_MODE=offline") from None
        except wandb.errors.CommError as error:
            logger.warning(
                "W&B cannot be reached or rejects this run, so it is logged offline "
                "(see docs/logging.md): %s",
                error,
            )
            # Otherwise W&B would consider the id in use.
            wandb.teardown()
            run = wandb.init(**given, mode="offline")
        write_text(id_file, run.id)
        run.define_metric("samples")
        run.define_metric("*", step_metric="samples")
        self.exit_code = 1
        """Exit code that `close` reports to W&B; 1 means failed. The caller sets it to 0 at the end of a stage."""
        self.run: Any = run

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Log points (name, value, samples). DeepSpeed's monitors have the same method."""
        if events:
            values = {name: value for name, value, _ in events}
            self.run.log({"samples": events[0][2], **values})

    def write_examples(
        self, samples: int, examples: Iterable[tuple[NDArray[Any], str, Sequence[str]]]
    ) -> None:
        """Log evaluated images.

        Args:
            samples: Number of samples seen in training.
            examples: (image [H, W, 3], label, nearest labels).
        """
        from wandb import Image

        with log_errors("W&B"):
            # Not in a table: W&B keeps the images of tables outside of the run folder until upload.
            images = [
                Image(image, caption=f"{label}; nearest: {', '.join(best)}")
                for image, label, best in examples
            ]
            self.run.log({"samples": samples, "eval/examples": images})

    def write_report(self, samples: int, path: Path) -> None:
        """Log report.png."""
        from wandb import Image

        with log_errors("W&B"):
            self.run.log({"samples": samples, "report": Image(str(path))})

    def close(self) -> None:
        """End the W&B run. Wait up to UPLOAD_S for pending uploads."""
        with log_errors("W&B"):
            self.run.finish(exit_code=self.exit_code)
