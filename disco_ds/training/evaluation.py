"""Evaluate a run's model on all evaluation sets, and write the results to the log, metrics, report and W&B."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disco_ds.data import ImageSpec
from disco_ds.distributed import comm
from disco_ds.distributed.heartbeat import Heartbeat
from disco_ds.eval import ImageSet, Result, describe, evaluate_sets, record
from disco_ds.metrics.logger import MetricsLogger
from disco_ds.metrics.report import log_errors, save_examples
from disco_ds.metrics.tracking import WandbRun
from disco_ds.runs.run_log import say
from disco_ds.training.ema import averaged, has_average
from disco_ds.training.engine import Engine


@dataclass
class Evaluation:
    """Evaluates the model on all evaluation sets of the run."""

    sets: list[ImageSet]
    engine: Engine
    image: ImageSpec
    tokenizer: Any
    batch_size: int
    """Images or texts per rank and forward pass."""
    num_samples: int
    """Size of the training set, from which the epoch in the log is computed."""
    folder: Path
    metrics: MetricsLogger
    heartbeat: Heartbeat
    wandb: WandbRun | None

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluate the model after this step and log the results. Collective; training is not affected.

        With optim.ema, the average of the weights is evaluated too. Its results have names that end in _ema.

        Returns:
            The values that were written to metrics.jsonl, keyed by name.
        """
        self.heartbeat.mark(step, "evaluating")
        start = time.monotonic()
        arguments = self.engine, self.sets, self.image, self.tokenizer, self.batch_size
        results = evaluate_sets(*arguments)
        if self.sets and has_average(self.engine):
            with averaged(self.engine):
                for result in evaluate_sets(*arguments):
                    results.append(replace(result, name=f"{result.name}_ema"))
        values = record(results)
        self.metrics.note(step, values)
        self.metrics.skip(time.monotonic() - start)
        if comm.rank() == 0 and results:
            self._publish(step, results)
        return values

    def _publish(self, step: int, results: list[Result]) -> None:
        samples = self.metrics.schedule.samples(step)
        epoch = f", epoch {samples / self.num_samples:.2f}" if self.num_samples else ""
        say(f"step {step:,}{epoch}:\n{describe(results)}")
        classified = [result for result in results if result.examples]
        if classified:
            with log_errors("images for report.png were not saved"):
                save_examples(self.folder, classified[0].name, classified[0].examples)
            if self.wandb:
                examples = [example for result in classified for example in result.examples]
                self.wandb.write_examples(samples, examples)
