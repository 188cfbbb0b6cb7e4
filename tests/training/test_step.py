"""A step applies the full-batch gradient of one process, for all ranks, micro-batches, ZeRO stages and precisions."""

import itertools
import math
from typing import Any

import pytest
import torch

from disco_ds.config import render_ds_config
from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, LossOutput, build_loss
from disco_ds.models.clip import build_model
from disco_ds.training.engine import build_engine, set_lr
from helpers.dist import run_ranks
from helpers.machine import needs_fp16
from helpers.precisions import MATRIX, PRECISIONS, ds_config
from helpers.step import train_step
from helpers.towers import (
    Batch,
    batches,
    build_towers,
    distance,
    masters,
    norm,
    on_boundary_backward,
    prepare,
    prepare_groups,
    reference,
    tiny_config,
    write_tiny,
)

PER_RANK = 16
EXACT = ("fp32", "offload", "partitioned")
OTHER_LOSSES = ("disco_fused", "inf_cl", "siglip", "nt_xent")


def build(config: Any, text_dropout: float = 0.0) -> Any:
    model = build_towers(config, text_dropout)
    torch.manual_seed(100 + comm.rank())
    return build_engine(model, config.optim, render_ds_config(config, comm.size()))


def one_case(
    model: str,
    precision: str,
    stage: int,
    count: int,
    clip: bool,
    loss: str,
    text_dropout: float = 0.0,
    **changes: Any,
) -> dict[str, float]:
    """Compare an SGD step of the engine with one process.

    Returns:
        The errors of the gradient, the change of the weights, the gradient norm and the loss; and, as "one_process",
        the error of one process at the same precision.
    """
    N = comm.size()
    lr = 1000.0  # large enough that the rounding of the weights does not matter
    shape = {
        "global_batch": PER_RANK // count * count * N,
        "micro_batch": PER_RANK // count,
        "optim__lr": lr,
        "loss__name": loss,
    }
    clipping = {"optim__clip_norm": 0.05} if clip else {}
    config = tiny_config(model, ds_config(precision, stage), **shape, **clipping, **changes)
    everything = batches(N * count, config.micro_batch)
    if config.model.two_views:
        everything = [batch | {"text": batch["image"].flip(3)} for batch in everything]
    mine = everything[comm.rank() * count : (comm.rank() + 1) * count]

    states: list[torch.Tensor] = []
    torch.manual_seed(100 + comm.rank())

    def recording(batch: Batch) -> Any:
        if len(states) < count:
            states.append(torch.get_rng_state())
        return prepare_groups(batch) if config.data.group_by else prepare(batch)

    engine = build(config, text_dropout)
    engine.train()
    set_lr(engine, lr)
    read: list[dict[str, torch.Tensor]] = []
    if not precision.startswith("fp16"):  # in fp16, the gradient contains the loss scale
        on_boundary_backward(engine, read.append)
    before = masters(engine)
    out = train_step(
        engine, build_loss(loss, **config.loss.options), mine, recording, max_scale=1e9
    )
    assert "clip_fp32_gradients" not in vars(engine), (
        "the norm that clipping uses must be forgotten after the step"
    )
    after = masters(engine)
    engine.destroy()

    all_states = [state for part in comm.gather_objects(states) for state in part]
    true, true_loss = reference(config, everything, all_states, text_dropout=text_dropout)
    kind = precision.removesuffix("_bf16_wire").removesuffix("_wire")
    one_process = 0.0
    if kind not in EXACT:
        one_process = distance(reference(config, everything, all_states, cast=kind)[0], true)
    true_norm = norm(true)
    factor = min(1.0, config.optim.clip_norm / true_norm) if clip else 1.0
    assert not clip or factor < 1, f"clipping would have no effect: the true norm is {true_norm}"
    change = {name: (before[name] - after[name]) / lr for name in before}
    assert out.grad_norm is not None
    errors = {
        "change": distance(change, {name: factor * value for name, value in true.items()}),
        "norm": abs(out.grad_norm.item() - true_norm) / true_norm,
        "loss": abs(out.metrics["loss"].item() - true_loss) / true_loss,
        "one_process": one_process,
    }
    if read:
        errors["gradient"] = distance(read[0], true)
    return errors


def allowed(precision: str, one_process: float) -> float:
    """Return the allowed error: 1e-6 in fp32, and twice the error of one process at 16-bit precisions."""
    return 1e-6 if precision in EXACT else 2 * one_process


Group = tuple[list[tuple[Any, ...]], dict[str, Any]]
"""Cases (precision, stage, micro-batches, clip, loss), and the settings that they share."""


