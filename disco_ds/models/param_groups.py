"""Which parameters the optimizer treats alike: a tower's learning rate and weight decay, and those of its layers.

The only place that says what is decayed. The optimizer itself is in engine.py.
"""

from __future__ import annotations

from typing import Any

from timm.models import group_parameters
from torch import nn

from disco_ds.config import OptimSettings

SCALES = ("logit_scale", "logit_bias")
KINDS = ("matrices", "vectors", "scale")
PATH = r"(?!visual\.)(?:\w+\.)*"
LAYERS = {
    "stem": r"(?:text\.)?(?:conv\d|bn\d|ln_pre|class_embedding|cls_emb|positional_embedding|token_embedding"
    r"|transformer\.embeddings)\b",
    "blocks": [(PATH + r"layer(\d)\.(\d+)\.", None), (PATH + r"(?:resblocks|layers?|blocks?|h)\.(\d+)\.", None)],
}
"""Of open_clip's own towers and of Hugging Face's, as timm's group_matcher; timm's models bring their own."""


def parameter_groups(model: nn.Module, settings: OptimSettings) -> list[dict[str, Any]]:
    """Trained parameters as optimizer groups: matrices (decayed), vectors and the scale (not decayed).

    Each has a `name`, its `weight_decay`, and `lr_factor`, by which the learning rate is multiplied. Where a tower has
    settings of its own there is a group for each tower, and with `layer_decay` for each layer (stem, blocks, the rest).
    DeepSpeed drops empty groups and renumbers, so none is empty, and a group is found by its name.

    Raises: ValueError for `layer_decay` on a tower whose layers are not known.
    """
    towers = {"image": settings.image, "text": settings.text}
    layers = {side: number_layers(model, side) for side, tower in towers.items() if tower.layer_decay < 1}
    split = settings.image != settings.text or bool(layers)
    groups: dict[tuple[int, str, int], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind, side, depth, factor, decay = "scale", "", 0, 1.0, 0.0
        if name not in SCALES:
            kind, side = "matrices" if parameter.ndim >= 2 else "vectors", "image" if _is_visual(name) else "text"
            tower, factor = towers[side], towers[side].lr_factor
            if kind == "matrices":
                decay = settings.weight_decay if tower.weight_decay is None else tower.weight_decay
            if side in layers:
                depth = layers[side][name]
                factor *= tower.layer_decay ** (max(layers[side].values()) - depth)
        words = [side if split else "", kind, str(depth) if side in layers else ""]
        group = groups.setdefault(
            (KINDS.index(kind), words[0], depth),
            {"name": " ".join(filter(None, words)), "params": [], "weight_decay": decay, "lr_factor": factor},
        )
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def _is_visual(name: str) -> bool:
    """open_clip's CLIP keeps its text tower's parameters beside its own."""
    return name.startswith("visual.")


def number_layers(model: Any, side: str) -> dict[str, int]:
    """Parameter of this tower -> its layer: 0 the stem, then the blocks, last what follows them.

    Raises: ValueError where no blocks are found.
    """
    matcher: Any = LAYERS
    tower, prefix = (model.visual, "visual.") if side == "image" else (model, "")
    if side == "image" and hasattr(tower, "trunk"):
        tower, prefix = tower.trunk, "visual.trunk."
        matcher = tower.group_matcher() if hasattr(tower, "group_matcher") else {}
    found = {prefix + name: layer for name, layer in group_parameters(tower, matcher, reverse=True).items()}
    last = max(found.values())
    if last < 2:
        raise ValueError(
            f"optim.{side}.layer_decay: the layers of this model's {side} tower are not known; leave it out"
        )
    # What follows a trunk is not in it.
    own = (name for name, _ in model.named_parameters() if _is_visual(name) == (side == "image"))
    return {name: found.get(name, last) for name in own if name not in SCALES}
