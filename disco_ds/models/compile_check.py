"""Refuse torch.compile for a model whose forward is repeated and draws random numbers.

GradAccum runs the forward of a micro-batch twice, first without gradients and then with gradients, from the same
generator states. torch.compile builds a separate graph for each run, and the two graphs may draw different numbers:
the compiler chooses the order of the draws (pytorch issue 192635) and on CUDA also their offsets, which caused wrong
masks (issue 198333, also with activation checkpointing). A test on a CPU in which the numbers are equal proves nothing
for a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from disco_ds.config import Config
from disco_ds.models.clip import forward_on_meta, trained_sides


def check_compiled(config: Config, model: Any, ranks: int) -> None:
    """Refuse a compiled model whose forward is repeated and draws random numbers.

    Args:
        config: The recipe.
        model: The model, before an engine wraps it.
        ranks: Number of ranks.

    Raises:
        ValueError: If the model is refused. The message names the modules and says what to change.
    """
    count = config.num_micro_batches(ranks)
    if not config.model.compile or (count == 1 and not config.model.activation_checkpointing):
        return
    try:
        names = find_draws(model)
    except Exception as error:  # a module may need real data, not only shapes
        problem = f"may draw random numbers: tracing it failed ({type(error).__name__}: {error})"
    else:
        if not names:
            return
        problem = f"draws random numbers in {', '.join(names[:3])}"
    repeated_by = f"{count} micro-batches" if count > 1 else "activation checkpointing"
    raise ValueError(
        f"model.compile with {repeated_by} is refused for model {config.model.label}, which "
        f"{problem}. A repeated forward that is compiled may draw other numbers. Set "
        "model.compile=false; or remove the randomness (model.patch_dropout=0, and no dropout or "
        "drop path in the model's config); or use one micro-batch per rank without "
        "model.activation_checkpointing"
    )


def find_draws(model: Any) -> list[str]:
    """Return the names of the modules in trained towers that draw random numbers during training.

    The model is left in training mode.
    """
    model.train()
    with ModuleTracker() as tracker, Draws(tracker) as draws:
        for side, trains in trained_sides(model).items():
            if trains:
                forward_on_meta(model, side)
    return list(draws.names)


class Draws(TorchDispatchMode):
    """Collect the names of the innermost modules that call an operation that draws from a generator."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            innermost = max(self.tracker.parents, key=lambda name: name.count("."))
            self.names[innermost.partition(".")[2] or innermost] = None
        return func(*args, **(kwargs or {}))
