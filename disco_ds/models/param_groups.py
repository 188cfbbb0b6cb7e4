"""Optimizer groups: parameters by kind, tower and layer, with a learning-rate factor and a weight decay each.

This is the only place that decides which parameters get weight decay. training/engine.py builds the optimizer.
"""

import re
from typing import Any

import torch
from timm.models import group_parameters
from torch import nn

from disco_ds.config import OptimSettings
from disco_ds.distributed.comm import DTYPES

PARAMETER_DTYPES = DTYPES | {"autocast": torch.float32}
"""Maps the precision in the ds_config to the dtype of the parameters."""
SCALES = ("logit_scale", "logit_bias")
"""Names of the parameters that belong to neither tower."""
KINDS = ("muon", "matrices", "vectors", "scale")
"""Kinds of parameters, in the order of their groups."""
PATH = r"(?!visual\.)(?:\w+\.)*?"
"""Regular expression for the start of the name of a parameter outside the image tower, for use in BLOCKS."""
HIDDEN = r"(?<!\bproj)\.\d+\..*weight$"
"""Regular expression for the weights that Muon may update: those in numbered layers, such as `blocks.0.`.

A number directly after `proj`, as in `proj.0.`, does not count as the number of a layer.
"""
POSITIONS = r"(pos_embed|positional_embedding|position_embeddings?|relative_\w*bias\w*)(\.weight)?$"
"""Regular expression for the names of position embeddings, absolute or relative."""
STEM = (
    r"(?:text\.)?(?:conv\d|bn\d|ln_pre|class_embedding|cls_emb|positional_embedding"
    r"|transformer\.embeddings)\b"
)
BLOCKS = [
    (PATH + r"layer(\d)\.(\d+)\.", None),
    (PATH + r"(?:resblocks|layers?|blocks?|h)\.(\d+)\.", None),
]
"""Patterns for the layers of open_clip and Hugging Face towers, in the format of timm's group_matcher.

timm's own models have a method that returns their patterns.
"""


def parameter_groups(model: nn.Module, settings: OptimSettings) -> list[dict[str, Any]]:
    """Return the trained parameters as optimizer groups.

    There are three kinds of groups: matrices, which get weight decay, and vectors and the scale, which get none.
    Position embeddings and parameters that a module's `no_weight_decay()` names are grouped with the vectors. With
    optim.name=muon, the matrices that Muon updates are a fourth kind, and `muon` is True in their groups. If the
    settings of the towers differ, each tower gets separate groups. With `layer_decay`, each layer of a tower (the stem,
    each block, the rest) gets separate groups. Each group has a unique `name`, the `names` of its parameters, a
    `weight_decay`, and an `lr_factor`, which multiplies the learning rate. No group is empty, because DeepSpeed would
    drop it and renumber the others.

    Raises:
        ValueError: If `layer_decay` is set for a tower whose layers are unknown, or if optim.name=muon finds no matrix.
    """
    towers = {"image": settings.image, "text": settings.text}
    layers = {
        side: number_layers(model, side) for side, tower in towers.items() if tower.layer_decay < 1
    }
    split = settings.image != settings.text or bool(layers)
    undecayed = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if hasattr(module, "no_weight_decay")
        for name in module.no_weight_decay()
    }
    embeddings = find_embeddings(model)
    groups: dict[tuple[int, str, int], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind, side, depth, lr_factor, weight_decay = "scale", "", 0, 1.0, 0.0
        if name not in SCALES:
            # A vector may have more dimensions, all but one of size 1, such as MobileCLIP's layer_scale.gamma.
            is_vector = parameter.numel() == max(parameter.shape, default=1)
            is_vector = is_vector or name in undecayed or bool(re.search(POSITIONS, name))
            kind = "vectors" if is_vector else "matrices"
            # In open_clip's CLIP, the parameters of the text tower have no common prefix.
            side = "image" if name.startswith("visual.") else "text"
            tower = towers[side]
            lr_factor = tower.lr_factor
            # The filters of a depthwise convolution, [channels, 1, h, w], are not treated as a matrix.
            is_matrix = parameter.ndim == 2 or (parameter.ndim == 4 and parameter.shape[1] > 1)
            is_hidden = re.search(HIDDEN, name) and name not in embeddings
            if settings.name == "muon" and is_matrix and not is_vector and is_hidden:
                kind = "muon"
            if not is_vector:
                weight_decay = settings.weight_decay
                if tower.weight_decay is not None:
                    weight_decay = tower.weight_decay
            if side in layers:
                depth = layers[side][name]
                lr_factor *= tower.layer_decay ** (max(layers[side].values()) - depth)
        prefix = side if split else ""
        suffix = str(depth) if side in layers else ""
        group = groups.setdefault(
            (KINDS.index(kind), prefix, depth),
            {
                "name": f"{prefix} {kind} {suffix}".strip(),
                "params": [],
                "names": [],
                "weight_decay": weight_decay,
                "lr_factor": lr_factor,
                "muon": kind == "muon",
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    if settings.name == "muon" and not any(group["muon"] for group in groups.values()):
        raise ValueError(
            "optim.name=muon: no trained weight matrix of this model is in a numbered layer, such as blocks.0; "
            "use optim.name=adamw"
        )
    return [groups[key] for key in sorted(groups)]


def find_embeddings(model: nn.Module) -> set[str]:
    """Return the names of the weights of all embeddings, such as the token embedding."""
    modules = model.named_modules()
    return {f"{name}.weight" for name, module in modules if isinstance(module, nn.Embedding)}


def number_layers(model: Any, side: str) -> dict[str, int]:
    """Return the layer number of each parameter of a tower.

    The stem and all embeddings are layer 0, the blocks are layers 1 to n, and everything else is layer n + 1.

    Raises:
        ValueError: If no blocks are found.
    """
    tower, prefix = (model.visual, "visual.") if side == "image" else (model, "")
    embeddings = (re.escape(name.removeprefix(prefix)) for name in find_embeddings(model))
    matcher: Any = {"stem": "|".join([STEM, *sorted(embeddings)]), "blocks": BLOCKS}
    if side == "image" and hasattr(tower, "trunk"):
        tower, prefix = tower.trunk, "visual.trunk."
        matcher = tower.group_matcher() if hasattr(tower, "group_matcher") else {}
    layers = {
        prefix + name: layer
        for name, layer in group_parameters(tower, matcher, reverse=True).items()
    }
    last = max(layers.values())
    if last < 2:
        raise ValueError(
            f"optim.{side}.layer_decay: the layers of this model's {side} tower are unknown; "
            "omit the setting"
        )
    # Parameters after a trunk are not in `layers`. They get the number of the last layer.
    return {
        name: layers.get(name, last)
        for name, _ in model.named_parameters()
        if name.startswith("visual.") == (side == "image") and name not in SCALES
    }
