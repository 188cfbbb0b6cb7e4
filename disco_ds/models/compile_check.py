"""Checks that refuse torch.compile if activation checkpointing repeats a forward that draws random numbers.

A compiled backward that recomputes activations may draw random numbers that differ from those of the forward (pytorch
issues 192635 and 198333). Even if the numbers are equal in a test on a CPU, they may differ on a GPU. GradAccum also
runs each forward twice, but has no such problem: both forwards run the same compiled graph (training/step.py) from the
same generator states.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from disco_ds.config import Config
from disco_ds.config.ds_config import stage
from disco_ds.distributed import comm
from disco_ds.models.clip import compile_towers, forward_on_meta, trained_sides

logger = logging.getLogger(__name__)


def check_compiled(config: Config, model: Any) -> None:
    """Refuse model.compile=true if `find_repeated_draws` finds a problem.

    Raises:
        ValueError: If model.compile=true is refused. The message names the modules and says what to change.
    """
    if config.model.compile is True and (problem := find_repeated_draws(config, model)):
        raise ValueError(
            f"model.compile is refused for model {config.model.label}: {problem}. When a compiled "
            "forward is repeated, it may draw different random numbers. Set model.compile=auto or false; or "
            "remove the randomness (model.patch_dropout=0, and no dropout or drop path in the "
            "model's config); or set model.activation_checkpointing=false"
        )


def compile_if_exact(config: Config, model: Any, device_problem: str | None) -> bool:
    """Compile the towers, unless any rank has a reason not to. Collective.

    Args:
        config: Settings of the run.
        model: The model, before an engine wraps it.
        device_problem: Why this rank's device cannot run compiled kernels; None if it can.

    Returns:
        True if the towers were compiled. The result is the same on every rank.
    """
    if stage(config.deepspeed) == 3:
        reason: str | None = "at ZeRO 3, torch.compile would read parameters that are not gathered"
    else:
        reason = device_problem or find_repeated_draws(config, model)
    reasons = [x for x in comm.gather_objects(reason) if x]
    if not reasons:
        compile_towers(model, config.model)
        message = "the towers are compiled, which makes the first step longer"
    else:
        message = f"the towers are not compiled: {reasons[0]}"
    if comm.rank() == 0:
        logger.info("model.compile=auto: %s", message)
    return not reasons


def find_repeated_draws(config: Config, model: Any) -> str | None:
    """Find modules that draw random numbers in a forward that activation checkpointing repeats.

    Args:
        config: The recipe.
        model: The model, before an engine wraps it.

    Returns:
        A description of the problem, for an error message; None if no such module was found. If the search fails, the
        description says so.
    """
    if not config.model.activation_checkpointing:
        return None
    try:
        names = find_draws(model)
    except Exception as error:  # a module may need real data, not only shapes
        problem = f"may draw random numbers: tracing it failed ({type(error).__name__}: {error})"
    else:
        if not names:
            return None
        problem = f"draws random numbers in {', '.join(names[:3])}"
    return f"activation checkpointing repeats a forward that {problem}"


def find_draws(model: Any) -> list[str]:
    """Return the names of those modules of the trained towers that draw random numbers during training.

    The model is left in training mode.
    """
    model.train()
    with ModuleTracker() as tracker, Draws(tracker) as draws:
        for side, trains in trained_sides(model).items():
            if trains:
                forward_on_meta(model, side)
    return list(draws.names)


class Draws(TorchDispatchMode):
    """Dispatch mode that collects the names of the innermost modules that draw random numbers."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            innermost = max(self.tracker.parents, key=lambda name: name.count("."))
            self.names[innermost.partition(".")[2] or innermost] = None
        return func(*args, **(kwargs or {}))
