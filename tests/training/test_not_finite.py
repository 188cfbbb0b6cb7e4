"""If a loss or gradient is not finite, all ranks skip the batch. If this happens too often, the run stops."""

import json
import os
import re
import signal
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disco_ds.checkpoints.keep import list_complete, step_of
from disco_ds.config import load_config
from disco_ds.config.schedule import Schedule
from disco_ds.data import StepData
from disco_ds.distributed import comm
from disco_ds.distributed.launcher import Interrupts
from disco_ds.losses import Embeddings, LossOutput
from disco_ds.metrics.anomalies import AnomalyDetector
from disco_ds.run import run_training
from disco_ds.runs.run_folder import CHECKPOINTS
from disco_ds.training.build import Run, build
from disco_ds.training.loop import find_overflows, train
from disco_ds.training.step import Skipped, StepOutput, Stopped, agree, run_step
from helpers.dist import run_ranks
from helpers.faults import BOTH, NAN, failure, leave_out, nothing, poisoned, start
from helpers.launched import (
    CASES,
    equal_checkpoints,
    records,
)
from helpers.machine import HAS_FP16, needs_fp16
from helpers.tiny_run import expect, recipe
from helpers.towers import BPE_SIZE, write_tiny


def passed_over(
    path: Path,
    name: str,
    deepspeed: dict[str, Any],
    kinds: dict[int, str],
    pixels: str = "device",
    **changes: Any,
) -> dict[str, Path]:
    """Check that a run that skips batches ends bit-identical to a run without these batches. Collective.

    Args:
        path: The recipe, which is overwritten.
        name: Start of the names of both runs.
        deepspeed: Settings for DeepSpeed.
        kinds: Number of a batch -> what is not finite, "loss" or "gradient".
        pixels: image_staging of the run that skips batches.
        changes: Other settings of both runs.

    Returns:
        The folders of the runs "spoilt" and "without".
    """
    settings = {
        "deepspeed": deepspeed,
        "checkpoint": {"every_steps": 0},
        "optim": {"lr": 1e-3, "warmup_steps": 2, "ema": {"decay": 0.9}},
    }
    rewrite(path, **settings | changes)
    runs = {}
    for kind in ("spoilt", "without"):
        where = pixels if kind == "spoilt" else "device"
        own = [
            f"name={name}-{kind}",
            f"skip_nonfinite={len(kinds)}",
            f"image_staging={where}",
            "log.tensorboard=false",
        ]
        config = load_config(path, own)
        with ExitStack() as stack:
            run = start(config, poisoned(kinds) if kind == "spoilt" else nothing, stack)
            if kind == "without":
                run.loader.start_step = leave_out(run, set(kinds))
            train(run)
        runs[kind] = run.folder
    comm.barrier()
    if comm.rank() == 0:
        pair = [records(folder) for folder in runs.values()]
        keys = ("step", "samples", "ids", "loss", "lr", "scale", "grad_norm")
        assert [[record[key] for key in keys] for record in pair[0]] == [
            [r[key] for key in keys] for r in pair[1]
        ]
        assert [record["skipped_batches"] for record in pair[0]] == [0, 0, len(kinds), len(kinds)]
        equal_checkpoints(*(folder / CHECKPOINTS / "step-00000004" for folder in runs.values()))
    return runs


def rewrite(path: Path, **changes: Any) -> None:
    """Write a recipe with these settings. Collective, because all ranks read it."""
    comm.barrier()
    if comm.rank() == 0:
        recipe(path.parent, **changes)
    comm.barrier()


def too_many(path: Path) -> None:
    for limit, said in ((0, "not finite on rank 1"), (1, "the gradient is not finite")):
        config = load_config(path, [f"name=too-many-{limit}", f"skip_nonfinite={limit}"])
        expect(
            failure(config, poisoned(BOTH)),
            "step 2: ",
            said,
            "nothing was updated; a checkpoint was saved after step 2;",
        )


