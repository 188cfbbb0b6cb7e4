"""Going on from a checkpoint that another number of ranks, ZeRO stage or precision has written.

DeepSpeed loads its files only into the shape that wrote them. Here each trained parameter is put together by name from
what the writing ranks held of it, the fp32 value and the optimizer's states, and every rank of the new shape takes what
it owns. Files are mapped: one parameter at a time is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from disco_ds.config import OptimSettings
from disco_ds.distributed import comm
from disco_ds.models.param_groups import parameter_groups
from disco_ds.training import checkpoint
from disco_ds.training.engine import Engine
from disco_ds.training.weights import WHOLE, read_tensors

States = dict[str, Any]
"""Of a parameter, or of flat memory that holds many: `fp32`, and what the optimizer keeps (exp_avg, step)."""
Put = Callable[[nn.Parameter, States], None]


def optimizer_order(model: nn.Module, settings: OptimSettings) -> list[str]:
    """Names of the trained parameters as the optimizer numbers them. Before an engine has partitioned the model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in parameter_groups(model, settings) for parameter in group["params"]]


def load_untrained(saved: checkpoint.Saved, model: nn.Module, trained: set[str]) -> None:
    """Copy a checkpoint's frozen parameters and buffers into a model that no engine has partitioned yet.

    Raises: ValueError for files that cannot be read, or do not hold them.
    """
    wanted = {name: value for name, value in model.state_dict().items() if name not in trained}
    if not wanted:
        return
    if saved.meta["shape"]["stage"] < 3:  # every rank held them whole
        held: Any = saved.load(WHOLE)["module"].items()
    else:
        held = read_tensors(saved)
    for name, value in held:
        if name in wanted:
            wanted.pop(name).copy_(value)
    if wanted:
        raise ValueError(f"no value of {', '.join(sorted(wanted)[:5])}")


def restore(saved: checkpoint.Saved, engine: Engine, order: list[str]) -> None:
    """Put a checkpoint of any shape into the engine. Collective.

    Generators are not restored: random draws (dropout) go on from others than they would have.

    Args:   saved: verified; order: see optimizer_order; the model went through load_untrained.
    Raises: ValueError on every rank alike, for files that do not hold this model's parameters.
    """
    with comm.all_or_none(f"checkpoint {saved.path}"):
        parts = _find_parts(saved, order)
        missing = set(order) - parts.keys()
        if missing:
            raise ValueError(f"no state of {', '.join(sorted(missing)[:5])}")
        # NVMe: nothing of the optimizer's is in memory to be set.
        if engine.zero_optimization_stage() == 3 and engine.optimizer.swap_optimizer:
            raise ValueError("with the optimizer on NVMe a run goes on at its own shape only")
    parameters = dict(engine.module.named_parameters())
    put = (_into_whole, _into_partitions, _into_partitions, _into_shards)[engine.zero_optimization_stage()](engine)
    with torch.no_grad():
        for name, fragments in parts.items():
            put(parameters[name], _join(fragments))
        _restore_scaler(saved, engine)
    if engine.zero_optimization_stage() in (1, 2):
        engine.optimizer.update_lp_params()
    engine.global_steps = saved.step


@dataclass(frozen=True)
class Fragment:
    """A stretch of a parameter, in the flat states of the rank that had it."""

    states: States
    start: int
    numel: int


def _find_parts(saved: checkpoint.Saved, order: list[str]) -> dict[str, list[Fragment]]:
    """By name what the writing ranks held, in order. Raises: ValueError where DeepSpeed's files are not as expected."""
    shape = saved.meta["shape"]
    try:
        if shape["stage"] == 0:
            return _parts_of_whole(saved, order)
        if shape["stage"] == 3:
            return _parts_of_shards(saved, shape["ranks"])
        return _parts_of_partitions(saved, shape["ranks"])
    except (AttributeError, KeyError, IndexError, StopIteration, TypeError) as error:
        raise ValueError(f"DeepSpeed's files are not as expected: {type(error).__name__}: {error}") from error


def _parts_of_whole(saved: checkpoint.Saved, order: list[str]) -> dict[str, list[Fragment]]:
    file = saved.load(WHOLE)
    values, states = file["module"], file["optimizer"]["state"]
    return {
        name: [Fragment({"fp32": values[name], **states[number]}, 0, values[name].numel())]
        for number, name in enumerate(order)
    }


