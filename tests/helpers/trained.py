"""Write a run folder with one checkpoint in the format of ZeRO 0, without an engine."""

from pathlib import Path

from torch import nn

from disco_ds.checkpoints.keep import FORMAT
from disco_ds.checkpoints.resume import identity_of, shape_of
from disco_ds.checkpoints.save import Save
from disco_ds.config import Tree
from disco_ds.models.clip import read_architecture
from disco_ds.runs.run_folder import CHECKPOINTS
from helpers.checkpoints import finish
from helpers.towers import tiny_config


def write_run(
    folder: Path, model: nn.Module, name: str, step: int = 7, image_size: int | None = None
) -> Path:
    """Write the run folder of a model.

    Args:
        folder: The run folder.
        model: The model with its weights.
        name: model.name in the run's settings.
        step: Step of the checkpoint.
        image_size: model.image_size in the run's settings.

    Returns:
        The folder of the checkpoint.
    """
    config = tiny_config(name, {}, model__image_size=image_size)
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config.to_yaml())
    final = folder / CHECKPOINTS / f"step-{step:08d}"
    partial = final.with_name(".partial")
    (partial / "engine").mkdir(parents=True)
    same = identity_of(config, "abc", read_architecture(config.model))
    meta = {
        "format": FORMAT,
        "step": step,
        "num_steps": 9,
        "identity": same,
        "shape": shape_of(config, 1),
    }
    optimizer: Tree = {"state": {}, "param_groups": [{"names": []}]}
    content = {"module": model.state_dict(), "optimizer": optimizer, "param_shapes": None}
    states = {partial / "engine" / "mp_rank_00_model_states.pt": content}
    return finish(Save(final, partial, meta, states))
