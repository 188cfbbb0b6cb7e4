"""The DeepSpeed engine of a run: schedules, parameter groups, and the updates at every ZeRO stage."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from timm.optim import Lamb, Lion
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from disco_ds.config import OptimSettings, render_ds_config
from disco_ds.distributed import comm
from disco_ds.models.clip import build_model
from disco_ds.models.param_groups import parameter_groups
from disco_ds.training.engine import (
    backward_and_step,
    build_engine,
    build_optimizer,
    learning_rate,
    set_lr,
)
from helpers.dist import run_ranks
from helpers.towers import batches, masters, prepare, tiny_config, write_tiny

# The schedule


def lrs(num_steps: int, peak: float = 1.0, **settings: Any) -> list[float]:
    optim = OptimSettings(**settings)
    return [learning_rate(step, num_steps, peak, optim) for step in range(num_steps)]


def test_warmup_rises_by_equal_steps_from_above_zero_to_the_peak() -> None:
    for schedule in (
        {"schedule": "cosine"},
        {"schedule": "constant"},
        {"schedule": "cooldown", "cooldown_steps": 2},
    ):
        values = lrs(20, peak=2.0, warmup_steps=4, **schedule)
        assert values[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
        assert max(values) == 2.0


def test_cosine_by_hand() -> None:
    # Steps 2 to 5 are at 0, 1/4, 1/2 and 3/4 of the half cosine from 1 to 0.2.
    half = math.sqrt(0.5)
    expected = [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + half), 0.6, 0.2 + 0.4 * (1 - half)]
    assert lrs(6, schedule="cosine", warmup_steps=2, lr_min=0.2) == pytest.approx(expected)


def test_cosine_ends_near_its_minimum() -> None:
    values = lrs(1000, peak=3.0, schedule="cosine", warmup_steps=100, lr_min=0.1)
    assert values[99] == values[100] == 3.0
    assert all(before > after for before, after in itertools.pairwise(values[100:]))
    assert 0.1 < values[-1] < 0.1001
    settings = OptimSettings(warmup_steps=100, lr_min=0.1)
    assert (
        learning_rate(1000, 1000, 3.0, settings)
        == learning_rate(5000, 1000, 3.0, settings)
        == pytest.approx(0.1)
    )


def test_constant_stays_at_the_peak() -> None:
    assert lrs(5, peak=0.25, schedule="constant", warmup_steps=2) == [0.125, 0.25, 0.25, 0.25, 0.25]


def test_cooldown_by_hand() -> None:
    values = lrs(8, peak=1.0, schedule="cooldown", warmup_steps=2, cooldown_steps=4, lr_min=0.2)
    assert values == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4])


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "cosine"},
        {"schedule": "constant"},
        {"schedule": "cooldown", "cooldown_steps": 3},
    ],
)
def test_schedule_without_warmup_starts_at_the_peak(settings: dict[str, Any]) -> None:
    values = lrs(6, warmup_steps=0, **settings)
    assert values[0] == 1.0
    assert min(values) > 0


def test_schedule_of_warmup_alone() -> None:
    assert lrs(4, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]


# The optimizers


def toy_groups() -> list[dict[str, Any]]:
    model = nn.Linear(3, 2)
    return [
        {"name": "matrices", "params": [model.weight], "weight_decay": 0.3},
        {"name": "vectors", "params": [model.bias], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(
    ("name", "kind", "defaults"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.7), "eps": 1e-4}),
        ("lion", Lion, {"betas": (0.8, 0.7)}),
        ("lamb", Lamb, {"betas": (0.8, 0.7), "eps": 1e-4, "max_grad_norm": None}),
        ("sgd", torch.optim.SGD, {"momentum": 0.6}),
    ],
)
def test_build_optimizer_passes_settings_and_groups(
    name: str, kind: type, defaults: dict[str, Any]
) -> None:
    settings = OptimSettings(name=name, betas=(0.8, 0.7), eps=1e-4, momentum=0.6)  # type: ignore[arg-type]
    optimizer = build_optimizer(toy_groups(), settings)
    assert type(optimizer) is kind
    assert [group["name"] for group in optimizer.param_groups] == ["matrices", "vectors"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    for group in optimizer.param_groups:
        assert defaults.items() <= group.items()


# The update

OPTIM: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.9, "betas": (0.9, 0.98), "eps": 1e-3}
OPTIM |= {"image": {"lr_factor": 0.5}, "text": {"weight_decay": 0.3, "layer_decay": 0.8}}
STEPS = (1e-2, 3e-3, 0.0, 5e-3)
"""Learning rates of the four steps."""
LOOKED_AT = (
    "visual.proj",
    "text_projection",
    "visual.conv1.weight",
    "ln_final.weight",
    "visual.ln_post.bias",
    "logit_scale",
)
"""Parameters (matrices, vectors and the scale) whose gradients are far larger than rounding errors."""


def surrogate(model: Any, rank: int) -> Tensor:
    """Return a loss whose gradient differs between ranks."""
    batch = batches(2, 4)[rank]
    image, text, scale, _ = model(batch["image"], batch["text"])
    weights = torch.randn(2, *image.shape, generator=torch.Generator().manual_seed(rank))
    return (weights[0] * image).sum() + (weights[1] * text).sum() + (rank + 1) * scale.sum() / 100


def plain_decay(name: str, parameter: nn.Parameter) -> float:
    if parameter.ndim < 2 or name.endswith("positional_embedding"):
        return 0.0
    return 0.1 if name.startswith("visual.") else 0.3


def plain_factor(name: str) -> float:
    """Return the factor of a parameter's learning rate: 0.5 in the image tower, 0.8^(3 - layer) in the text tower."""
    if name == "logit_scale":
        return 1.0
    if name.startswith("visual."):
        return 0.5
    layer = 0 if "embedding" in name else int(name.split(".")[2]) + 1 if "resblocks" in name else 3
    return 0.8 ** (3 - layer)


