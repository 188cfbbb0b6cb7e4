"""Resume from a checkpoint with a different number of ranks, ZeRO stage or precision.

DeepSpeed can load its files only with the number of ranks, ZeRO stage and precision that wrote them
(together called the shape). This module instead joins the fp32 value and the optimizer states of each
trained parameter from the fragments that the writing ranks held. Every rank of the new run then copies
the part that it holds. Rank 0 reads the files, which are memory-mapped, and broadcasts one parameter at
a time, so each rank needs extra memory for only one parameter.

The code uses the file keys and optimizer attributes of DeepSpeed 0.19.
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
"""The fp32 value (key `fp32`) and the optimizer states (exp_avg, step, ...) of one parameter or of a flat tensor.

A flat tensor is the concatenation of many parameters.
"""


def optimizer_order(model: nn.Module, settings: OptimSettings) -> list[str]:
    """Return the names of the trained parameters in the order in which the optimizer numbers them.

    Call this before an engine partitions the model.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        names[parameter]
        for group in parameter_groups(model, settings)
        for parameter in group["params"]
    ]


def load_untrained(saved: Saved, model: nn.Module, trained: set[str]) -> None:
    """Load a checkpoint's frozen parameters and buffers into a model that has no engine yet. Collective.

    Args:
        saved: A verified checkpoint.
        model: The model, before an engine partitions it.
        trained: Names of the trained parameters, which load_trained loads.

    Raises:
        ValueError: On every rank, if a file cannot be read or a value is missing.
    """
    wanted = {name: value for name, value in model.state_dict().items() if name not in trained}
    if not wanted:
        return

    def read_untrained() -> dict[str, Tensor]:
        held: Any = read_tensors(saved)
        if saved.meta["shape"]["stage"] < 3:  # below ZeRO 3, each rank held these in full
            held = saved.load(WHOLE)["module"].items()
        found = {name: value.clone() for name, value in held if name in wanted}
        if missing := sorted(wanted.keys() - found.keys()):
            raise ValueError(f"no value of {', '.join(missing[:5])}")
        return found

    for name, value in comm.from_rank_0(f"checkpoint {saved.path}", read_untrained).items():
        wanted[name].copy_(value)


def load_trained(saved: Saved, engine: Engine, order: list[str]) -> None:
    """Load the trained parameters of a checkpoint into the engine, whatever shape wrote it. Collective.

    The random generators are not restored, so random draws, such as dropout, differ from those of a run
    whose shape had not changed.

    Args:
        saved: A verified checkpoint.
        engine: The engine, whose model went through load_untrained.
        order: Names of the trained parameters; see optimizer_order.

    Raises:
        ValueError: On every rank, if the files do not contain this model's parameters.
    """
    what = f"checkpoint {saved.path}"
    parts: dict[str, list[Fragment]] = {}
    with comm.all_or_none(what):
        # The code below sets optimizer states in memory, but here they are on NVMe.
        if engine.zero_optimization_stage() == 3 and engine.optimizer.swap_optimizer:
            raise ValueError(
                "with the optimizer on NVMe, a run can only be resumed with the same number of ranks, "
                "ZeRO stage and precision"
            )
        if comm.rank() == 0:
            parts = _find_parts(saved, order)
    parameters = dict(engine.module.named_parameters())
    with torch.no_grad():
        # All ranks must loop in the same order, because each parameter is broadcast.
        for name in order:
            states = comm.from_rank_0(what, partial(_join, parts, name))
            _set_states(engine, parameters[name], states)
    if saved.meta["shape"]["precision"] == "fp16" and engine.fp16_enabled():
        engine.optimizer.loss_scaler = comm.from_rank_0(
            what, lambda: _optimizer_file(saved, 0)["loss_scaler"]
        )
    if engine.zero_optimization_stage() in (1, 2):
        engine.optimizer.update_lp_params()  # update the model's weights from the fp32 values that were just set
    engine.global_steps = saved.step


@dataclass(frozen=True)
class Fragment:
    """A contiguous part of a parameter: a range of elements in the flat states of the rank that held it."""

    states: States
    start: int
    numel: int


def _find_parts(saved: Saved, order: list[str]) -> dict[str, list[Fragment]]:
    """Return the fragments of each parameter, in rank order."""
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
    """Find fragments at ZeRO 1 and 2, where a parameter group is one flat tensor and each rank holds a part of it."""
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
    """Find fragments at ZeRO 3, where each rank holds an equal share of every parameter.

    The shares of the last ranks are padded.
    """
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
                share = math.ceil(shape.numel() / ranks)  # including padding
                used = max(0, min(share, shape.numel() - rank * share))
                parts.setdefault(name, []).append(Fragment(states, start, used))
                start += share
    return parts


def _optimizer_file(saved: Saved, rank: int) -> dict[str, Any]:
    file = _load_named(saved, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return file["optimizer_state_dict"]


def _load_named(saved: Saved, end: str) -> dict[str, Any]:
    """Load the file whose name ends with `end`. DeepSpeed begins some names with the precision."""
    return saved.load(next(name for name in saved.meta["files"] if name.endswith(end)))


def _join(parts: dict[str, list[Fragment]], name: str) -> States:
    """Join a parameter's fragments into flat states. A state that is a single number, such as `step`, is unchanged."""
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
    """Return whether a state has one number per element of the parameter, as exp_avg does and `step` does not."""
    return isinstance(value, Tensor) and value.dim() > 0


def _set_states(engine: Engine, parameter: Any, states: States) -> None:
    """Copy this rank's part of a parameter's states into the engine.

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
        if parameter.numel():  # small parameters stay gathered, so set the whole value too
            parameter.data.view(-1).copy_(states["fp32"])


def _find_place(engine: Engine, parameter: Any) -> tuple[Tensor, int, int, int]:
    """Find the part of a parameter that this rank holds.

    Returns:
        The tensor that the optimizer updates; the index, within the parameter, of the first element
        that this rank holds; the position of that element in the tensor; and the number of elements
        that this rank holds, which may be 0.
    """
    zero = engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return parameter, 0, 0, parameter.numel()
    if stage == 3:
        group, place, share = zero.grad_position[zero.get_param_id(parameter)]
        # The shares of the last ranks extend beyond the end of the parameter. The rest is padding.
        start = min(comm.rank() * share, parameter.ds_numel)
        numel = min(share, parameter.ds_numel - start)
        return zero.fp32_partitioned_groups_flat[group], start, place, numel
    groups = [any(each is parameter for each in group) for group in zero.bit16_groups]
    flat = zero.single_partition_of_fp32_groups[groups.index(True)]
    mapping = getattr(parameter, "_hp_mapping", None)
    # A parameter without a mapping is held by other ranks only. Copying 0 elements still makes _set_states
    # create the states of this rank's flat tensor. DeepSpeed expects them even if that is all padding.
    if mapping is None:
        return flat, 0, 0, 0
    part = mapping.hp_fragment_address
    return flat, mapping.lp_fragment_address.start, part.start, part.numel