def asked(path: Path) -> None:
    """Check that a request to stop that arrives during a skipped batch stops the run after that batch."""
    seen = []

    def signal_at_a_skipped_batch(run: Run, number: int) -> None:
        seen.append(number)
        poisoned({3: "loss", 4: "gradient", 5: "loss"})(run, number)
        if number == 4 and comm.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    own = ["checkpoint.every_steps=0", "skip_nonfinite=9"]
    config = load_config(path, [*own, "name=asked"])
    said = failure(config, signal_at_a_skipped_batch, comm.AskedToStopError)
    expect(said, "a checkpoint was saved after step 2; --resume latest")
    assert seen == [1, 2, 3, 4]
    assert list_complete(path.parent / "runs" / "asked")[-1].name == "step-00000002"
    config = load_config(path, [*own, "name=none"])
    said = failure(config, signal_before_any_step, comm.AskedToStopError)
    expect(said, "asked to stop: no step was completed")


def signal_before_any_step(run: Run, number: int) -> None:
    poisoned({1: "loss"})(run, number)
    if comm.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def features(path: Path) -> None:
    """Check that the message names the one rank whose features are not finite, although all ranks' losses are NaN."""
    told = "step 0: the loss is not finite, because the features of rank 1 are not; nothing was updated"
    with ExitStack() as stack:
        run = build(load_config(path, ["name=features"]), None, stack)
        if comm.rank() == 1:
            run.engine.module.visual.register_forward_hook(
                lambda module, arguments, out: out * float("nan")
            )
        with pytest.raises(comm.AgreedError, match=told):
            train(run)


def out_of_step() -> None:
    step = 5 + comm.rank()
    data = StepData()
    one, out = torch.ones(1, 1), LossOutput(torch.ones(()), {"loss": torch.ones(())})
    outcome = agree(run_to_agree(), step, data, Embeddings(one, one, torch.ones(1)), out)
    assert isinstance(outcome, Stopped)
    assert re.search(r"rank 0 on .*: step 5; rank 1 on .*: step 6", outcome.problem)


def run_to_agree() -> Any:
    """Return an object with the parts of a run that `agree` needs."""
    trouble = AnomalyDetector(lambda step, values: None, skip=False, warmup_steps=0)
    saver = SimpleNamespace(job=Future())
    return SimpleNamespace(anomalies=trouble, interrupts=Interrupts(), saver=saver)


def test_captions_with_equal_features_stop_the_run_before_the_first_update() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 100, (256, 4), generator=generator)
    rows = torch.nn.functional.normalize(torch.randn(256, 8, generator=generator), dim=1)
    out = LossOutput(torch.ones(()), {"loss": torch.ones(())})

    def first_step(text: torch.Tensor, features: torch.Tensor) -> Any:
        embeddings = Embeddings(rows, features, torch.ones(1))
        return agree(run_to_agree(), 0, StepData(text=list(text.split(128))), embeddings, out)

    few, some = rows.clone(), rows.clone()
    few[1:3], some[1:5] = few[0], some[0]
    assert first_step(tokens, rows) is None
    assert first_step(tokens, few) is None
    assert first_step(tokens[:1].expand_as(tokens), rows[:1].expand_as(rows)) is None
    all_equal = first_step(tokens, rows[:1].expand_as(rows))
    assert re.match("100% of the captions .*text_cfg.pool_type.*vocab_size", all_equal.problem)
    assert first_step(tokens, some).problem.startswith("2% of the captions")


def test_data_error_in_the_first_step_is_reported_although_placeholders_have_no_text() -> None:
    rows = torch.nn.functional.normalize(torch.randn(8, 4), dim=1)
    out = LossOutput(torch.ones(()), {"loss": torch.ones(())})
    data = StepData(error="the disk is gone", text=[torch.ones(4, 3, dtype=torch.int64)])
    outcome = agree(run_to_agree(), 0, data, Embeddings(rows, rows, torch.ones(1)), out)
    problem = "step 0: reading the data failed on rank 0: the disk is gone"
    assert outcome == Stopped(problem, is_sound=True)