def plain_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Build the expected optimizer, whose groups follow from names and shapes."""
    groups = [
        {"params": [p], "weight_decay": plain_decay(n, p), "factor": plain_factor(n)}
        for n, p in model.named_parameters()
    ]
    if name == "lamb":
        return Lamb(groups, lr=123.0, betas=(0.9, 0.98), eps=1e-3, max_grad_norm=None)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=123.0, betas=(0.9, 0.98), eps=1e-3)
    if name == "lion":
        return Lion(groups, lr=123.0, betas=(0.9, 0.98))
    return torch.optim.SGD(groups, lr=123.0, momentum=0.9)


def plain_changes(name: str, start: nn.Module) -> list[dict[str, Tensor]]:
    """Train in one process on the mean of both ranks' losses. Return the changes of LOOKED_AT in each step."""
    model = copy.deepcopy(start)
    model.forward = start.forward.__func__.__get__(model)  # type: ignore[attr-defined]
    optimizer = plain_optimizer(name, model)
    changes = []
    for lr in STEPS:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        optimizer.zero_grad()
        ((surrogate(model, 0) + surrogate(model, 1)) / 2).backward()
        before = {key: model.get_parameter(key).detach().clone() for key in LOOKED_AT}
        optimizer.step()
        changes.append({key: model.get_parameter(key).detach() - before[key] for key in LOOKED_AT})
    return changes


def engine_changes(name: str, stage: int, model_file: str) -> list[dict[str, Tensor]]:
    config = tiny_config(
        model_file,
        {"zero_optimization": {"stage": stage}},
        global_batch=8,
        micro_batch=4,
        optim={"name": name, "lr": 1.0, "warmup_steps": 0, **OPTIM},
    )
    torch.manual_seed(0)
    engine = build_engine(
        build_model(config.model), config.optim, render_ds_config(config, comm.size())
    )
    names = [group["name"] for group in engine.optimizer.param_groups]
    assert len(set(names)) == len(names) == 11
    changes = []
    for lr in STEPS:
        before = masters(engine)
        set_lr(engine, lr)
        update = backward_and_step(engine, (surrogate(engine, comm.rank()) for _ in range(1)))
        assert 0 < update.norm.item() < math.inf
        after = masters(engine)
        changes.append({key: after[key] - before[key] for key in LOOKED_AT})
    engine.destroy()
    return changes


