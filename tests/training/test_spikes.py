"""Anomalies in runs: each is reported, batches with a spike are skipped, and healthy runs cause no warning."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_ds.checkpoints.keep import read_meta
from disco_ds.config import load_config
from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, LossOutput
from disco_ds.metrics.anomalies import MIN_HISTORY, SAMPLE, effective_rank, features_spread
from disco_ds.runs.run_folder import CHECKPOINTS
from disco_ds.training.build import Run
from disco_ds.training.loop import train
from helpers.dist import run_ranks
from helpers.faults import leave_out, nothing, start
from helpers.launched import CASES, FP32, SAME, equal_checkpoints, records
from helpers.machine import HAS_FP16
from helpers.tiny_run import recipe

LOSS, NORM = MIN_HISTORY + 2, MIN_HISTORY + 3
"""Number of the batch with a loss spike, and number of the batch with a spike of the gradient norm only."""
STEPS = MIN_HISTORY + 3


def with_spikes(run: Run, number: int) -> None:
    """Cause spikes, as a hook: multiply the loss by 10 on all ranks, and later the gradient by 1,000 on rank 1.

    1,000 is small enough that the gradient does not overflow in fp16.
    """
    factors = {LOSS: (10.0, 1.0), NORM: (1.0, 1000.0 if comm.rank() == 1 else 1.0)}
    loss, gradient = factors.get(number, (1.0, 1.0))

    def spoil(module: Any, arguments: tuple[Embeddings], out: LossOutput) -> LossOutput:
        hook.remove()
        arguments[0].image.register_hook(lambda value: value * gradient)
        return LossOutput(out.loss * loss, out.metrics | {"loss": out.metrics["loss"] * loss})

    hook = run.loss.register_forward_hook(spoil)


def run_once(
    path: Path, name: str, *overrides: str, at: Any = nothing, resume: str | None = None
) -> Path:
    """Train the tiny model, by default with warmup in all steps. Return the run folder. Collective."""
    own = [
        f"steps={STEPS}",
        f"checkpoint.every_steps={MIN_HISTORY}",
        "optim.lr=1e-4",
        f"optim.warmup_steps={STEPS}",
        "optim.ema.decay=0.9",
    ]
    kept = [
        line
        for line in own
        if not any(o.startswith(line.partition("=")[0] + "=") for o in overrides)
    ]
    config = load_config(path, [f"name={name}", "log.tensorboard=false", *kept, *overrides])
    with ExitStack() as stack:
        run = start(config, at, stack, resume)
        if name.endswith("without"):
            run.loader.start_step = leave_out(run, {LOSS, NORM})
        train(run)
        return run.folder


def skipped(path: Path, case: str, deepspeed: dict[str, Any]) -> None:
    """Check that a run that skips spikes ends bit-identical to a run without these batches."""
    comm.barrier()
    if comm.rank() == 0:
        recipe(path.parent, deepspeed=deepspeed)
    comm.barrier()
    spoilt = run_once(path, f"{case}-spoilt", "on_spike=skip", at=with_spikes)
    without = run_once(path, f"{case}-without", "on_spike=skip")
    comm.barrier()
    if comm.rank() == 0:
        equal_checkpoints(*(run / CHECKPOINTS / f"step-{STEPS:08d}" for run in (spoilt, without)))
        lines = [[line for line in records(run) if "loss" in line] for run in (spoilt, without)]
        assert [[line[key] for key in SAME] for line in lines[0]] == [
            [line[key] for key in SAME] for line in lines[1]
        ]
        assert [line["skipped_batches"] for line in lines[0]][MIN_HISTORY:] == [0, 2, 2]
        seen = [(line["step"], *line) for line in records(spoilt) if "loss" not in line]
        assert seen == [(LOSS, *POINT, f"anomaly/{name}_spike") for name in ("loss", "grad_norm")]
        assert not [line for line in records(without) if "loss" not in line]


POINT = ("step", "samples")


def resumed(path: Path, case: str) -> None:
    """Check that a run resumed just before the spikes detects them too, because checkpoints contain the history."""
    folder = path.parent / "runs" / f"{case}-spoilt"
    last = folder / CHECKPOINTS / f"step-{STEPS:08d}"
    if comm.rank() == 0:
        before = records(folder)
        shutil.move(last, folder / "whole")
    comm.barrier()

    def later(run: Run, number: int) -> None:
        with_spikes(run, MIN_HISTORY + number)

    run_once(path, f"{case}-spoilt", "on_spike=skip", at=later, resume=str(folder))
    comm.barrier()
    if comm.rank() == 0:
        equal_checkpoints(folder / "whole", last)
        assert read_meta(folder / "whole")["anomalies"] == read_meta(last)["anomalies"]
        keys = (*SAME, "anomaly/loss_spike", "anomaly/grad_norm_spike")
        after = records(folder)
        assert [[line.get(key) for key in keys] for line in after] == [
            [line.get(k) for k in keys] for line in before
        ]


def warned(path: Path) -> None:
    """Check that spikes are reported but not skipped with on_spike=warn, the default."""
    folder = run_once(path, "warned", at=with_spikes)
    if comm.rank() == 0:
        found = {
            name: line["step"]
            for line in records(folder)
            for name in line
            if name.startswith("anomaly/")
        }
        assert found == {"anomaly/loss_spike": LOSS, "anomaly/grad_norm_spike": NORM}
        assert read_meta(folder / CHECKPOINTS / f"step-{STEPS:08d}")["step"] == STEPS
        assert records(folder)[-1]["skipped_batches"] == 0


def same_sample() -> None:
    """Check that the first rows of the global batch are measured, at any number of ranks."""
    rows = torch.nn.functional.normalize(
        torch.randn(300, 16, generator=torch.Generator().manual_seed(0)), dim=1
    )
    own = rows[comm.rank() :: comm.size()]  # in the order of data/order/slots.py
    cosines = rows[:SAMPLE] @ rows[:SAMPLE].T
    pairs = cosines[~torch.eye(SAMPLE, dtype=torch.bool)]
    found = features_spread(own, own)
    assert found["image_cosine"].item() == pytest.approx(pairs.mean().item(), abs=1e-5)
    assert found["text_rank"].item() == pytest.approx(effective_rank(rows[:SAMPLE]).item())


def one_stage(path: Path) -> None:
    skipped(path, "zero1", CASES["zero1-fp32"])
    resumed(path, "zero1")
    same_sample()


def test_spikes_are_skipped_as_if_they_had_not_been(tmp_path: Path) -> None:
    run_ranks(one_stage, 2, recipe(tmp_path))


def every_stage(path: Path) -> None:
    warned(path)
    for level in range(4):
        skipped(path, f"fp32-{level}", {"base": f"zero{level}", **FP32})
        skipped(path, f"autocast-{level}", {"base": f"zero{level}"})
        if level:
            skipped(
                path, f"bf16-{level}", {"base": f"zero{level}", "bf16": {"enabled": True}, **FP32}
            )
    if HAS_FP16:
        fp16 = {"enabled": True, "initial_scale_power": 0}
        skipped(path, "fp16", {"base": "zero2", "fp16": fp16, **FP32})


@pytest.mark.slow
def test_spikes_are_skipped_at_every_stage_and_precision(tmp_path: Path) -> None:
    run_ranks(every_stage, 2, recipe(tmp_path))


# Runs that become unhealthy without injected faults


def signs(folder: Path) -> dict[str, int]:
    """Return the first step of each anomaly in metrics.jsonl."""
    found: dict[str, int] = {}
    for line in records(folder):
        found = {
            name.removeprefix("anomaly/"): line["step"] for name in line if "anomaly/" in name
        } | found
    return found


def quickstart(folder: Path, seed: int, *overrides: str, at: Any = nothing) -> dict[str, int]:
    own = [
        f"runs={folder}",
        f"name=seed-{seed}",
        f"seed={seed}",
        "log.tensorboard=false",
        "data.workers=0",
    ]
    config = load_config("quickstart", [*own, "checkpoint.every_steps=0", *overrides])
    with ExitStack() as stack:
        run = start(config, at, stack)
        train(run)
        return signs(run.folder)


def draws_together(module: Any, arguments: tuple[Embeddings], out: LossOutput) -> LossOutput:
    """Replace the contrastive loss by one without negatives, so that the features collapse."""
    image, text = arguments[0].image, arguments[0].text
    return LossOutput(-(image.mean(0) * text.mean(0)).sum(), out.metrics)


def collapse_after_a_healthy_start(folder: Path) -> None:
    def at(run: Run, number: int) -> None:
        if number == 60:
            run.loss.register_forward_hook(draws_together)

    found = quickstart(folder, 0, "samples=null", "steps=90", "log.every_steps=2", at=at)
    assert {"image_collapse", "text_collapse"} <= found.keys(), found
    assert min(found.values()) > 60, f"the healthy start must cause no warning: {found}"


@pytest.mark.slow
def test_quickstart_is_silent_until_its_features_collapse(tmp_path: Path) -> None:
    run_ranks(collapse_after_a_healthy_start, 1, tmp_path)


def rate_too_high(folder: Path) -> None:
    """Train with a learning rate that is 100 times too high from step 71 on. Check which anomalies are reported."""

    learning_rate = Run.learning_rate

    def rate(run: Run, step: int) -> float:
        return learning_rate(run, step) * (100 if step >= 70 else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "learning_rate", rate)
        found = quickstart(folder, 0, "samples=null", "steps=80", "log.every_steps=2")
    assert found.keys() == {"loss_spike", "grad_norm_spike", "image_collapse", "text_collapse"}, (
        found
    )
    assert found["loss_spike"] == found["grad_norm_spike"] == 72, found
    assert min(found.values()) == 72, found


@pytest.mark.slow
def test_learning_rate_that_is_far_too_high_is_seen(tmp_path: Path) -> None:
    run_ranks(rate_too_high, 1, tmp_path)


def whole_quickstart(folder: Path) -> None:
    assert quickstart(folder, seed=0) == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_quickstart_is_silent(tmp_path: Path) -> None:
    run_ranks(whole_quickstart, 1, tmp_path, timeout_s=3500)
