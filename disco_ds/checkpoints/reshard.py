"""Resume a checkpoint with another number of ranks, ZeRO stage or precision.

DeepSpeed loads its files only into the shape that wrote them. Here, the fp32 value and the optimizer
states of each trained parameter are joined from the fragments that the writing ranks held, and every
rank of the new shape takes the part that it holds. Rank 0 reads the files, which are memory-mapped, and
broadcasts one parameter at a time, so that no rank needs memory for more.

The keys of DeepSpeed's files, and the attributes of its optimizers, are those of DeepSpeed 0.19.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed import DeepSpeedEngine as Engine
from torch import Tensor, nn

from disco_ds.checkpoints.checkpoint import Saved
from disco_ds.checkpoints.weights import WHOLE, read_tensors
from disco_ds.config import OptimSettings
from disco_ds.distributed import comm
from disco_ds.models.param_groups import parameter_groups

States = dict[str, Any]
"""`fp32`, the value, and the optimizer's states (exp_avg, step, ...) of one parameter, or of flat memory for many."""


def optimizer_order(model: nn.Module, settings: OptimSettings) -> list[str]:
    """Return the names of the trained parameters in the optimizer's order.

    Call this before an engine partitions the model.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        names[parameter]
        for group in parameter_groups(model, settings)
        for parameter in group["params"]
    ]


def load_untrained(saved: Saved, model: nn.Module, trained: set[str]) -> None:
    """Load a checkpoint's frozen parameters and buffers into a model without an engine. Collective.

    Args:
        saved: A verified checkpoint.
        model: The model, not partitioned yet.
        trained: Names of the trained parameters, which load_trained loads.

    Raises:
        ValueError: On every rank, if files cannot be read, or a value is missing.
    """
    wanted = {name: value for name, value in model.state_dict().items() if name not in trained}
    if not wanted:
        return

    def read_untrained() -> dict[str, Tensor]:
        held: Any = read_tensors(saved)
        if saved.meta["shape"]["stage"] < 3:  # below ZeRO 3 every rank held them whole
            held = saved.load(WHOLE)["module"].items()
        found = {name: value.clone() for name, value in held if name in wanted}
        if missing := sorted(wanted.keys() - found.keys()):
            raise ValueError(f"no value of {', '.join(missing[:5])}")
        return found

    for name, value in comm.from_rank_0(f"checkpoint {saved.path}", read_untrained).items():
        wanted[name].copy_(value)


def load_trained(saved: Saved, engine: Engine, order: list[str]) -> None:
    """Load the trained parameters of a checkpoint of any shape into the engine. Collective.

    The random generators are not restored, so dropout draws other numbers than without the change.

    Args:
        saved: A verified checkpoint.
        engine: The engine, whose model went through load_untrained.
        order: See optimizer_order.

    Raises:
        ValueError: On every rank, if the files do not contain this model's parameters.
    """
    what = f"checkpoint {saved.path}"
    parts: dict[str, list[Fragment]] = {}
    with comm.all_or_none(what):
        # With the optimizer on NVMe, its states are not in memory, where they could be set.
        if engine.zero_optimization_stage() == 3 and engine.optimizer.swap_optimizer:
            raise ValueError(
                "with the optimizer on NVMe, a run can only be resumed with the same number of ranks, "
                "ZeRO stage and precision"
            )
        if comm.rank() == 0:
            parts = _find_parts(saved, order)
    parameters = dict(engine.module.named_parameters())
    with torch.no_grad():
        # All ranks take the parameters in the same order, because each one is broadcast.
        for name in order:
            states = comm.from_rank_0(what, partial(_join, parts, name))
            _set_states(engine, parameters[name], states)
    if saved.meta["shape"]["precision"] == "fp16" and engine.fp16_enabled():
        engine.optimizer.loss_scaler = comm.from_rank_0(
            what, lambda: _optimizer_file(saved, 0)["loss_scaler"]
        )
    if engine.zero_optimization_stage() in (1, 2):
        engine.optimizer.update_lp_params()  # the model's weights, from the fp32 values just set
    engine.global_steps = saved.step


@dataclass(frozen=True)
class Fragment:
    """A contiguous part of a parameter, within the flat states of the rank that held it."""

    states: States
    start: int
    numel: int


def _find_parts(saved: Saved, order: list[str]) -> dict[str, list[Fragment]]:
    """Return the fragments of each parameter, in the order of the ranks."""
    shape = saved.meta["shape"]
    if shape["stage"] == 0:
        file = saved.load(WHOLE)
        values, states = file["module"], file["optimizer"]["state"]
        return {
            name: [Fragment({"fp32": values[name], **states[number]}, 0, values[name].numel())]
            for number, name in enumerate(order)
        }
    find = _find_shards if shape["stage"] == 3 else _find_partitions
    return find(saved, shape["ranks"])


def _find_partitions(saved: Saved, ranks: int) -> dict[str, list[Fragment]]:
    """Find fragments of ZeRO 1 and 2, where each rank holds a contiguous part of a group's concatenated parameters."""
    parts: dict[str, list[Fragment]] = {}
    for rank in range(ranks):
        file = _optimizer_file(saved, rank)
        for group, addresses in enumerate(file["param_slice_mappings"]):
            states = {"fp32": file["single_partition_of_fp32_groups"][group]}
            # The optimizer sees a group as one flat tensor, so its states are flat too.
            states |= file["base_optimizer_state"]["state"][group]
            for name, address in addresses.items():
                parts.setdefault(name, []).append(Fragment(states, address.start, address.numel))
    return parts