def compare_updates(model_file: str) -> list[str]:
    failures = []
    for name in ("adamw", "lamb", "lion", "sgd"):
        torch.manual_seed(0)
        start = build_model(tiny_config(model_file, {}).model)
        true = plain_changes(name, start)
        for stage in range(1 if name == "lamb" else 4):
            got = engine_changes(name, stage, model_file)
            for step, lr in enumerate(STEPS):
                for key in LOOKED_AT:
                    error = (got[step][key] - true[step][key]).abs().max().item()
                    size = true[step][key].abs().max().item()
                    # The change is a difference of weights near 1, so allow their rounding, and 1e-4 of the change.
                    if error > 5e-7 + 1e-4 * size or (size == 0) != (lr == 0):
                        failures.append(
                            f"{name} zero{stage} step {step} {key}: off by {error} of {size}"
                        )
    return failures


@pytest.mark.slow
def test_learning_rate_and_decay_reach_the_update_at_every_stage(tmp_path: Any) -> None:
    for failures in run_ranks(compare_updates, 2, write_tiny(tmp_path)):
        assert not failures, "\n".join(failures)


def test_weight_decay_is_seen_in_the_reference(tmp_path: Any) -> None:
    """compare_updates would detect it if vectors had weight decay, or if matrices had none."""
    config = tiny_config(
        write_tiny(tmp_path),
        {},
        optim={"name": "sgd", "momentum": 0.0, "lr": 1.0, "warmup_steps": 0},
    )
    for decay in (0.0, 0.1):
        torch.manual_seed(0)
        model = build_model(config.model)
        optimizer = build_optimizer(
            parameter_groups(model, OptimSettings(weight_decay=decay)), config.optim
        )
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        optimizer.step()
        moved = {
            name
            for name, p in model.named_parameters()
            if not torch.equal(p.detach(), before[name])
        }
        assert moved == (
            {name for name, p in model.named_parameters() if decay and plain_decay(name, p)}
        )
        for name in moved:
            torch.testing.assert_close(
                model.get_parameter(name).detach(), before[name] * (1 - 0.5 * decay)
            )


def test_parameter_without_dimensions_is_refused(tmp_path: Path) -> None:
    config = tiny_config(write_tiny(tmp_path), {})
    model = build_model(config.model)
    model.visual.gain = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(ValueError, match=r"cannot train visual.gain, .* give it the shape \[1\]"):
        build_engine(model, config.optim, render_ds_config(config, 1))


# The end of a step


