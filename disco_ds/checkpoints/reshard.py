"""Resume from a checkpoint with a different number of ranks, ZeRO stage, precision or image size.

The number of ranks, the ZeRO stage and the precision are together called the shape of a run. DeepSpeed
can load its files only in a run with the same shape as the run that wrote them. This module instead
handles one trained parameter at a time: rank 0 joins the fragments in the files into the whole fp32
value and optimizer states, and broadcasts them. Every rank of the new run copies the part that it holds.
The files are memory-mapped, so each rank needs extra memory for only one parameter.

The code uses the optimizer attributes of DeepSpeed 0.19.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed import DeepSpeedEngine as Engine
from open_clip.model import resize_pos_embed
from torch import Tensor, nn

from disco_ds.checkpoints.checkpoint import Saved
from disco_ds.checkpoints.fragments import (
    AVERAGE,
    Parts,
    States,
    find_parts,
    is_flat,
    join,
    load_optimizer,
    read_groups,
    refuse_round_robin,
)
from disco_ds.checkpoints.weights import read_tensors
from disco_ds.distributed import comm
from disco_ds.distributed.deepspeed_quirks import refresh_weights


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
        found = {name: value.clone() for name, value in read_tensors(saved) if name in wanted}
        if missing := sorted(wanted.keys() - found.keys()):
            raise ValueError(f"it has no value for {', '.join(missing[:5])}")
        return found

    for name, value in comm.from_rank_0(f"checkpoint {saved.path}", read_untrained).items():
        wanted[name].copy_(_resize(model, name, {"fp32": value})["fp32"].view_as(wanted[name]))


def load_trained(saved: Saved, engine: Engine, order: list[str]) -> None:
    """Load a checkpoint's trained parameters into an engine with any number of ranks, ZeRO stage and precision.

    Collective. The random generators are not restored. Random draws, such as dropout, therefore differ from those of an
    uninterrupted run.

    Args:
        saved: A verified checkpoint.
        engine: The engine. Call load_untrained on its model first.
        order: Names of the trained parameters, in the same order on every rank.

    Raises:
        ValueError: On every rank, if the files do not contain this model's parameters.
    """
    what = f"checkpoint {saved.path}"
    parts: Parts = {}
    with comm.all_or_none(what):
        refuse_round_robin({"round_robin_gradients": engine.zero_round_robin_gradients()})
        if comm.rank() == 0:
            parts = find_parts(saved)
    parameters = dict(engine.module.named_parameters())
    with torch.no_grad():
        # All ranks must loop in the same order, because each parameter is broadcast.
        for name in order:
            states = comm.from_rank_0(what, partial(join, parts, name))
            states = _resize(engine.module, name, states)
            _set_states(engine, parameters[name], states)
    # Some optimizers, such as LAMB, keep their number of steps in the parameter groups.
    groups = comm.from_rank_0(what, partial(read_groups, saved))
    for group in engine.basic_optimizer.param_groups:
        group.update(groups.get(group["name"], {}))
    if saved.meta["shape"]["precision"] == "fp16" and engine.fp16_enabled():
        engine.optimizer.loss_scaler = comm.from_rank_0(
            what, lambda: load_optimizer(saved, 0)["loss_scaler"]
        )
    refresh_weights(engine)
    engine.global_steps = saved.step


def _resize(model: Any, name: str, states: States) -> States:
    """Resize the states of the image tower's position embedding to the model's image size.

    The states of other parameters are returned unchanged.

    The weights and their moving average are resized bicubically, as in open_clip. The optimizer's moments are resized
    bilinearly. Unlike bicubic resizing, bilinear resizing keeps second moments positive. It also keeps first moments
    within the square root of their second moments.
    """
    if name != "visual.positional_embedding":
        return states
    resized = dict(states)
    for key, value in states.items():
        if is_flat(value):
            named = {name: value.view(-1, model.visual.conv1.out_channels)}
            resize_pos_embed(named, model, "bicubic" if key in ("fp32", AVERAGE) else "bilinear")
            resized[key] = named[name].reshape(-1)
    return resized


def _set_states(engine: Engine, parameter: Any, states: States) -> None:
    """Copy this rank's part of a parameter's states into the engine.

    Args:
        engine: The engine.
        parameter: The parameter, to which DeepSpeed has added attributes.
        states: Flat states of the whole parameter.
    """
    held, start, place, numel = find_place(engine, parameter)
    kept = engine.basic_optimizer.state[held]
    for key, value in states.items():
        if not is_flat(value):
            kept[key] = value.to(held.device, copy=True) if isinstance(value, Tensor) else value
            continue
        if key != "fp32" and key not in kept:
            kept[key] = torch.zeros_like(held.data)
        target = held.data if key == "fp32" else kept[key]
        target.view(-1).narrow(0, place, numel).copy_(value.narrow(0, start, numel))


def find_place(engine: Engine, parameter: Any) -> tuple[Tensor, int, int, int]:
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
        # The shares of the last ranks may extend beyond the end of the parameter, as padding.
        start = min(comm.rank() * share, parameter.ds_numel)
        numel = min(share, parameter.ds_numel - start)
        return zero.fp32_partitioned_groups_flat[group], start, place, numel
    groups = [any(each is parameter for each in group) for group in zero.bit16_groups]
    flat = zero.single_partition_of_fp32_groups[groups.index(True)]
    mapping = getattr(parameter, "_hp_mapping", None)
    # A parameter without a mapping is held by other ranks only. Copying 0 elements still makes _set_states
    # create the states of this rank's flat tensor. DeepSpeed expects them even if that tensor is all padding.
    if mapping is None:
        return flat, 0, 0, 0
    part = mapping.hp_fragment_address
    return flat, mapping.lp_fragment_address.start, part.start, part.numel
