"""Resharding: resume from a checkpoint of another number of ranks, ZeRO stage or precision.

DeepSpeed loads its files only into the shape that wrote them. Here the fp32 value and the optimizer states of each
trained parameter are joined, by the parameter's name, from the pieces that the writing ranks held, and every rank of
the new shape takes the piece that it owns. Rank 0 reads the files, which are mapped, and broadcasts: one parameter at
a time is in memory.

The names of the pieces and where they lie in DeepSpeed's files are those of DeepSpeed 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed import DeepSpeedEngine as Engine
from torch import Tensor, nn

from disco_ds.checkpoints import checkpoint
from disco_ds.checkpoints.weights import WHOLE, read_tensors
from disco_ds.config import OptimSettings
from disco_ds.distributed import comm
from disco_ds.models.param_groups import parameter_groups

States = dict[str, Any]
"""The values of a parameter, or of flat memory that holds many: `fp32`, and the optimizer's (exp_avg, step, ...)."""
Put = Callable[[nn.Parameter, States], None]
"""Writes a whole parameter's flat states into the engine, as far as this rank owns them."""


def optimizer_order(model: nn.Module, settings: OptimSettings) -> list[str]:
    """Names of the trained parameters in the optimizer's order. To be called before an engine partitions the model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        names[parameter]
        for group in parameter_groups(model, settings)
        for parameter in group["params"]
    ]


def load_untrained(saved: checkpoint.Saved, model: nn.Module, trained: set[str]) -> None:
    """Copy a checkpoint's frozen parameters and buffers into a model that no engine has partitioned yet. Collective.

    Raises: ValueError on every rank alike for files that cannot be read, or do not hold them.
    """
    wanted = {name: value for name, value in model.state_dict().items() if name not in trained}
    if not wanted:
        return

    def read() -> dict[str, Tensor]:
        if saved.meta["shape"]["stage"] < 3:  # below ZeRO 3 every rank held them whole
            held: Any = saved.load(WHOLE)["module"].items()
        else:
            held = read_tensors(saved)
        found = {name: value.clone() for name, value in held if name in wanted}
        if missing := sorted(wanted.keys() - found.keys()):
            raise ValueError(f"no value of {', '.join(missing[:5])}")
        return found

    for name, value in comm.from_rank_0(f"checkpoint {saved.path}", read).items():
        wanted[name].copy_(value)


def restore(saved: checkpoint.Saved, engine: Engine, order: list[str]) -> None:
    """Load a checkpoint of any shape into the engine, whose model went through load_untrained. Collective.

    The random generators are not restored, so dropout draws other numbers than it would have.

    Args:   saved: a verified checkpoint; order: see optimizer_order.
    Raises: ValueError on every rank alike, for files that do not hold this model's parameters.
    """
    what, parts = f"checkpoint {saved.path}", dict[str, list[Fragment]]()
    with comm.all_or_none(what):
        if comm.rank() == 0:
            parts = _find_parts(saved, order)
            if missing := set(order) - parts.keys():
                raise ValueError(f"no state of {', '.join(sorted(missing)[:5])}")
        # With the optimizer on NVMe none of its states is in memory, where they could be set.
        if engine.zero_optimization_stage() == 3 and engine.optimizer.swap_optimizer:
            raise ValueError(
                "with the optimizer on NVMe a run can be resumed at its own shape only"
            )
    parameters = dict(engine.module.named_parameters())
    # All ranks go through the parameters in one order, for each is broadcast when it is its turn.
    put = (_into_whole, _into_partitions, _into_partitions, _into_shards)[
        engine.zero_optimization_stage()
    ](engine)
    with torch.no_grad():
        for name in order:
            put(
                parameters[name],
                comm.from_rank_0(what, partial(lambda name: _join(parts[name]), name)),
            )
        _restore_scaler(saved, engine)
    if engine.zero_optimization_stage() in (1, 2):
        engine.optimizer.update_lp_params()  # the model's weights, from the fp32 masters that were just set
    engine.global_steps = saved.step


@dataclass(frozen=True)
class Fragment:
    """A contiguous piece of a parameter, within the flat states of the rank that held it."""

    states: States
    start: int
    numel: int


def _find_parts(saved: checkpoint.Saved, order: list[str]) -> dict[str, list[Fragment]]:
    """The pieces of each parameter in order. Raises: ValueError for files in which DeepSpeed's names are missing."""
    shape = saved.meta["shape"]
    try:
        if shape["stage"] == 0:
            return _parts_of_whole(saved, order)
        if shape["stage"] == 3:
            return _parts_of_shards(saved, shape["ranks"])
        return _parts_of_partitions(saved, shape["ranks"])
    except (AttributeError, KeyError, IndexError, StopIteration, TypeError) as error:
        raise ValueError(
            f"DeepSpeed's files are not as expected: {type(error).__name__}: {error}"
        ) from error


def _parts_of_whole(saved: checkpoint.Saved, order: list[str]) -> dict[str, list[Fragment]]:
    file = saved.load(WHOLE)
    values, states = file["module"], file["optimizer"]["state"]
    return {
        name: [Fragment({"fp32": values[name], **states[number]}, 0, values[name].numel())]
        for number, name in enumerate(order)
    }


