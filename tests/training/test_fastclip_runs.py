"""FastCLIP with an engine: gradients with micro-batches, skipped batches, and resumed runs."""

import copy
import shutil
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disco_ds.checkpoints.checkpoint import read
from disco_ds.config import OptimSettings, load_config, render_ds_config
from disco_ds.distributed import comm
from disco_ds.models.clip import build_model
from disco_ds.runs.run_folder import CHECKPOINTS
from disco_ds.training.build import build
from disco_ds.training.engine import build_engine, set_lr
from disco_ds.training.loop import train
from helpers.dist import run_ranks
from helpers.fastclip_oracle import PRESETS, Oracle, make_loss
from helpers.faults import BOTH, leave_out, nothing, poisoned, start
from helpers.launched import equal_checkpoints
from helpers.step import train_step
from helpers.tiny_run import recipe
from helpers.towers import (
    Batch,
    batches,
    distance,
    on_boundary_backward,
    prepare,
    tiny_config,
    write_tiny,
)

NUM_SAMPLES, PER_RANK, STEPS = 24, 16, 3
Case = tuple[str, int, int, str]
"""Preset, ZeRO stage, micro-batches per rank, precision."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": {"bf16": {"enabled": True}},
}


def true_step(
    tower: Any, oracle: Oracle, everything: list[Batch], ids: Tensor, cast: str
) -> tuple[dict[str, Tensor], float]:
    """Compute a step of one process on the whole batch. The towers run with `cast`, the loss in float64.

    Returns:
        The gradient by parameter name, and the loss.
    """
    tower.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast == "autocast"):
        image, text, scale, _ = tower(
            *(torch.cat([batch[side] for batch in everything]) for side in ("image", "text"))
        )
    value, dI, dT, d_tau = oracle.step(image, text, ids, 1 / scale.item())
    (
        (image * dI).sum() + (text * dT).sum() - scale.double().sum() * d_tau / scale.item() ** 2
    ).backward()
    return {key: p.grad.float() for key, p in tower.named_parameters() if p.grad is not None}, value


def one_case(model: str, name: str, stage: int, count: int, precision: str) -> dict[str, float]:
    """Compare steps of an engine, whose weights do not change, with one process and the float64 oracle.

    Returns:
        The largest errors, divided by the allowed one: 1e-5 in fp32; with 16 bits, twice the error of one process.
    """
    N = comm.size()
    deepspeed = {"zero_optimization": {"stage": stage}, **copy.deepcopy(PRECISIONS[precision])}
    config = tiny_config(model, deepspeed, global_batch=PER_RANK * N, micro_batch=PER_RANK // count)
    loss = make_loss(
        name, NUM_SAMPLES, **({} if name in ("sogclr", "isogclr") else {"gamma_epochs": 2})
    )
    torch.manual_seed(0)
    tower = build_model(config.model, loss.initial_scale, None, loss.learns_scale)
    rounded = copy.deepcopy(tower).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    # The forward of the copy is still bound to the original.
    rounded.forward = types.MethodType(tower.forward.__func__, rounded)
    engine = build_engine(copy.deepcopy(tower), config.optim, render_ds_config(config, N))
    for module in (engine, tower, rounded):
        module.train()
    set_lr(engine, 0.0)
    read: list[dict[str, Tensor]] = []
    on_boundary_backward(engine, read.append)
    oracle, oracle_of_rounded = Oracle(name, NUM_SAMPLES), Oracle(name, NUM_SAMPLES)
    worst: dict[str, float] = {}
    for step in range(STEPS):
        everything = batches(N * count, config.micro_batch, seed=step)
        ids = torch.randint(
            0, NUM_SAMPLES, (PER_RANK * N,), generator=torch.Generator().manual_seed(step)
        )
        for batch, part in zip(everything, ids.split(config.micro_batch), strict=True):
            batch["index"] = part
        mine = everything[comm.rank() * count : (comm.rank() + 1) * count]
        out = train_step(engine, loss, mine, prepare, max_scale=1e9)
        loss.commit()
        true, value = true_step(tower, oracle, everything, ids, "fp32")
        one_process, _ = true_step(rounded, oracle_of_rounded, everything, ids, precision)
        limit = 1e-5 if precision == "fp32" else 2 * distance(one_process, true)
        found = {
            "all": distance(read[-1], true),
            "loss": abs(out.metrics["loss"].item() - value) / max(abs(value), 1),
        }
        if loss.learns_scale and precision == "fp32":
            found["scale"] = distance(
                *({"": gradients["logit_scale"]} for gradients in (read[-1], true))
            )
        worst = {key: max(error / limit, worst.get(key, 0.0)) for key, error in found.items()}
    engine.destroy()
    return worst


def cases(model: str, chosen: list[Case]) -> list[str]:
    found = {case: one_case(model, *case) for case in chosen}
    return [
        f"{case}: {errors} x the limit"
        for case, errors in found.items()
        if not max(errors.values()) <= 1
    ]


def test_engine_gets_the_gradient_of_one_process(tmp_path):
    chosen = [
        ("fastclip_v3", 1, 4, "fp32"),
        ("fastclip_v2", 2, 4, "bf16"),
    ]
    for failures in run_ranks(cases, 2, write_tiny(tmp_path), chosen):
        assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("size", [1, 2])
def test_engine_gets_the_gradient_of_one_process_at_every_stage(size, precision, tmp_path):
    # 16-bit weights at ZeRO 0 are refused.
    stages = range(1 if precision == "bf16" else 0, 4)
    everything = [
        (name, stage, count, precision) for name in PRESETS for stage in stages for count in (1, 4)
    ]
    for failures in run_ranks(cases, size, write_tiny(tmp_path), everything):
        assert not failures, "\n".join(failures)


def whole_and_cut(path: Path, name: str, deepspeed: str, settings: list[str]) -> None:
    """Check that a run that skips batches and resumes within an epoch is bit-identical to one without them."""
    shared = [
        f"loss.name={name}",
        f"deepspeed={deepspeed}",
        "deepspeed.torch_autocast.enabled=false",
        *settings,
    ]
    folders = {}
    for kind, parts in (("whole", [(6, None)]), ("cut", [(3, None), (6, "latest")])):
        for steps, resume in parts:
            config = load_config(
                path, [*shared, f"name={kind}", f"steps={steps}", f"skip_nonfinite={len(BOTH)}"]
            )
            with ExitStack() as stack:
                run = start(
                    config,
                    poisoned(BOTH) if kind == "cut" and not resume else nothing,
                    stack,
                    resume,
                )
                if kind == "whole":
                    run.loader.start_step = leave_out(run, set(BOTH))
                train(run)
                run.engine.destroy()
            folders[kind] = run.folder
    comm.barrier()
    if comm.rank() == 0:
        equal_checkpoints(*(folder / CHECKPOINTS / "step-00000006" for folder in folders.values()))


def write_recipe(folder: Path) -> Path:
    """Write a recipe of six steps of 16 samples. The data set has 40 samples, so epochs end within steps."""
    data = {"source": "synthetic", "num_samples": 40, "workers": 0, "slots": 4}
    optim = {"lr": 1e-3, "warmup_steps": 0, "schedule": "constant"}
    log = {"every_steps": 1, "tensorboard": False}
    return recipe(folder, data=data, optim=optim, checkpoint={"every_steps": 3}, log=log)


def resumed(path: Path, name: str) -> None:
    """Resume at step 3 and train to step 6."""
    with ExitStack() as stack:
        train(
            build(load_config(path, [f"loss.name={name}", "name=cut", "steps=6"]), "latest", stack)
        )


@pytest.mark.slow
def test_passed_over_batches_and_resumed_runs(tmp_path):
    path = write_recipe(tmp_path)
    run_ranks(whole_and_cut, 2, path, "fastclip_v2", "zero1", [])
    cut = tmp_path / "runs" / "cut"
    shutil.rmtree(cut / CHECKPOINTS / "step-00000006")
    run_ranks(resumed, 1, path, "fastclip_v2")
    ((alone,), pair) = (
        list(read(tmp_path / "runs" / name / CHECKPOINTS / "step-00000006").states("loss"))
        for name in ("cut", "whole")
    )
    for rank, part in enumerate(pair):
        assert part["samples"] == alone["samples"] == 6 * 16
        for name, value in part["values"].items():
            assert torch.allclose(value, alone["values"][name][rank::2], rtol=1e-3, atol=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "deepspeed", "settings"),
    [
        ("fastclip_v3", "zero3", ["optim.tau_lr=1e-2", "optim.tau_slow=0.06"]),
        ("fastclip_v0", "zero0", ["optim.tau_lr=1e-2"]),
        ("isogclr", "zero2", ["loss.options={memory: host}"]),
        ("sogclr", "zero1", []),
    ],
)
def test_passed_over_batches_and_resumed_runs_of_other_presets(name, deepspeed, settings, tmp_path):
    run_ranks(whole_and_cut, 2, write_recipe(tmp_path), name, deepspeed, settings)


def own_rate(path: Path, deepspeed: str) -> list[float]:
    """Return the learning rate of the log scale in each of two updates: its change divided by its gradient."""
    settings = [
        "optim={name: sgd, momentum: 0.0, lr: 1e-9, tau_lr: 1.5, tau_slow: 0.0699, warmup_steps: 0}"
    ]
    settings += [
        f"deepspeed={deepspeed}",
        "deepspeed.torch_autocast.enabled=false",
        "loss.name=fastclip_v3",
    ]
    with ExitStack() as stack:
        run = build(load_config(path, [*settings, f"name={deepspeed}", "steps=3"]), None, stack)
        gradients: list[dict[str, torch.Tensor]] = []
        on_boundary_backward(run.engine, gradients.append)
        used: list[float] = []
        run.loss.register_forward_pre_hook(
            lambda _, arguments: used.append(arguments[0].scale.log().item())
        )
        train(run)
        run.engine.destroy()
        assert run.loss.state_dict()["samples"] == 3 * 16
    rates = []
    for before, after, gradient in zip(used, used[1:], gradients, strict=False):
        rates.append((before - after) / gradient["logit_scale"].item())
    return rates


@pytest.mark.parametrize(
    "deepspeed",
    [
        "zero1",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero0", "zero2", "zero3")),
    ],
)
def test_temperature_has_a_rate_of_its_own_and_a_third_of_it_below_a_bound(deepspeed, tmp_path):
    """The temperature begins at 0.07, just above the bound below which its learning rate is divided by three.

    The first step takes it below this bound.
    """
    for rates in run_ranks(own_rate, 2, write_recipe(tmp_path), deepspeed):
        assert rates == pytest.approx([1.5, 0.5], rel=1e-3)


def test_slow_temperature_needs_a_rate_of_its_own():
    with pytest.raises(ValueError, match=r"tau_slow=0\.03 has no effect without optim\.tau_lr"):
        OptimSettings(tau_slow=0.03)