class CountOperations(TorchDispatchMode):
    """Counts the calls of torch's operators, without views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def count_operations(model: str, stage: int) -> None:
    """Count the parameters, and the operations until and after the end of the backward pass of a step."""
    optim = {"optim__name": "adamw", "optim__clip_norm": 1.0}
    config = tiny_config(model, {"zero_optimization": {"stage": stage}}, **optim)
    engine = build_engine(build_model(config.model), config.optim, render_ds_config(config, 1))
    operations = CountOperations()
    until_end = 0
    reduce = engine.allreduce_gradients

    def begin_end(*args: Any, **kwargs: Any) -> None:
        nonlocal until_end
        until_end = operations.count
        reduce(*args, **kwargs)

    engine.allreduce_gradients = begin_end
    backward_and_step(engine, iter([surrogate(engine, 0)]))  # creates the optimizer's states
    with operations:
        backward_and_step(engine, iter([surrogate(engine, 0)]))
    num = len(list(engine.module.parameters()))
    assert num > 250
    assert until_end > num, stage
    assert operations.count - until_end < num / 2, stage


def count_at_both_stages(model: str) -> None:
    for stage in (0, 1):
        count_operations(model, stage)


def test_end_of_a_step_has_fewer_operations_than_the_model_has_parameters(tmp_path: Path) -> None:
    """DeepSpeed alone takes 946 operations at ZeRO 0 and 1,344 at ZeRO 1 for 302 parameters."""
    run_ranks(count_at_both_stages, 1, write_tiny(tmp_path, layers=20))


# The reduction of gradients


def order_of_reductions(
    model: str, stage: int, num_micro_batches: int, **zero: Any
) -> tuple[list[int], int]:
    """Record the reductions of one step.

    Returns:
        The number of elements of each reduction, and the number of gradients that are computed after the first one.
    """
    changes = {"global_batch": 4 * comm.size() * num_micro_batches, "micro_batch": 4}
    config = tiny_config(model, {"zero_optimization": {"stage": stage, **zero}}, **changes)
    engine = build_engine(
        build_model(config.model), config.optim, render_ds_config(config, comm.size())
    )
    engine.train()
    reduced: list[int] = []
    late = 0

    def made(_: Tensor) -> None:
        nonlocal late
        late += bool(reduced)

    for parameter in engine.module.parameters():
        parameter.register_post_accumulate_grad_hook(made)
    all_reduce = deepspeed.comm.all_reduce

    def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    deepspeed.comm.all_reduce = recorded
    for batch in batches(num_micro_batches, 4):
        image, text, _ = prepare(batch)
        features = engine(image, text)
        surrogate = sum(part.sum() for part in features[:3])
        engine.backward(surrogate, scale_wrt_gas=False)
        if engine.is_gradient_accumulation_boundary():
            break
        engine.step()
    deepspeed.comm.all_reduce = all_reduce
    return reduced, late


def reductions(model: str) -> None:
    num_elements = sum(p.numel() for p in build_model(tiny_config(model, {}).model).parameters())
    for stage in (1, 2):
        sizes, late = order_of_reductions(model, stage, 1, reduce_bucket_size=10_000)
        assert sum(sizes) == num_elements, stage
        assert len(sizes) > 3, (stage, sizes)
        assert max(sizes) <= 10_000, (stage, sizes)
        assert late > 10, (stage, late)
    sizes, late = order_of_reductions(model, 1, 2, reduce_bucket_size=10_000)
    assert (sum(sizes), late) == (num_elements, 0)


def test_gradients_are_reduced_in_buckets_while_backward_goes_on(tmp_path: Path) -> None:
    run_ranks(reductions, 2, write_tiny(tmp_path))


def widened(model: str) -> None:
    largest = max(p.numel() for p in build_model(tiny_config(model, {}).model).parameters())
    for stage, overlap, given, expected in (
        (2, True, 1000, largest),
        (2, True, largest + 1, largest + 1),
        (2, False, 1000, 1000),
        (1, True, 1000, 1000),
    ):
        zero = {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": given}
        config = tiny_config(model, {"zero_optimization": zero}, global_batch=4, micro_batch=4)
        engine = build_engine(
            build_model(config.model), config.optim, render_ds_config(config, comm.size())
        )
        assert engine.optimizer.reduce_bucket_size == expected, zero


@pytest.mark.slow
def test_bucket_of_zero_2_holds_the_largest_parameter_where_it_overlaps(tmp_path: Path) -> None:
    run_ranks(widened, 1, write_tiny(tmp_path))


def resumed_in_other_buckets(model: str, folder: Path) -> None:
    """Check that a checkpoint of a run with one reduction continues with overlapped buckets, bit by bit."""
    ways: tuple[dict[str, Any], ...] = (
        {"reduce_bucket_size": 500_000, "overlap_comm": False},
        {"reduce_bucket_size": 10_000, "overlap_comm": True},
    )
    for stage in (1, 2):
        ends = []
        for number, way in enumerate((ways[0], ways[0], ways[1])):
            ds_config = {"zero_optimization": {"stage": stage, **way}}
            changes = {"global_batch": 4 * comm.size(), "micro_batch": 4, "optim__name": "adamw"}
            config = tiny_config(model, ds_config, **changes)
            engine = build_engine(
                build_model(config.model), config.optim, render_ds_config(config, comm.size())
            )
            set_lr(engine, 1e-3)
            if number:
                engine.load_checkpoint(str(folder / str(stage)))
            for step in range(engine.global_steps, 3):
                image, text, _ = prepare(batches(comm.size(), 4, seed=step)[comm.rank()])
                features = engine(image, text)
                engine.backward(sum(part.sum() for part in features[:3]), scale_wrt_gas=False)
                engine.step()
                if number == 0 and step == 1:
                    engine.save_checkpoint(str(folder / str(stage)))
            ends.append(masters(engine))
            engine.destroy()
        for other in ends[1:]:
            assert all(torch.equal(value, other[name]) for name, value in ends[0].items()), stage


@pytest.mark.slow
def test_checkpoint_goes_on_in_other_buckets(tmp_path: Path) -> None:
    run_ranks(resumed_in_other_buckets, 2, write_tiny(tmp_path), tmp_path)
