"""Find the fp32 value and the optimizer states of each trained parameter in the files of a checkpoint.

At ZeRO 1 to 3, each rank has written fragments of these tensors. The code uses the file keys of DeepSpeed 0.19.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from disco_ds.checkpoints.checkpoint import Saved
from disco_ds.checkpoints.retention import ENGINE

WHOLE = f"{ENGINE}/mp_rank_00_model_states.pt"
"""File with all parameters and buffers of the model. Checkpoints from ZeRO 0, 1 and 2 contain it."""

AVERAGE = "ema"
"""Name of the optimizer state that holds the exponential moving average of the weights."""

States = dict[str, Any]
"""The fp32 value (key `fp32`) and the optimizer states (exp_avg, step, ...) of one parameter or of a flat tensor.

A flat tensor is the concatenation of many parameters.
"""


@dataclass(frozen=True)
class Fragment:
    """A contiguous part of a parameter: `numel` elements of the flat states of one rank, from index `start`."""

    states: States
    start: int
    numel: int


Parts = dict[str, list[Fragment]]
"""The fragments of each trained parameter, in rank order, keyed by the parameter's name."""


def find_parts(saved: Saved) -> Parts:
    """Return the fragments of each trained parameter, in rank order.

    Raises:
        DamagedError: If a file has changed since it was written, or cannot be read.
        ValueError: If the checkpoint was saved with round_robin_gradients.
    """
    shape = saved.meta["shape"]
    refuse_round_robin(shape["zero_optimization"])
    if shape["stage"] == 0:
        file = saved.load(WHOLE)
        optimizer = file["optimizer"]
        parts = {}
        # The optimizer numbers the parameters in the order of its groups.
        names = chain.from_iterable(group["names"] for group in optimizer["param_groups"])
        for number, name in enumerate(names):
            value = file["module"][name]
            states = {"fp32": value, **optimizer["state"].get(number, {})}
            parts[name] = [Fragment(states, 0, value.numel())]
        return parts
    find = _find_shards if shape["stage"] == 3 else _find_partitions
    return find(saved, shape["ranks"])


def refuse_round_robin(zero: dict[str, Any]) -> None:
    """Raise ValueError if round_robin_gradients is on: DeepSpeed 0.19 then records wrong parameter positions."""
    if zero.get("round_robin_gradients"):
        raise ValueError(
            "with round_robin_gradients, the average of the weights cannot be read, and a run can only be resumed "
            "with the same number of ranks, ZeRO stage, precision and image size"
        )


def _find_partitions(saved: Saved, ranks: int) -> Parts:
    """Find fragments at ZeRO 1 and 2, where a parameter group is one flat tensor and each rank holds a part of it."""
    parts: Parts = {}
    for rank in range(ranks):
        file = load_optimizer(saved, rank)
        for group, addresses in enumerate(file["param_slice_mappings"]):
            states = {"fp32": file["single_partition_of_fp32_groups"][group]}
            # The optimizer sees a group as one flat tensor, so its states are flat too.
            states |= file["base_optimizer_state"]["state"].get(group, {})
            for name, address in addresses.items():
                parts.setdefault(name, []).append(Fragment(states, address.start, address.numel))
    return parts


def _find_shards(saved: Saved, ranks: int) -> Parts:
    """Find fragments at ZeRO 3, where each rank holds an equal share of every parameter.

    The shares of the last ranks are padded.
    """
    shapes = _load_named(saved, "zero_pp_rank_0_mp_rank_00_model_states.pt")["param_shapes"]
    parts: Parts = {}
    for rank in range(ranks):
        file = load_optimizer(saved, rank)
        for group, names in enumerate(shapes):
            states = {"fp32": file["fp32_flat_groups"][group]}
            states |= file["optimizer_state_dict"]["state"].get(group, {})
            # The rank's shares of the group's parameters are concatenated in the order of `names`.
            start = 0
            for name, shape in names.items():
                share = math.ceil(shape.numel() / ranks)  # including padding
                used = max(0, min(share, shape.numel() - rank * share))
                parts.setdefault(name, []).append(Fragment(states, start, used))
                start += share
    return parts


def read_groups(saved: Saved) -> dict[str, dict[str, Any]]:
    """Read the optimizer's parameter groups, keyed by name, without the parameters."""
    stage = saved.meta["shape"]["stage"]
    if stage == 0:
        optimizer = saved.load(WHOLE)["optimizer"]
    else:
        key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        optimizer = load_optimizer(saved, 0)[key]
    return {
        group["name"]: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer["param_groups"]
    }


def read_average(saved: Saved) -> dict[str, Tensor]:
    """Read the exponential moving average (optim.ema) of each trained parameter, as flat tensors keyed by name.

    Raises:
        DamagedError: If a file has changed since it was written, or cannot be read.
        ValueError: If the checkpoint has no average.
    """
    parts = find_parts(saved)
    if not all(AVERAGE in part.states for part in chain.from_iterable(parts.values())):
        raise ValueError(
            f"{saved.path} has no average of the weights: it was saved without optim.ema"
        )
    return {name: join(parts, name)[AVERAGE] for name in parts}


def load_optimizer(saved: Saved, rank: int) -> dict[str, Any]:
    """Load the state of a rank's ZeRO optimizer."""
    file = _load_named(saved, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return file["optimizer_state_dict"]


def _load_named(saved: Saved, end: str) -> dict[str, Any]:
    """Load the file whose name ends with `end`. DeepSpeed prefixes some names with the precision."""
    return saved.load(next(name for name in saved.meta["files"] if name.endswith(end)))


def join(parts: Parts, name: str) -> States:
    """Join a parameter's fragments into flat states. A state that is a single number, such as `step`, is unchanged.

    Raises:
        ValueError: If a state is a tensor that does not have one number per element of the parameter.
    """
    fragments = parts[name]
    joined = dict(fragments[0].states)
    for key, value in joined.items():
        if is_flat(value):
            pieces = [
                part.states[key].reshape(-1)[part.start : part.start + part.numel]
                for part in fragments
            ]
            joined[key] = torch.cat(pieces).float()
            if len(joined[key]) != sum(part.numel for part in fragments):
                raise ValueError(
                    f"the optimizer's state {key} of {name} does not have one number per element, so the run can "
                    "only be resumed with the same number of ranks, ZeRO stage, precision and image size"
                )
    return joined


def is_flat(value: Any) -> bool:
    """Return whether a state has one number per element of a parameter: True for exp_avg, False for `step`."""
    return isinstance(value, Tensor) and value.dim() > 0