def _parts_of_partitions(saved: checkpoint.Saved, ranks: int) -> dict[str, list[Fragment]]:
    """ZeRO 1 and 2: a rank has a stretch of each group of parameters, laid end to end."""
    parts: dict[str, list[Fragment]] = {}
    for rank in range(ranks):
        file = _optimizer_file(saved, rank)
        for group, addresses in enumerate(file["param_slice_mappings"]):
            states = {"fp32": file["single_partition_of_fp32_groups"][group]}
            states |= file["base_optimizer_state"]["state"][group]
            for name, address in addresses.items():
                parts.setdefault(name, []).append(Fragment(states, address.start, address.numel))
    return parts


def _parts_of_shards(saved: checkpoint.Saved, ranks: int) -> dict[str, list[Fragment]]:
    """ZeRO 3: a rank has an equal share of every parameter, the last ones padded."""
    shapes = _load_named(saved, "zero_pp_rank_0_mp_rank_00_model_states.pt")["param_shapes"]
    parts: dict[str, list[Fragment]] = {}
    for rank in range(ranks):
        file = _optimizer_file(saved, rank)
        for group, names in enumerate(shapes):
            states = {"fp32": file["fp32_flat_groups"][group], **file["optimizer_state_dict"]["state"][group]}
            start = 0
            for name, shape in names.items():
                share = math.ceil(shape.numel() / ranks)
                used = max(0, min(share, shape.numel() - rank * share))
                parts.setdefault(name, []).append(Fragment(states, start, used))
                start += share
    return parts


def _optimizer_file(saved: checkpoint.Saved, rank: int) -> dict[str, Any]:
    return _load_named(saved, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]


def _load_named(saved: checkpoint.Saved, end: str) -> dict[str, Any]:
    """Its name begins with the precision at some stages."""
    return saved.load(next(name for name in saved.meta["files"] if name.endswith(end)))


def _join(fragments: list[Fragment]) -> States:
    """A parameter's states, flat."""
    joined: States = {}
    for key, value in fragments[0].states.items():
        if _is_flat(value):
            pieces = [part.states[key].reshape(-1).narrow(0, part.start, part.numel) for part in fragments]
            joined[key] = torch.cat(pieces).float()
        else:
            joined[key] = value
    return joined


def _is_flat(value: Any) -> bool:
    """Has a number for each of the parameter's, unlike a count of steps."""
    return isinstance(value, Tensor) and value.dim() > 0


def _into_whole(engine: Engine) -> Put:
    def put(parameter: nn.Parameter, states: States) -> None:
        _fill(engine.optimizer, parameter, states, 0, 0, parameter.numel())

    return put


def _into_partitions(engine: Engine) -> Put:
    zero = engine.optimizer
    groups = {parameter: number for number, group in enumerate(zero.bit16_groups) for parameter in group}

    def put(parameter: nn.Parameter, states: States) -> None:
        flat, start, place, numel = zero.single_partition_of_fp32_groups[groups[parameter]], 0, 0, 0
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:  # else another rank's; the flat memory, be it all padding, has its states all the same
            start, place = mapping.lp_fragment_address.start, mapping.hp_fragment_address.start
            numel = mapping.hp_fragment_address.numel
        _fill(zero.optimizer, flat, states, start, place, numel)

    return put


def _into_shards(engine: Engine) -> Put:
    zero = engine.optimizer

    def put(parameter: nn.Parameter, states: States) -> None:
        group, place, share = zero.grad_position[zero.get_param_id(parameter)]
        start = min(comm.rank() * share, parameter.ds_numel)
        used = min(share, parameter.ds_numel - start)
        _fill(zero.optimizer, zero.fp32_partitioned_groups_flat[group], states, start, place, used)
        parameter.ds_tensor.data.view(-1)[:used].copy_(states["fp32"][start : start + used])
        if parameter.numel():  # small parameters stay gathered
            parameter.data.view(-1).copy_(states["fp32"])

    return put


def _fill(optimizer: torch.optim.Optimizer, held: Tensor, states: States, start: int, place: int, numel: int) -> None:
    """Copy a parameter from `start` on to `place` in memory that the optimizer steps, and in what it keeps for that."""
    kept = optimizer.state[held]
    for key, value in states.items():
        if not _is_flat(value):
            kept[key] = value.to(held.device, copy=True) if isinstance(value, Tensor) else value
            continue
        if key != "fp32" and key not in kept:
            kept[key] = torch.zeros_like(held.data)
        target = held.data if key == "fp32" else kept[key]
        target.view(-1).narrow(0, place, numel).copy_(value.narrow(0, start, numel))


def _restore_scaler(saved: checkpoint.Saved, engine: Engine) -> None:
    """The loss scale goes on where both sides have one."""
    if saved.meta["shape"]["precision"] == "fp16" and engine.fp16_enabled():
        engine.optimizer.loss_scaler = _optimizer_file(saved, 0)["loss_scaler"]