def run_cases(model: str, groups: list[Group]) -> list[str]:
    """Return descriptions of the cases that fail."""
    failures = []
    for case, changes in [(case, changes) for cases, changes in groups for case in cases]:
        precision, stage, count, clip, loss = case
        errors = one_case(model, precision, stage, count, clip, loss, **changes)
        limit = allowed(precision, errors["one_process"])
        # A change is a difference of rounded weights. 16-bit norms and losses have the same error as the gradient.
        limits = {
            "gradient": limit,
            "change": limit + 1e-6,
            "norm": limit + 1e-6,
            "loss": limit + 1e-6,
        }
        wrong = {
            name: value
            for name, value in errors.items()
            if name in limits and not value <= limits[name]
        }
        if wrong:
            failures.append(
                f"{precision} zero{stage} K={count} clip={clip} {loss} {changes}: {wrong} of {errors}"
            )
    return failures


def matrix(precisions: list[str]) -> list[tuple[Any, ...]]:
    return [
        (precision, stage, count, clip, "disco")
        for (precision, stage), count, clip in itertools.product(MATRIX, (1, 4), (False, True))
        if precision in precisions
    ]


def check(size: int, model: str, groups: list[Group], timeout_s: float = 240) -> None:
    for failures in run_ranks(run_cases, size, model, groups, timeout_s=timeout_s):
        assert not failures, "\n".join(failures)


def test_step_equals_single_process(tmp_path):
    """The cases: every ZeRO stage with GradAccum, dropout and clipping; other losses; activation checkpointing; locked
    towers; two views; gradients that are reduced in several buckets during backward; groups that span micro-batches
    and ranks."""
    pairs = (("autocast", 0), ("fp32", 1), ("bf16", 2), ("fp32", 3), ("partitioned", 3))
    losses = zip(OTHER_LOSSES, (1, 3, 2, 0), strict=True)
    groups: list[Group] = [
        ([(precision, stage, 4, True, "disco") for precision, stage in pairs], {}),
        ([("fp32", stage, 8, True, loss) for loss, stage in losses], {}),
        ([("fp32", 3, 4, False, "disco")], {"model__activation_checkpointing": True}),
        # The locked image tower draws random numbers before the trained text tower draws its dropout masks.
        ([("fp32", 1, 4, False, "disco")], {"model__lock_image": True, "text_dropout": 0.3}),
        ([("fp32", 2, 4, False, "disco")], {"model__lock_text": True}),
        (
            [("fp32", 0, 2, False, "nt_xent")],
            {"model__two_views": True, "data__augment__zoom": 0.1},
        ),
        ([("fp32", stage, 1, True, "disco") for stage in (1, 2)], BUCKETS),
    ]
    choices = [("disco_fused", "ignored"), ("inf_cl", "positives"), ("siglip", "ignored")]
    choices.append(("siglip", "positives"))
    groups += [
        (
            [("fp32", stage, 4, True, loss)],
            {"data__group_by": "caption", "loss__options__same_group": same_group},
        )
        for stage, (loss, same_group) in enumerate(choices)
    ]
    check(2, write_tiny(tmp_path, patch_dropout=0.5), groups)


BUCKETS = {"deepspeed__zero_optimization__reduce_bucket_size": 3000}
"""A small bucket. With one micro-batch, gradients are then reduced during backward. The largest parameters do not fit
into a bucket."""


OVERLAP = [("fp32", stage, count, True, "disco") for stage in (1, 2) for count in (1, 3)]


def weights_after(
    model: str, stage: int, count: int, overlaps: bool, name: str, lr: float, steps: int
) -> dict[str, torch.Tensor]:
    """Return the weights after some steps, with gradients reduced in several buckets."""
    zero = {"stage": stage, "reduce_bucket_size": 10_000, "overlap_comm": overlaps}
    shape = {"global_batch": 4 * count * comm.size(), "micro_batch": 4}
    config = tiny_config(model, {"zero_optimization": zero}, **shape, optim__name=name)
    engine = build(config)
    engine.train()
    set_lr(engine, lr)
    for step in range(steps):
        everything = batches(count * comm.size(), 4, seed=step)
        mine = everything[comm.rank() * count : (comm.rank() + 1) * count]
        train_step(engine, build_loss("disco_fused"), mine, prepare, max_scale=1e9)
    found = masters(engine)
    engine.destroy()
    return found


def compare_updates(model: str, limit: float, *how: Any) -> None:
    for _, stage, count, *_ in OVERLAP:
        overlapped, plain = (
            weights_after(model, stage, count, overlaps, *how) for overlaps in (True, False)
        )
        error = distance(overlapped, plain)
        assert error <= limit, f"ZeRO {stage}, {count} micro-batches: {error}"


