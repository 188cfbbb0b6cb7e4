"""The model, the settings and the precision of `disco-ds eval`, which evaluates a run, an export or other weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from disco_ds.checkpoints.weights import build_from, read_weights
from disco_ds.config import PACKAGE, Config, ModelSettings, load_config
from disco_ds.data import ImageSpec, InputSpec
from disco_ds.distributed import comm
from disco_ds.models.clip import build_model, build_tokenizer, read_preprocessing, read_text_size
from disco_ds.models.param_groups import PARAMETER_DTYPES
from disco_ds.runs.run_folder import CHECKPOINTS, CONFIG

EVALUATION = PACKAGE / "assets" / "evaluation.yaml"
"""Settings for evaluating a model that has no run."""
LOOKS = {"image_size", "image_mean", "image_std", "interpolation", "resize_mode", "quick_gelu"}
"""Model settings that load_model takes from the recipe when it loads other weights (`disco-ds eval --weights`)."""


def evaluation_settings(
    model: str | Path,
    overrides: Sequence[str],
    recipe: str | Path | None,
    weights: str | Path | None,
) -> Config:
    """Return the settings for an evaluation.

    The overrides are applied to the recipe. Without a recipe, they are applied to the settings of the
    model's run or, if there is no run, to default settings.

    Args:
        model: A run folder, a checkpoint folder or an export. If `weights` is given: the name of a model.
        overrides: Settings of the form `a.b=value`.
        recipe: Name or path of a recipe, or None.
        weights: Weights to load into the named model, or None.

    Raises:
        ValueError: If the model is missing, or if the settings are invalid or name no evaluation set.
    """
    path = Path(model)
    if not weights and not path.exists():
        raise ValueError(
            f"{model} does not exist; to evaluate a model by its name, add --weights FILE"
        )
    # The path may be RUN or RUN/checkpoints/step-N.
    found = [
        folder / CONFIG
        for folder in (path, *path.parents[:2])
        if (folder / CONFIG).is_file() and (folder / CHECKPOINTS).is_dir()
    ]
    if recipe is None:
        recipe = found[0] if found and not weights else EVALUATION
    config = load_config(recipe, overrides)
    if not config.eval.sets:
        raise ValueError(
            "nothing to evaluate on; set eval.labeled.NAME=FOLDER, eval.retrieval.NAME=FOLDER or "
            "eval.validation.NAME=FOLDER"
        )
    return config


def read_image_spec(model: nn.Module) -> ImageSpec:
    """Return the size of the model's images, and how images are resized to it."""
    look = read_preprocessing(model)
    return ImageSpec(look.size, look.interpolation, look.resize_mode)


def read_input_spec(model: nn.Module, tokenizer: Any) -> InputSpec:
    """Return how samples must be prepared for the model: size and resizing of images, tokenizer, number of tokens."""
    return InputSpec(read_image_spec(model), tokenizer, *read_text_size(model))


def in_precision(module: nn.Module, kind: str) -> nn.Module:
    """Make a model compute like the model of a DeepSpeed engine that trains at this precision.

    Args:
        module: The model. It is changed in place.
        kind: The precision: autocast, bf16, fp16 or fp32.
    """
    if kind == "autocast":
        module.forward = torch.autocast(comm.local_device().type, torch.bfloat16)(module.forward)
    return module.to(PARAMETER_DTYPES[kind])


def load_model(
    model: str | Path,
    weights: str | Path | None = None,
    ema: bool = False,
    recipe: ModelSettings | None = None,
) -> tuple[nn.Module, Any]:
    """Load a model for evaluation.

    Args:
        model: A run folder, a checkpoint folder or an export. If `weights` is given: the name of a
            model, as in the setting model.name.
        weights: Weights that open_clip can load into the model: a file, a folder or a tag.
        ema: Whether to load the moving average of the run's weights instead of its last weights.
        recipe: Settings from which a model with `weights` takes its preprocessing and its activation function.

    Returns:
        The model (on this rank's device, in eval mode) and its tokenizer.

    Raises:
        ValueError: If the model or the weights cannot be loaded.
    """
    if weights and ema:
        raise ValueError("--ema needs a run or a checkpoint: --weights contain no moving average")
    if weights:
        changes = recipe.model_dump(include=LOOKS) if recipe else {}
        settings = ModelSettings(name=str(model), pretrained=Path(weights), **changes)
        module = build_model(settings)
    else:
        read = read_weights(model, ema)
        settings, module = read.settings, build_from(read)
    return module.to(comm.local_device()).eval(), build_tokenizer(settings, module)
