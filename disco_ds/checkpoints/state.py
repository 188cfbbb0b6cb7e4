"""Read the tensors of a checkpoint by parameter name, for resume, evaluation and export.

At ZeRO 1 to 3, each rank has written fragments of the fp32 weights and of the optimizer's states. `read_fragments`
finds them at every ZeRO stage. A run that resumes with the same number of ranks, ZeRO stage and precision needs only
the fragments in this rank's file. Otherwise, each rank copies the parts that it needs from the files of all ranks. The
files are memory-mapped, so nothing else is read, and extra memory is needed for only one parameter.

The code uses the file keys and the optimizer attributes of DeepSpeed 0.19.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine as Engine
from open_clip.model import resize_pos_embed
from torch import Tensor, nn

from disco_ds.checkpoints.checkpoint import Checkpoint
from disco_ds.config import Tree
from disco_ds.distributed import comm, deepspeed_quirks

AVERAGE = "ema"
"""Name of the optimizer state that contains the exponential moving average of the weights."""
POSITIONS = "visual.positional_embedding"
"""Name of the image tower's position embedding, the only parameter whose size depends on the image size."""
NOT_LOADED = ("betas", "eps", "lr_factor", "momentum", "names", "params", "weight_decay")
"""Keys of optimizer parameter groups whose values come from this run's settings on resume, not from the checkpoint.

The learning rate is not listed, because it is set before every update.
"""
SAME_SHAPE_ONLY = "so the run can only be resumed with the same number of ranks, ZeRO stage, precision and image size"

States = dict[str, Any]
"""The fp32 value (key `fp32`) and the optimizer states (exp_avg, step, ...) of one parameter or of a flat tensor.

A flat tensor is the concatenation of many parameters.
"""


class Fragment(NamedTuple):
    """A contiguous part of a parameter in a file."""

    states: States
    start: int
    """Index, within the parameter, of the part's first element."""
    position: int
    """Index of that element in the flat `states`."""
    numel: int
    """Number of elements in the part. It may be 0."""


Fragments = dict[str, list[Fragment]]
"""The fragments of each trained parameter, in rank order, keyed by the parameter's name."""


class LocalPart(NamedTuple):
    """The part of a parameter that this rank trains."""

    tensor: Tensor
    """The tensor that the optimizer updates. At ZeRO 1 to 3, it contains the parts of many parameters."""
    start: int
    """Index, within the parameter, of the part's first element."""
    position: int
    """Index of that element in `tensor`."""
    numel: int
    """Number of elements in the part. It may be 0."""


def read_fragments(saved: Checkpoint, ranks: Iterable[int] | None = None) -> Fragments:
    """Return the fragments of each trained parameter, in rank order.

    Args:
        saved: The checkpoint.
        ranks: The ranks whose files are read; None means all.

    Raises:
        DamagedError: If a file has changed since it was written, or cannot be read.
    """
    shape = saved.meta["shape"]
    num_ranks, stage = shape["ranks"], shape["stage"]
    fragments: Fragments = defaultdict(list)
    if stage == 0:
        file, optimizer = load_optimizer(saved, 0)
        # The optimizer numbers the parameters in the order of its groups.
        names = chain.from_iterable(group["names"] for group in optimizer["param_groups"])
        for number, name in enumerate(names):
            value = file["module"][name]
            states = {"fp32": value, **optimizer["state"].get(number, {})}
            fragments[name].append(Fragment(states, 0, 0, value.numel()))
        return fragments
    shapes = load_model(saved)["param_shapes"]
    flat = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for rank in range(num_ranks) if ranks is None else ranks:
        file, optimizer = load_optimizer(saved, rank)
        for group, sizes in enumerate(shapes):
            # The optimizer sees a group as one flat tensor, so its states are flat too.
            states = {"fp32": file[flat][group], **optimizer["state"].get(group, {})}
            offset = 0
            for number, (name, size) in enumerate(sizes.items()):
                length = size.numel()
                if stage == 3:
                    # This rank's shares of the parameters are concatenated. The shares of the last ranks are padded.
                    share = math.ceil(length / num_ranks)
                    start, _, numel = find_overlap(0, length, rank, share)
                    fragments[name].append(Fragment(states, start, offset, numel))
                    offset += share
                else:
                    # The parameters are concatenated and divided evenly among the ranks.
                    part_size = len(file[flat][group]) + file["group_paddings"][group]
                    part = find_overlap(offset, length, rank, part_size)
                    fragments[name].append(Fragment(states, *part))
                    offset += length + file["param_alignment_paddings"][group][number]
    return fragments