# On a CPU, reductions do not run on a separate stream. So these tests show that buckets are filled with the right
# gradients during backward, but not that the streams of a GPU wait for each other.


def test_overlapped_reductions_change_no_update(tmp_path):
    """The bits must be equal, because the sum of two ranks does not depend on the order."""
    run_ranks(compare_updates, 2, write_tiny(tmp_path), 0.0, "adamw", 1e-2, 2)


@pytest.mark.slow
def test_overlapped_reductions_change_no_update_on_four_ranks(tmp_path):
    """The learning rate is so large that the weights equal the gradient. So only its rounding in fp32 is allowed."""
    run_ranks(compare_updates, 4, write_tiny(tmp_path), 1e-6, "sgd", 1e6, 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_step_with_overlapped_reductions_equals_single_process(size, tmp_path):
    overlap = BUCKETS | {"deepspeed__zero_optimization__overlap_comm": True}
    check(size, write_tiny(tmp_path, patch_dropout=0.5), [(OVERLAP, overlap)])


@pytest.mark.slow
def test_step_with_other_settings(tmp_path):
    checkpointed = [
        ("fp32", stage, 4, False, loss) for stage in (2, 3) for loss in ("clip", "disco")
    ]
    locked = [("fp32", stage, 4, False, "disco") for stage in range(4)]
    partly = {"model__unlocked_layers": 2, "model__activation_checkpointing": True}
    views = [("fp32", stage, 2, False, "nt_xent") for stage in range(4)]
    in_buckets = [
        (precision, stage, 1, True, "disco")
        for precision in ("fp32", "autocast", "autocast_bf16_wire", "bf16")
        for stage in (1, 2, 3)
    ]
    groups: list[Group] = [
        (checkpointed, {"model__activation_checkpointing": True}),
        # In partly trained towers, some parameters have no gradient.
        (locked, {"model__lock_image": True, **partly}),
        (locked[:1], {"model__lock_text": True, "model__unlocked_layers": 1}),
        (views, {"model__two_views": True, "data__augment__zoom": 0.1}),
        (in_buckets, BUCKETS),
    ]
    check(2, write_tiny(tmp_path, patch_dropout=0.5), groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    [pytest.param(name, marks=needs_fp16) if name == "fp16" else name for name in PRECISIONS],
)
@pytest.mark.parametrize("size", [1, 2])
def test_step_at_every_stage_and_precision(size, precision, tmp_path):
    check(size, write_tiny(tmp_path, patch_dropout=0.5), [(matrix([precision]), {})])


@pytest.mark.slow
@pytest.mark.parametrize("tower", ["image", "text"])
def test_step_with_a_locked_tower(tower, tmp_path):
    cases = [
        ("fp32", stage, count, True, loss)
        for stage in range(4)
        for count in (1, 2)
        for loss in ("clip", "disco")
    ]
    check(2, write_tiny(tmp_path, patch_dropout=0.5), [(cases, {f"model__lock_{tower}": True})])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_step_with_compiled_towers(tmp_path):
    cases = [("fp32", stage, 2, False, "disco") for stage in (0, 1, 2)]
    check(2, write_tiny(tmp_path), [(cases, {"model__compile": True})], timeout_s=500)


@pytest.mark.slow
@pytest.mark.parametrize("loss", OTHER_LOSSES)
def test_step_of_every_loss(loss, tmp_path):
    cases = [
        (precision, stage, count, False, loss)
        for (precision, stage), count in itertools.product(MATRIX, (1, 8))
        if precision in ("fp32", "autocast", "bf16")
    ]
    check(2, write_tiny(tmp_path, patch_dropout=0.5), [(cases, {})])


def pushed_up(model: str, cases: list[tuple[str, int]]) -> list[str]:
    """Take steps that only raise the scale, from just below and from above its bound. Return the failures."""
    failures = []
    for precision, stage in cases:
        # Alternate, so that each stage is tested with both optimizers.
        name = ("adamw", "sgd")[(stage + len(precision)) % 2]
        config = tiny_config(
            model,
            ds_config(precision, stage),
            global_batch=4 * comm.size(),
            micro_batch=4,
            optim__name=name,
        )
        # A scale that starts above the bound must neither rise nor fall to it. In bf16, ln 30 would be rounded up.
        for start, bound in ((99.0, 100.0), (150.0, 100.0), (29.5, 30.0)):
            engine = build_engine(
                build_model(config.model, initial_scale=start),
                config.optim,
                render_ds_config(config, comm.size()),
            )
            set_lr(engine, 0.01)
            engine.train()
            # One unit in the last place of the parameter's precision.
            ulp = 2**-8 if "16" in precision.split("_")[0] else 2**-21
            for _ in range(4):
                out = train_step(engine, upward, batches(1, 4), prepare, max_scale=bound)
                master = masters(engine)["logit_scale"].item()
                allowed = math.log(bound) + 1e-6 if start < bound else math.log(start) + ulp
                if max(out.scale.log().item(), master) > allowed:
                    failures.append(
                        f"{precision} zero{stage} {name}: used {out.scale.item()}, master {master}"
                    )
            # In 16 bits, the parameter is rounded.
            if master < math.log(0.98 * max(start, bound)):
                failures.append(f"{precision} zero{stage} {name}: the scale is too low: {master}")
            engine.destroy()
    return failures


def upward(embeddings: Embeddings) -> LossOutput:
    """A loss that depends only on the scale, and decreases when the scale rises."""
    return LossOutput(
        -embeddings.scale.sum() + 0 * (embeddings.image.sum() + embeddings.text.sum())
    )


def check_bound(model: str, cases: list[tuple[str, int]]) -> None:
    for failures in run_ranks(pushed_up, 2, model, cases):
        assert not failures, "\n".join(failures)


def test_scale_stays_below_its_bound(tmp_path):
    check_bound(
        write_tiny(tmp_path),
        [("fp32", 0), ("bf16", 2), ("partitioned", 3)],
    )


@pytest.mark.slow
def test_scale_stays_below_its_bound_at_every_stage_and_precision(tmp_path):
    check_bound(write_tiny(tmp_path), MATRIX)


def states_used(model: str) -> list[bytes]:
    """Take two steps of three micro-batches with dropout.

    Returns:
        For each micro-batch, the state of the random number generator before its first forward pass.
    """
    config = tiny_config(model, ds_config("fp32", 1), global_batch=12, micro_batch=4)
    engine = build(config, text_dropout=0.3)
    engine.train()
    seen: list[bytes] = []

    def recording(batch: Batch) -> Any:
        seen.append(torch.get_rng_state().numpy().tobytes())
        return prepare(batch)

    used = []
    for _ in range(2):
        seen.clear()
        train_step(engine, build_loss("disco"), batches(3, 4), recording, max_scale=100.0)
        used += seen[:3]  # the others are repeated forwards
    engine.destroy()
    return used


def test_no_micro_batch_draws_what_another_has_drawn(tmp_path):
    """After a step, the generator must have the state after the last first forward, not after a repeated forward."""
    (used,) = run_ranks(states_used, 1, write_tiny(tmp_path))
    assert len(set(used)) == len(used) == 6


def poisoned(model: str) -> None:
    """Check that a NaN in the features of one rank stops all ranks before their weights change."""
    for stage in range(4):
        config = tiny_config(
            model, ds_config("fp32", stage), global_batch=4 * comm.size(), micro_batch=4
        )
        engine = build(config)
        engine.train()
        before = masters(engine)

        def spoil(e: Any) -> LossOutput:
            out = build_loss("disco")(e)
            factor = float("nan") if comm.rank() == 1 else 1.0
            return LossOutput(out.loss * factor, out.metrics)

        with pytest.raises(FloatingPointError, match="step 0"):
            train_step(engine, spoil, batches(1, 4), prepare, max_scale=100.0)
        assert distance(masters(engine), before) == 0
        engine.destroy()


def test_non_finite_gradient_stops_all_ranks_before_the_update(tmp_path):
    run_ranks(poisoned, 2, write_tiny(tmp_path))


def overflowing(model: str) -> None:
    """Check that steps whose loss scale is too large change no weights, and that the first one that fits is right."""
    for stage in (1, 2, 3):
        scaling = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
        zero = {"zero_optimization": {"stage": stage}}
        config = tiny_config(model, zero | scaling, global_batch=8 * comm.size(), micro_batch=4)
        engine = build(config)
        engine.train()
        set_lr(engine, 1.0)
        before = masters(engine)
        everything = batches(2 * comm.size(), 4)
        mine = everything[2 * comm.rank() : 2 * comm.rank() + 2]
        skipped = 0
        while (
            train_step(engine, build_loss("disco"), mine, prepare, max_scale=1e9).grad_norm is None
        ):
            skipped += 1
            assert distance(masters(engine), before) == 0
        assert 0 < skipped < 24
        true, _ = reference(config, everything, [torch.get_rng_state()] * len(everything))
        after = masters(engine)
        assert distance({name: before[name] - after[name] for name in before}, true) < 1e-2
        engine.destroy()


@needs_fp16
def test_loss_scale_overflow_skips_the_step_and_is_no_fault(tmp_path):
    run_ranks(overflowing, 2, write_tiny(tmp_path))