def _parts_of_partitions(saved: checkpoint.Saved, ranks: int) -> dict[str, list[Fragment]]:
    """ZeRO 1 and 2: the parameters of a group are laid end to end, and each rank holds a contiguous part of that."""
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


def _parts_of_shards(saved: checkpoint.Saved, ranks: int) -> dict[str, list[Fragment]]:
    """ZeRO 3: each rank holds an equal share of every parameter; the last ranks' shares are padded."""
    shapes = _load_named(saved, "zero_pp_rank_0_mp_rank_00_model_states.pt")["param_shapes"]
    parts: dict[str, list[Fragment]] = {}
    for rank in range(ranks):
        file = _optimizer_file(saved, rank)
        for group, names in enumerate(shapes):
            states = {
                "fp32": file["fp32_flat_groups"][group],
                **file["optimizer_state_dict"]["state"][group],
            }
            # The rank's shares of the group's parameters lie end to end, in the order of their names.
            start = 0
            for name, shape in names.items():
                share = math.ceil(shape.numel() / ranks)  # with the padding
                used = max(0, min(share, shape.numel() - rank * share))
                parts.setdefault(name, []).append(Fragment(states, start, used))
                start += share
    return parts


def _optimizer_file(saved: checkpoint.Saved, rank: int) -> dict[str, Any]:
    return _load_named(saved, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")[
        "optimizer_state_dict"
    ]


def _load_named(saved: checkpoint.Saved, end: str) -> dict[str, Any]:
    """Load the file whose name ends so; at some ZeRO stages the precision stands before that."""
    return saved.load(next(name for name in saved.meta["files"] if name.endswith(end)))


def _join(fragments: list[Fragment]) -> States:
    """The flat states of a whole parameter; a state that is one number, such as `step`, stays as it is."""
    joined: States = {}
    for key, value in fragments[0].states.items():
        if _is_flat(value):
            # Ranks hold pieces in the order of their numbers, which is that of the parameter's elements.
            pieces = [
                part.states[key].reshape(-1).narrow(0, part.start, part.numel) for part in fragments
            ]
            joined[key] = torch.cat(pieces).float()
        else:
            joined[key] = value
    return joined


def _is_flat(value: Any) -> bool:
    """Return True for a state with one number per element of the parameter, unlike a count of steps."""
    return isinstance(value, Tensor) and value.dim() > 0


# How each ZeRO stage of the engine holds a parameter, and thus what of it this rank takes.


def _into_whole(engine: Engine) -> Put:
    def put(parameter: nn.Parameter, states: States) -> None:
        _fill(engine.optimizer, parameter, states, 0, 0, parameter.numel())

    return put


def _into_partitions(engine: Engine) -> Put:
    zero = engine.optimizer
    groups = {
        parameter: number for number, group in enumerate(zero.bit16_groups) for parameter in group
    }

    def put(parameter: nn.Parameter, states: States) -> None:
        flat, start, place, numel = zero.single_partition_of_fp32_groups[groups[parameter]], 0, 0, 0
        mapping = getattr(parameter, "_hp_mapping", None)
        # A parameter without a mapping is another rank's. Copying none of it still creates the states of this rank's
        # flat memory, which DeepSpeed expects even where that is nothing but padding.
        if mapping is not None:
            start, place = mapping.lp_fragment_address.start, mapping.hp_fragment_address.start
            numel = mapping.hp_fragment_address.numel
        _fill(zero.optimizer, flat, states, start, place, numel)

    return put


def _into_shards(engine: Engine) -> Put:
    zero = engine.optimizer

    def put(
        parameter: Any, states: States
    ) -> None:  # a Parameter, to which ZeRO 3 has added fields
        group, place, share = zero.grad_position[zero.get_param_id(parameter)]
        # The share of the last ranks reaches beyond the parameter's end, where there is only padding.
        start = min(comm.rank() * share, parameter.ds_numel)
        used = min(share, parameter.ds_numel - start)
        _fill(zero.optimizer, zero.fp32_partitioned_groups_flat[group], states, start, place, used)
        parameter.ds_tensor.data.view(-1)[:used].copy_(states["fp32"][start : start + used])
        if parameter.numel():  # small parameters stay gathered, so the whole value is set too
            parameter.data.view(-1).copy_(states["fp32"])

    return put


def _fill(
    optimizer: torch.optim.Optimizer,
    held: Tensor,
    states: States,
    start: int,
    place: int,
    numel: int,
) -> None:
    """Copy `numel` elements of a parameter, from `start`, to `place` in the memory that the optimizer steps and states.

    Args: held: the tensor that the optimizer has for a parameter: the whole parameter, or flat memory of many.
    """
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
    """Continue with the saved loss scale if both shapes have one. Collective."""
    if saved.meta["shape"]["precision"] == "fp16" and engine.fp16_enabled():
        read = partial(_optimizer_file, saved, 0)
        engine.optimizer.loss_scaler = comm.from_rank_0(
            f"checkpoint {saved.path}", lambda: read()["loss_scaler"]
        )
