"""A run in Weights & Biases: its settings, points, tables and images, and whether it has failed.

It stands in the place of DeepSpeed's own W&B monitor, which knows neither the settings nor the id of a run, and whose
points W&B drops where a resumed run repeats steps. Rank 0 alone talks to W&B. What goes wrong after the start costs
points, never the run. The package is imported where a run asks for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disco_ds.config import Config
from disco_ds.config.text_file import write_text
from disco_ds.distributed import comm
from disco_ds.metrics.run_folder import FINISHED

if TYPE_CHECKING:
    from numpy.typing import NDArray

WANDB_ID = "wandb_id.txt"
"""File of a run folder: the id of its run in W&B, which a resume goes on with."""
START_S, UPLOAD_S = 60.0, 120.0
"""Longest waits for W&B's server, at the start and at the end of a run; the other ranks wait as well."""

logger = logging.getLogger(__name__)


def check_packages(config: Config) -> None:
    """Raises: ValueError where the settings ask for W&B or Comet, and its package is not installed."""
    asked = {"log.wandb": ("wandb", config.log.wandb.project is not None)}
    asked["deepspeed.comet"] = "comet_ml", config.deepspeed.get("comet", {}).get("enabled", False)
    for setting, (package, wanted) in asked.items():
        # A folder wandb/, which W&B makes in the working directory, is found too, as a package without a file.
        if wanted and not ((spec := find_spec(package)) and spec.origin):
            raise ValueError(
                f"{setting} needs the package {package}, which is not installed: pip install {package}, or leave "
                f"{setting} out"
            )


def open_wandb(config: Config, folder: Path, stack: ExitStack) -> WandbRun | None:
    """Begin or go on with the run in W&B that log.wandb asks for, on rank 0. Collective.

    Args:   stack: ends it, as failed where the run folder has no finished.json.
    Raises: ValueError on every rank alike where W&B has no API key or refuses the settings.
    """
    run = None
    with comm.all_or_none("log.wandb"):
        if config.log.wandb.project is not None and comm.rank() == 0:
            run = WandbRun(config, folder)
            stack.callback(run.close)
    return run


class WandbRun:
    """A run in W&B, with the interface of DeepSpeed's monitors.

    Its axis is a metric of its own, `samples`: W&B's step only grows, so that it would drop what a resume repeats.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        os.environ.setdefault("WANDB_INIT_TIMEOUT", f"{min(START_S, config.timeout_s / 4):g}")
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{min(UPLOAD_S, config.timeout_s / 4):g}")
        asked, kept = config.log.wandb, folder / WANDB_ID
        given: dict[str, Any] = {
            **asked.model_dump(),
            "name": asked.name or folder.name,
            "id": kept.read_text(encoding="utf-8") if kept.exists() else None,
            "resume": "allow",
            "dir": str(folder),
            "config": config.model_dump(mode="json") | {"ranks": comm.size()},
            "allow_val_change": True,  # a resume may change settings
        }
        try:
            run = wandb.init(**given, mode=None)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ValueError(f"{str(error).rstrip('.')}; or set WANDB_MODE=offline") from None
        except wandb.errors.CommError as error:
            logger.warning("W&B does not take this run, which is logged offline instead (docs/logging.md): %s", error)
            wandb.teardown()  # else the id counts as in use
            run = wandb.init(**given, mode="offline")
        write_text(kept, run.id)
        run.define_metric("samples")
        run.define_metric("*", step_metric="samples")
        self.folder = folder
        self.run: Any = run

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Log the points of a record: (name, value, samples), as DeepSpeed's monitors take them."""
        if events:
            self._log(events[0][2], lambda: {name: value for name, value, _ in events})

    def write_results(
        self,
        samples: int,
        tables: Mapping[str, Sequence[Mapping[str, Any]]],
        examples: Iterable[tuple[NDArray[Any], str, Sequence[str]]],
    ) -> None:
        """Log an evaluation: a table for each kind, and images [H, W, 3] with their label and the nearest ones."""
        from wandb import Image, Table

        def make() -> dict[str, Any]:
            made = {
                f"eval/{kind}": Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
                for kind, rows in tables.items()
            }
            # Not in a table: W&B keeps its images outside of the run folder until they are sent.
            shown = [Image(image, caption=f"{label}; nearest: {', '.join(best)}") for image, label, best in examples]
            return made | ({"eval/examples": shown} if shown else {})

        self._log(samples, make)

    def write_report(self, samples: int, path: Path) -> None:
        """Log the picture of a run."""
        from wandb import Image

        self._log(samples, lambda: {"report": Image(str(path))})

    def close(self) -> None:
        """End the run in W&B, once what is on its way has arrived or UPLOAD_S have passed."""
        self._guard(lambda: self.run.finish(exit_code=0 if (self.folder / FINISHED).exists() else 1))

    def _log(self, samples: int, make: Callable[[], dict[str, Any]]) -> None:
        self._guard(lambda: self.run.log({"samples": samples, **make()}))

    def _guard(self, work: Callable[[], object]) -> None:
        """Give up W&B, not the run, whatever its process or a full disk raises."""
        if self.run is None:
            return
        try:
            work()
        except Exception as error:
            logger.warning("W&B gets nothing more until the run is resumed: %s: %s", type(error).__name__, error)
            self.run = None
