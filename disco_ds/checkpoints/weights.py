"""Read trained weights from a run, a checkpoint of any ZeRO stage or an export, and build the model from them.

resume.py resumes training, and export.py writes exports.
"""

from pathlib import Path
from typing import Any, NamedTuple

import open_clip
from safetensors.torch import load_file
from torch import Tensor, nn

from disco_ds.checkpoints.checkpoint import read
from disco_ds.checkpoints.keep import DamagedError, find_latest, find_older
from disco_ds.checkpoints.state import read_tensors
from disco_ds.config import ModelSettings, Tree, load_config
from disco_ds.models.clip import build_model, register_architecture
from disco_ds.models.param_groups import SCALES
from disco_ds.models.pretrained import CONFIG as MODEL_CONFIG
from disco_ds.models.pretrained import read_folder
from disco_ds.names import explain_errors
from disco_ds.runs.run_folder import CHECKPOINTS, CONFIG, META

TENSORS = "open_clip_model.safetensors"


class Weights(NamedTuple):
    """The tensors of a trained model and the information needed to build the model."""

    origin: Path
    """The checkpoint folder or exported folder that was read."""
    name: str
    """The model's name in the run, without its folder and without the suffix .json; "export" if an export was read."""
    settings: ModelSettings
    """Settings of the architecture and the tokenizer. Settings that matter only for training have their defaults."""
    architecture: Tree
    """The architecture of the model, as models.clip.read_architecture returned it for the training run. Its entry
    init_logit_bias is None if the model has no logit_bias."""
    preprocess: Tree
    """Entries of open_clip's preprocess_cfg. Entries that are missing have open_clip's defaults."""
    tensors: dict[str, Tensor]
    """Tensors keyed by open_clip's names, on the CPU, in fp32 (integer buffers are unchanged).

    logit_scale and logit_bias have shape [1].
    """


def read_weights(path: str | Path, ema: bool = False) -> Weights:
    """Read the weights from a run folder (its last complete checkpoint), a checkpoint folder or an export.

    Memory: 4 bytes per parameter; the files are memory-mapped while they are read.

    Args:
        path: The run folder, checkpoint folder or export.
        ema: Whether to read the moving average of the weights (optim.ema) instead of the last weights.

    Raises:
        ValueError: If the path is not a run folder, checkpoint or export, if it is incomplete or damaged, or if `ema`
            is True and there is no moving average.
    """
    path = Path(path).resolve()
    if (path / MODEL_CONFIG).is_file():
        if ema:
            raise ValueError(f"{path} is an export, which has only one set of weights: omit --ema")
        return _read_folder(path)
    if (path / CHECKPOINTS).is_dir():
        path = find_latest(path)
    if (path / META).is_file() or path.parent.name == CHECKPOINTS:
        return _read_checkpoint(path, ema)
    raise ValueError(
        f"{path} contains no weights: expected a run folder that contains {CHECKPOINTS}/, a checkpoint inside "
        f"{CHECKPOINTS}/, or an exported folder that contains {MODEL_CONFIG}"
    )


def build_from(weights: Weights) -> nn.Module:
    """Build the open_clip model with these weights: fp32, on the CPU, in eval mode.

    Its forward is the one used in training.

    Memory: 4 bytes per parameter, in addition to the weights.

    Raises:
        ValueError: If a tensor is missing or unexpected, or has a shape other than the model's.
    """
    bias = weights.architecture.get("init_logit_bias")
    model: Any = build_model(weights.settings, initial_bias=bias, pretrained=False)
    tensors = dict(weights.tensors)
    # If modules share a parameter, the fp32 value is under its first name.
    first: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) in tensors:
            tensors[name] = tensors[first[parameter]]
    with explain_errors(f"{weights.origin} does not contain the weights of model {weights.name}"):
        model.load_state_dict(tensors)
    open_clip.set_model_preprocess_cfg(
        model, open_clip.get_model_preprocess_cfg(model) | weights.preprocess
    )
    return model.eval()


def _read_checkpoint(path: Path, ema: bool) -> Weights:
    recipe = path.parent.parent / CONFIG
    if not recipe.is_file():
        raise ValueError(f"{path} is not inside a run folder: {recipe} is missing")
    try:
        saved = read(path)
        tensors = read_tensors(saved, ema)
    except DamagedError as error:
        older = find_older(path) or "none"
        raise ValueError(f"{error}; previous complete checkpoint: {older}") from None
    identity = saved.meta["identity"]
    name = load_config(recipe).model.label
    preprocess = identity.get("model.preprocess", {})
    return _assemble(path, name, identity["model.config"], preprocess, tensors)


def _read_folder(path: Path) -> Weights:
    config = read_folder(path)
    with explain_errors(f"{path} is not a complete open_clip folder"):
        tensors = load_file(path / TENSORS)
    # Do not use the folder's name: if a name contains "siglip", open_clip chooses another tokenizer.
    preprocess = config.get("preprocess_cfg", {})
    return _assemble(path, "export", config["model_cfg"], preprocess, tensors)


def _assemble(
    origin: Path,
    name: str,
    architecture: Tree,
    preprocess: Tree,
    tensors: dict[str, Tensor],
) -> Weights:
    tensors = {
        key: value.float() if value.is_floating_point() else value for key, value in tensors.items()
    }
    for key in tensors.keys() & SCALES:
        # open_clip stores the scale and the bias as 0-d tensors, which DeepSpeed cannot train.
        tensors[key] = tensors[key].reshape(1)
    bias = 0.0 if "logit_bias" in tensors else None
    architecture = architecture | {"init_logit_bias": bias}
    if "factory" in architecture:
        settings = ModelSettings(factory=architecture["factory"], options=architecture["options"])
    else:
        vision = architecture["vision_cfg"]
        # open_clip builds a timm tower at its default size unless the size is forced.
        size = vision.get("image_size") if "timm_model_name" in vision else None
        # The tokenizer must not depend on a folder's name; see models.clip.register_config.
        is_folder = not name.endswith(".json") and name not in open_clip.list_models()
        registered = register_architecture("folder" if is_folder else name, architecture)
        settings = ModelSettings(name=registered, image_size=size)
    label = Path(name).name.rpartition(":")[2].removesuffix(".json")
    return Weights(origin, label, settings, architecture, preprocess, tensors)
