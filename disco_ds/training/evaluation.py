"""Evaluate a run's model on all evaluation sets, and write the results to the log, metrics, report and W&B."""

from __future__ import annotations

import time
from dataclasses import replace

from disco_ds.distributed import comm
from disco_ds.eval import Result, describe, evaluate_sets, record
from disco_ds.metrics.report import log_errors, save_examples
from disco_ds.runs.run_log import say
from disco_ds.training.build import Run
from disco_ds.training.ema import averaged, has_average


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Evaluate the model after this step and log the results. Collective; training is not affected.

    With optim.ema, the average of the weights is evaluated too. Its results have names that end in _ema.

    Returns:
        The values that were written to metrics.jsonl, keyed by name.
    """
    run.heartbeat.mark(step, "evaluating")
    start = time.monotonic()
    arguments = run.engine, run.sets, run.image, run.tokenizer, run.config.micro_batch
    results = evaluate_sets(*arguments)
    if run.sets and has_average(run.engine):
        with averaged(run.engine):
            for result in evaluate_sets(*arguments):
                results.append(replace(result, name=f"{result.name}_ema"))
    values = record(results)
    run.metrics.note(step, values)
    run.metrics.skip(time.monotonic() - start)
    if comm.rank() == 0 and results:
        _publish(run, step, results)
    return values


def _publish(run: Run, step: int, results: list[Result]) -> None:
    samples, epoch_samples = run.schedule.samples(step), run.loader.epoch_samples
    epoch = f", epoch {samples / epoch_samples:.2f}" if epoch_samples else ""
    say(f"step {step:,}{epoch}:\n{describe(results)}")
    classified = [result for result in results if result.examples]
    if classified:
        with log_errors("images for report.png were not saved"):
            save_examples(run.folder, classified[0].name, classified[0].examples)
        if run.wandb:
            examples = [example for result in classified for example in result.examples]
            run.wandb.write_examples(samples, examples)
