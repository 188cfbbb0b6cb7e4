"""Groups of parameters with their learning rate and weight decay, by tower and by layer.

Which parameters are decayed is decided only here. The optimizer itself is built in training/engine.py.
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
"""A group_matcher, as timm calls it, for open_clip's own towers and Hugging Face's; timm's models have their own."""


def parameter_groups(model: nn.Module, settings: OptimSettings) -> list[dict[str, Any]]:
    """The trained parameters as optimizer groups: matrices (decayed), vectors and the scale (not decayed).

    Each group has a `name`, its `weight_decay`, and `lr_factor`, which multiplies the learning rate. If a tower has
    settings of its own there is a group for each tower, and with `layer_decay` one for each layer (stem, blocks, the
    rest). No group is empty, because DeepSpeed would drop it and renumber the others; a group is found by its name.

    Raises: ValueError for `layer_decay` on a tower whose layers are unknown.
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
        labels = [side if split else "", kind, str(depth) if side in layers else ""]
        group = groups.setdefault(
            (KINDS.index(kind), labels[0], depth),
            {"name": " ".join(filter(None, labels)), "params": [], "weight_decay": decay, "lr_factor": factor},
        )
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def _is_visual(name: str) -> bool:
    """Return True for a parameter of the image tower. In open_clip's CLIP those of the text tower have no prefix."""
    return name.startswith("visual.")


def number_layers(model: Any, side: str) -> dict[str, int]:
    """The layer of each parameter of this tower: 0 is the stem, then come the blocks, then all that follows them.

    Raises: ValueError if no blocks are found.
    """
    matcher: Any = LAYERS
    tower, prefix = (model.visual, "visual.") if side == "image" else (model, "")
    if side == "image" and hasattr(tower, "trunk"):
        tower, prefix = tower.trunk, "visual.trunk."
        matcher = tower.group_matcher() if hasattr(tower, "group_matcher") else {}
    found = {prefix + name: layer for name, layer in group_parameters(tower, matcher, reverse=True).items()}
    last = max(found.values())
    if last < 2:
        raise ValueError(f"optim.{side}.layer_decay: the layers of this model's {side} tower are unknown; leave it out")
    # Parameters that follow a trunk are not part of it, so they get the last layer.
    own = (name for name, _ in model.named_parameters() if _is_visual(name) == (side == "image"))
    return {name: found.get(name, last) for name in own if name not in SCALES}