def find_overlap(offset: int, numel: int, rank: int, part_size: int) -> tuple[int, int, int]:
    """Find which part of a parameter a rank holds.

    Args:
        offset: Position of the parameter in the concatenation that is divided among the ranks: at ZeRO 1 and 2, that of
            its group. At ZeRO 3, each parameter is divided separately, so this is 0.
        numel: Number of elements of the parameter.
        rank: The rank.
        part_size: Number of elements that each rank holds.

    Returns:
        Index of the part's first element within the parameter and within the rank's elements, and the part's number of
        elements, which may be 0.
    """
    first = rank * part_size
    begin = max(offset, first)
    end = min(offset + numel, first + part_size)
    if begin >= end:
        return 0, 0, 0
    return begin - offset, begin - first, end - begin


def load_model(saved: Checkpoint, rank: int = 0) -> Tree:
    """Load the model-states file, in which DeepSpeed saves buffers, frozen parameters and counters."""
    prefix = f"zero_pp_rank_{rank}_" if saved.meta["shape"]["stage"] == 3 else ""
    return saved.load_ending(f"/{prefix}mp_rank_00_model_states.pt")


def load_optimizer(saved: Checkpoint, rank: int) -> tuple[Tree, Tree]:
    """Load the file with a rank's optimizer states. Return its content and the base optimizer's state_dict in it."""
    stage = saved.meta["shape"]["stage"]
    if stage == 0:
        file = load_model(saved)
        return file, file["optimizer"]
    file = saved.load_ending(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    file = file["optimizer_state_dict"]
    return file, file["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]


def join(fragments: list[Fragment], key: str) -> Any:
    """Join a parameter's fragments into one whole, flat fp32 state. A single number, such as `step`, is unchanged.

    Args:
        fragments: The fragments, in rank order.
        key: The state to join.

    Raises:
        ValueError: If the state is a tensor that does not have one number per element of the parameter.
    """
    value = fragments[0].states[key]
    if not is_flat(value):
        return value
    return torch.cat([_narrow(each, key, 0, each.numel) for each in fragments]).float()


def is_flat(value: Any) -> bool:
    """Return whether a state has one number per element of a parameter: True for exp_avg, False for `step`."""
    return isinstance(value, Tensor) and value.dim() > 0


def _narrow(fragment: Fragment, key: str, start: int, numel: int) -> Tensor:
    """Return a part of a state, from an element of the fragment on.

    Raises:
        ValueError: If the state does not have one number per element of the parameter.
    """
    value, weight = fragment.states[key], fragment.states["fp32"]
    # At ZeRO 1 and 2, the last rank's states contain padding, which its weights lack.
    if value.shape[1:] != weight.shape[1:] or len(value) < len(weight):
        raise ValueError(
            f"the optimizer's state {key} does not have one number per element, {SAME_SHAPE_ONLY}"
        )
    return value.reshape(-1).narrow(0, fragment.position + start, numel)


def read_tensors(saved: Checkpoint, ema: bool = False) -> dict[str, Tensor]:
    """Return every parameter and buffer of a checkpoint by name. Trained parameters have their fp32 values.

    If modules share a trained parameter, use only the value under its first name.

    Args:
        saved: The checkpoint.
        ema: Whether to return the moving average of the trained parameters (optim.ema) instead of their last values.

    Raises:
        DamagedError: If a file has changed since it was written, or cannot be read.
        ValueError: If the checkpoint has no average.
    """
    fragments = read_fragments(saved)
    key = AVERAGE if ema else "fp32"
    if not all(key in each.states for each in chain.from_iterable(fragments.values())):
        raise ValueError(
            f"{saved.path} has no average of the weights: it was saved without optim.ema"
        )
    model = load_model(saved)
    sizes = {name: value.shape for name, value in model["module"].items()}
    for group in model["param_shapes"] or ():
        sizes |= group
    tensors = read_untrained(saved, fragments.keys())
    for name, parts in fragments.items():
        tensors[name] = join(parts, key).view(sizes[name])
    return tensors


def read_untrained(saved: Checkpoint, trained: Iterable[str], rank: int = 0) -> dict[str, Tensor]:
    """Return the frozen parameters and the buffers of a checkpoint by name.

    At ZeRO 3, the buffers are those of `rank`: statistics of batch normalization differ between ranks.
    """
    stage, num_ranks = saved.meta["shape"]["stage"], saved.meta["shape"]["ranks"]
    model = load_model(saved)
    if stage < 3:
        return {name: model["module"][name] for name in model["module"].keys() - set(trained)}
    buffers = load_model(saved, rank)["module"]
    tensors = {name: buffers[name] for name in model["buffer_names"]}
    frozen = model["frozen_param_shapes"]
    files = [load_model(saved, rank) for rank in range(num_ranks if frozen else 0)]
    for name, size in frozen.items():
        # Each rank holds an equal share. The shares of the last ranks are padded.
        shares = [file["frozen_param_fragments"][name].reshape(-1) for file in files]
        tensors[name] = torch.cat(shares)[: size.numel()].view(size)
    return tensors


def load_untrained(saved: Checkpoint, model: nn.Module) -> None:
    """Load a checkpoint's frozen parameters and buffers into a model that has no engine yet. Collective.

    Args:
        saved: A verified checkpoint.
        model: The model, before an engine partitions it.

    Raises:
        ValueError: On every rank, if a file cannot be read.
    """
    with comm.all_or_none(f"checkpoint {saved.path}"):
        tensors = model.state_dict()
        trained = {name for name, each in model.named_parameters() if each.requires_grad}
        rank = comm.rank() if saved.meta["shape"]["ranks"] == comm.size() else 0
        for name, value in read_untrained(saved, trained, rank).items():
            if value.numel() != tensors[name].numel():
                value = resize({"fp32": value}, model)["fp32"]
            tensors[name].copy_(value.view_as(tensors[name]))


@torch.no_grad()
def load_trained(saved: Checkpoint, engine: Engine, is_same: bool) -> None:
    """Load a checkpoint's trained parameters, optimizer states and counters into an engine of any shape. Collective.

    Args:
        saved: A verified checkpoint.
        engine: The engine. Call load_untrained on its model first.
        is_same: Whether the run that wrote the checkpoint had the same number of ranks, ZeRO settings, precision and
            image size. Each rank then reads only its own file, and the engine's state is bit-identical to the saved
            state.

    Raises:
        ValueError: On every rank, if the files cannot be read or do not contain this model's parameters.
    """
    with comm.all_or_none(f"checkpoint {saved.path}"):
        fragments = read_fragments(saved, [comm.rank()] if is_same else None)
        parameters = dict(engine.module.named_parameters())
        states: dict[Tensor, States] = defaultdict(dict)
        for name, parts in fragments.items():
            parameter = parameters[name]
            local = find_local(engine, parameter)
            numel = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO 3 sets ds_numel
            if not is_same and sum(each.numel for each in parts) != numel:
                whole = {key: join(parts, key) for key in parts[0].states}
                parts = [Fragment(resize(whole, engine.module), 0, 0, numel)]
            _copy_states(parts, local, is_same, states[local.tensor])
        file, optimizer = load_optimizer(saved, comm.rank() if is_same else 0)
        _load_optimizer_states(engine, states, optimizer["param_groups"])
        if saved.meta["shape"]["precision"] == "fp16" and engine.fp16_enabled():
            engine.optimizer.loss_scaler = file["loss_scaler"]
        counters = load_model(saved)
        for name in ("global_steps", "global_samples", "skipped_steps"):
            setattr(engine, name, counters[name])
    deepspeed_quirks.refresh_weights(engine)


def _copy_states(
    fragments: list[Fragment], local: LocalPart, is_same: bool, states: States
) -> None:
    """Copy this rank's part of a parameter from the fragments to the weights and to the optimizer states.

    Args:
        fragments: Fragments of the parameter that contain this rank's part.
        local: The part.
        is_same: As in load_trained.
        states: The new optimizer states of local.tensor, to which this part is added.
    """
    weight, start, position, numel = local
    for fragment in fragments:
        first = max(fragment.start, start)
        end = min(fragment.start + fragment.numel, start + numel)
        for key, value in fragment.states.items():
            if key == "fp32":
                target = weight
            elif not is_flat(value) or (is_same and value.shape != weight.shape):
                states[key] = value.clone() if isinstance(value, Tensor) else value
                continue
            else:
                if key not in states:
                    states[key] = torch.zeros_like(weight)
                target = states[key]
            if first < end:
                flat = target.reshape(-1)
                source = _narrow(fragment, key, first - fragment.start, end - first)
                flat.narrow(0, position + first - start, end - first).copy_(source)
                if flat.data_ptr() != target.data_ptr():  # a parameter in channels_last
                    target.copy_(flat.view(target.shape))


def _load_optimizer_states(
    engine: Engine, states: dict[Tensor, States], groups: list[Tree]
) -> None:
    """Load states and parameter groups into the optimizer by its own load_state_dict, which may be a custom one.

    Args:
        engine: The engine.
        states: The states of each tensor that the optimizer updates.
        groups: The parameter groups of the checkpoint. Some optimizers, such as LAMB, keep their number of steps there.
    """
    optimizer, zero = engine.basic_optimizer, engine.optimizer
    is_sharded = engine.zero_optimization_stage() == 3
    if is_sharded:
        zero._set_fp32_optimizer_param_groups()
    content = optimizer.state_dict()
    tensors = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    content["state"] = {
        number: states[tensor] for number, tensor in enumerate(tensors) if states[tensor]
    }
    saved = {group["name"]: group for group in groups}
    for group in content["param_groups"]:
        group |= {
            key: value
            for key, value in saved.get(group["name"], {}).items()
            if key not in NOT_LOADED
        }
    optimizer.load_state_dict(content)
    if is_sharded:
        zero._clear_fp32_optimizer_param_groups()


def resize(states: States, model: Any) -> States:
    """Resize the states of the image tower's position embedding to the model's image size.

    The weights and their moving average are resized bicubically, as in open_clip. The optimizer's moments are resized
    bilinearly. Unlike bicubic resizing, bilinear resizing keeps second moments positive. It also keeps first moments
    within the square root of their second moments.
    """
    resized = dict(states)
    for key, value in states.items():
        if is_flat(value):
            named = {POSITIONS: value.view(-1, model.visual.conv1.out_channels)}
            resize_pos_embed(named, model, "bicubic" if key in ("fp32", AVERAGE) else "bilinear")
            resized[key] = named[POSITIONS].reshape(-1)
    return resized


def find_local(engine: Engine, parameter: Any) -> LocalPart:
    """Find the part of a parameter that this rank trains."""
    zero = engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return LocalPart(parameter, 0, 0, parameter.numel())
    if stage == 3:
        group, position, share = zero.grad_position[zero.get_param_id(parameter)]
        # The shares of the last ranks may extend beyond the end of the parameter, as padding.
        start, _, numel = find_overlap(0, parameter.ds_numel, comm.rank(), share)
        return LocalPart(zero.fp32_partitioned_groups_flat[group], start, position, numel)
    # DeepSpeed's own parameter._hp_mapping is wrong with round_robin_gradients.
    for group, parameters in enumerate(zero.round_robin_bit16_groups):
        offsets = dict(zip(parameters, zero.round_robin_bit16_offsets[group], strict=True))
        if parameter in offsets:
            flat = zero.single_partition_of_fp32_groups[group]
            part = find_overlap(offsets[parameter], parameter.numel(), comm.rank(), flat.numel())
            return LocalPart(flat, *part)
    raise KeyError("the engine does not train this parameter")