def _find_shards(saved: Saved, ranks: int) -> dict[str, list[Fragment]]:
    """Find fragments of ZeRO 3, where each rank holds an equal share of every parameter, the last ones padded."""
    shapes = _load_named(saved, "zero_pp_rank_0_mp_rank_00_model_states.pt")["param_shapes"]
    parts: dict[str, list[Fragment]] = {}
    for rank in range(ranks):
        file = _optimizer_file(saved, rank)
        for group, names in enumerate(shapes):
            states = {"fp32": file["fp32_flat_groups"][group]}
            states |= file["optimizer_state_dict"]["state"][group]
            # The rank's shares of the group's parameters are concatenated in the order of `names`.
            start = 0
            for name, shape in names.items():
                share = math.ceil(shape.numel() / ranks)  # with the padding
                used = max(0, min(share, shape.numel() - rank * share))
                parts.setdefault(name, []).append(Fragment(states, start, used))
                start += share
    return parts


def _optimizer_file(saved: Saved, rank: int) -> dict[str, Any]:
    file = _load_named(saved, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return file["optimizer_state_dict"]


def _load_named(saved: Saved, end: str) -> dict[str, Any]:
    """Load the file whose name ends like this. At some ZeRO stages, the name begins with the precision."""
    return saved.load(next(name for name in saved.meta["files"] if name.endswith(end)))


def _join(parts: dict[str, list[Fragment]], name: str) -> States:
    """Return the flat states of a whole parameter. A state that is a single number, such as `step`, is kept."""
    fragments = parts[name]
    joined = dict(fragments[0].states)
    for key, value in joined.items():
        if _is_flat(value):
            pieces = [
                part.states[key].reshape(-1).narrow(0, part.start, part.numel) for part in fragments
            ]
            joined[key] = torch.cat(pieces).float()
    return joined


def _is_flat(value: Any) -> bool:
    """Return True for a state with one number per element of the parameter, unlike a count of steps."""
    return isinstance(value, Tensor) and value.dim() > 0


def _set_states(engine: Engine, parameter: Any, states: States) -> None:
    """Write the part of a parameter's states that this rank holds into the engine.

    Args:
        engine: The engine.
        parameter: The parameter, to which DeepSpeed has added attributes.
        states: Flat states of the whole parameter.
    """
    held, start, place, numel = _find_place(engine, parameter)
    kept = engine.basic_optimizer.state[held]
    for key, value in states.items():
        if not _is_flat(value):
            kept[key] = value.to(held.device, copy=True) if isinstance(value, Tensor) else value
            continue
        if key != "fp32" and key not in kept:
            kept[key] = torch.zeros_like(held.data)
        target = held.data if key == "fp32" else kept[key]
        target.view(-1).narrow(0, place, numel).copy_(value.narrow(0, start, numel))
    if engine.zero_optimization_stage() == 3:
        parameter.ds_tensor.data[:numel].copy_(states["fp32"][start : start + numel])
        if parameter.numel():  # small parameters stay gathered, so the whole value is set too
            parameter.data.view(-1).copy_(states["fp32"])


def _find_place(engine: Engine, parameter: Any) -> tuple[Tensor, int, int, int]:
    """Find the part of a parameter that this rank holds.

    Returns:
        The tensor that the optimizer steps, the first element of the parameter that it contains, the
        position of that element in the tensor, and the number of elements, which may be 0.
    """
    zero = engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return parameter, 0, 0, parameter.numel()
    if stage == 3:
        group, place, share = zero.grad_position[zero.get_param_id(parameter)]
        # The share of the last ranks extends beyond the parameter's end, where there is only padding.
        start = min(comm.rank() * share, parameter.ds_numel)
        numel = min(share, parameter.ds_numel - start)
        return zero.fp32_partitioned_groups_flat[group], start, place, numel
    groups = [any(each is parameter for each in group) for group in zero.bit16_groups]
    flat = zero.single_partition_of_fp32_groups[groups.index(True)]
    mapping = getattr(parameter, "_hp_mapping", None)
    # A parameter without a mapping is held by another rank. Writing none of it still creates the states of
    # this rank's flat memory, which DeepSpeed expects even if that contains nothing but padding.
    if mapping is None:
        return flat, 0, 0, 0
    part = mapping.hp_fragment_address
    return flat, mapping.lp_fragment_address.start, part.start, part.numel