@pytest.mark.parametrize("side", [0, 1])
def test_features_that_are_not_finite_stop_the_step_even_if_the_loss_is(side: int) -> None:
    features = [torch.ones(2, 4), torch.ones(2, 4)]
    features[side][1, 2] = torch.nan
    out = LossOutput(torch.ones(()), {"loss": torch.ones(())})
    outcome = agree(run_to_agree(), 7, StepData(), Embeddings(*features, torch.ones(1)), out)
    assert isinstance(outcome, Skipped)
    assert re.match("step 7: .* because the features of rank 0", outcome.problem or "")


def test_a_model_that_pools_the_first_token_is_stopped(tmp_path: Path) -> None:
    """In a causal tower, the first token does not see the others, so all texts would have the same features."""
    tree = json.loads(Path(write_tiny(tmp_path, BPE_SIZE)).read_text())
    tree["text_cfg"]["pool_type"] = "first"
    path = tmp_path / "first.json"
    path.write_text(json.dumps(tree))
    config = load_config(recipe(tmp_path), [f"model={{name: {path}}}", "log.tensorboard=false"])
    with pytest.raises(comm.AgreedError, match=r"^100% of the captions have the same text"):
        run_training(config)


def overflow_at_the_bottom(path: Path) -> None:
    """Check that a batch with a non-finite gradient is skipped, and the scale is kept, if the scale cannot decrease."""
    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1, "loss_scale_window": 2}
    passed_over(
        path,
        "bottom",
        {"base": "zero2", "torch_autocast": {"enabled": False}, "fp16": fp16},
        {3: "gradient"},
    )


NO_AUTOCAST = {"torch_autocast": {"enabled": False}}


def non_finite_of_one_stage(path: Path) -> None:
    passed_over(path, "one", CASES["zero1-fp32"], BOTH, pixels="host")
    features(path)
    too_many(path)
    out_of_step()
    asked(path)


def non_finite_everywhere(path: Path) -> None:
    for level in range(4):
        clip = {"optim": {"lr": 1e-3, "warmup_steps": 0, "clip_norm": 0.1}}
        rewrite(path, **clip)
        passed_over(path, f"fp32-{level}", {"base": f"zero{level}", **NO_AUTOCAST}, BOTH)
        passed_over(path, f"autocast-{level}", {"base": f"zero{level}"}, BOTH)
        if level:
            passed_over(
                path,
                f"bf16-{level}",
                {"base": f"zero{level}", "bf16": {"enabled": True}, **NO_AUTOCAST},
                BOTH,
            )
    if HAS_FP16:
        passed_over(path, "fp16", CASES["zero2-fp16"], {NAN: "loss"})
        overflow_at_the_bottom(path)


@pytest.mark.parametrize(
    ("scales", "step", "fails"),
    [
        ([2.0**-n for n in range(-15, 1)], 99, False),
        ([2.0**-n for n in range(-15, 2)], 99, True),
        ([2.0**24] * 25, 99, False),
        ([2.0**24] * 26, 99, True),
        ([0.5, 0.25], 99, True),
        ([2.0**16] * 2, 100, False),
        ([2.0**16] * 10, 100, True),
    ],
)
def test_run_that_fp16_cannot_train_stops(scales: list[float], step: int, fails: bool) -> None:
    """The run is resumed after step 90. `scales` are the loss scales of its last steps, which overflowed."""
    schedule = Schedule(8, last_step=100, num_steps=200, num_samples=1600, warmup_batch=8)
    problem = find_overflows(scales, step, replace(schedule, first_step=90))
    assert (f"the last {len(scales)} steps in a row" in problem) if fails else problem is None


def overflow_in_every_step(path: Path) -> None:
    with ExitStack() as stack:
        run = start(load_config(path, ["name=overflow"]), nothing, stack)
        with pytest.raises(comm.AgreedError, match="overflowed in fp16"):
            train(run)


