"""Finds the modules of a model that draw random numbers in training, and refuses to compile them where it is unsafe.

GradAccum runs a micro-batch's forward twice, without gradients and with them, and restores the generators in between.
torch.compile makes a graph of each, and random numbers of two graphs need not be equal: their order is the compiler's
(pytorch issue 192635), and on CUDA so are their offsets, up to wrong masks (issue 198333, also for activation
checkpointing). That they have been equal on a CPU proves nothing for a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from disco_ds.config import Config
from disco_ds.models.clip import trained_sides
from disco_ds.models.flops import forward_on_meta


def check_compiled(config: Config, model: Any, ranks: int) -> None:
    """Refuse a compiled model whose forward is repeated and draws random numbers.

    Args:   model: open_clip's, before an engine has it.
    Raises: ValueError naming the modules, and what to change.
    """
    count, saves = config.num_micro_batches(ranks), config.model.activation_checkpointing
    if not config.model.compile or not (count > 1 or saves):
        return
    try:
        names = find_draws(model)
    except Exception as error:  # a module may need real data, not only shapes
        found = f"which may draw random numbers: tracing it failed ({type(error).__name__}: {error})"
    else:
        if not names:
            return
        found = f"which draws random numbers in {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    why = f"{count} micro-batches" if count > 1 else "activation checkpointing"
    raise ValueError(
        f"model.compile with {why} is refused for model {config.model.label}, {found}: its forward is repeated, and a "
        "compiled one need not draw the same again; set model.compile=false, or take the randomness out "
        "(model.patch_dropout=0, and no dropout or drop path in the model's config), or give each rank its part of "
        "the global batch as one micro-batch, without model.activation_checkpointing"
    )


def find_draws(model: Any) -> list[str]:
    """Names of the innermost modules of the trained towers that draw random numbers in training."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        with Draws() as draws:
            for side, trains in trained_sides(model).items():
                if trains:
                    forward_on_meta(model, side)
    finally:
        for module, training in modes.items():
            module.training = training
    return list(draws.names)


class Draws(TorchDispatchMode):
    """Collects the modules that call an operation which draws from a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}
        self._modules = ModuleTracker()

    def __enter__(self) -> Draws:
        self._modules.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._modules.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            innermost = max(self._modules.parents, key=lambda name: name.count("."))
            self.names[innermost.partition(".")[2] or innermost] = None
        return func(*args, **(kwargs or {}))