@needs_fp16
def test_run_whose_every_step_overflows_is_not_finished(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 60}
    deepspeed = {"base": "zero1", **NO_AUTOCAST, "fp16": fp16}
    run_ranks(overflow_in_every_step, 1, recipe(tmp_path, deepspeed=deepspeed))


def overflow_from(path: Path, first: int, saved: list[int]) -> None:
    """Skip all updates from step `first` on. At a loss scale of 1, the second one in a row stops the run."""

    def skipped(run: Run, step: int, *others: Any) -> StepOutput:
        output = run_step(run, step, *others)
        assert isinstance(output, StepOutput)
        return output if step + 1 < first else output._replace(grad_norm=None)

    with ExitStack() as stack, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("disco_ds.training.loop.run_step", skipped)
        own = [f"name=from-{first}", "log.tensorboard=false"]
        run = start(load_config(path, own), nothing, stack)
        monkeypatch.setattr(type(run.engine.optimizer), "loss_scale", 1.0)
        with pytest.raises(comm.AgreedError, match="overflowed in fp16") as caught:
            train(run)
    assert [step_of(path) for path in list_complete(run.folder)] == saved
    assert ("a checkpoint was saved after step 3" in str(caught.value)) == bool(saved)


def overflow_early_and_late(path: Path) -> None:
    overflow_from(path, 1, saved=[])
    overflow_from(path, 3, saved=[3])


def test_run_that_fp16_stops_saves_its_updates(tmp_path: Path) -> None:
    run_ranks(overflow_early_and_late, 1, recipe(tmp_path, checkpoint={"every_steps": 0}))


def test_non_finite_batch_is_as_if_it_had_not_been(tmp_path):
    run_ranks(non_finite_of_one_stage, 2, recipe(tmp_path))


def batch_norm(path: Path, levels: tuple[int, ...]) -> None:
    """Check that neither skipped batches nor repeated forwards change batch statistics, at these ZeRO levels."""
    tiny = json.loads((path.parent / "tiny.json").read_text())
    resnet = path.parent / "resnet.json"
    changes = {
        "model": {"name": str(resnet), "activation_checkpointing": True},
        "checkpoint": {"every_steps": 2},
    }
    tower = {"layers": [1, 1, 1, 1], "width": 8}
    resnet.write_text(json.dumps(tiny | {"vision_cfg": tiny["vision_cfg"] | tower}))
    for level in levels:
        zero = {"base": f"zero{level}", **NO_AUTOCAST}
        folder = passed_over(path, f"norm-{level}", zero, BOTH, **changes)["spoilt"]
        last = folder / CHECKPOINTS / "step-00000004"
        if comm.rank() == 0:
            file = next(path for path in last.rglob("*model_states.pt"))
            weights = torch.load(file, weights_only=False)["module"]
            assert weights["visual.bn1.num_batches_tracked"] == 4 * 2  # steps x micro-batches
            assert weights["visual.bn1.running_mean"].isfinite().all()
            last.rename(folder / "whole")
        comm.barrier()
        config = load_config(path, [f"name=norm-{level}-spoilt", "skip_nonfinite=2"])
        with ExitStack() as stack:
            train(start(config, poisoned({1: "loss", 2: "gradient"}), stack, str(folder)))
        comm.barrier()
        if comm.rank() == 0:
            equal_checkpoints(folder / "whole", last)


def test_batch_norm_counts_each_trained_micro_batch_once(tmp_path):
    run_ranks(batch_norm, 2, recipe(tmp_path), (1,))


@pytest.mark.slow
def test_batch_norm_at_every_stage(tmp_path):
    run_ranks(batch_norm, 2, recipe(tmp_path), (0, 2, 3))


@pytest.mark.slow
def test_non_finite_batch_at_every_stage_and_precision(tmp_path):
    run_ranks(non_finite_everywhere, 2, recipe(tmp_path))
