"""Build the complete ds_config of a run from the DeepSpeed file and the recipe's settings."""

import copy
from pathlib import Path

from disco_ds.config.ds_config import DEFAULTS, check_ds_config, merge
from disco_ds.config.recipe import Config
from disco_ds.config.settings import Tree

GRADIENT_BUCKET = 50_000_000
"""Default number of gradient elements that ZeRO 1 to 3 reduce at a time.

DeepSpeed's default is 500 million. Most CLIP models have fewer parameters, so no gradient would be
reduced before the end of the backward pass.
"""


def render_ds_config(config: Config, ranks: int, run_folder: Path | None = None) -> Tree:
    """Return the complete ds_config of a run.

    Args:
        config: The settings of the run.
        ranks: World size.
        run_folder: Folder for TensorBoard's files. None: DeepSpeed writes no TensorBoard files.

    Raises:
        ValueError: If some settings do not work together, or if check_ds_config or
            Config.num_micro_batches refuses them.
    """
    check_ds_config(config.deepspeed)
    rendered = merge(copy.deepcopy(DEFAULTS), copy.deepcopy(config.deepspeed))
    zero = rendered["zero_optimization"]
    level = config.zero_stage
    if config.model.compile is True and level == 3:
        raise ValueError(
            "model.compile=true at ZeRO 3 is refused: torch.compile reads parameters of "
            "nn.MultiheadAttention that ZeRO has not gathered; use ZeRO 0 to 2"
        )
    if config.optim.name == "lamb" and level > 0:
        raise ValueError(
            f"optim.name=lamb at ZeRO {level} is refused: its trust ratio needs the "
            "norm of each parameter, but ZeRO's optimizer sees flat partitions; use deepspeed=zero0"
        )
    if config.optim.factory and level > 0 and not config.optim.elementwise:
        raise ValueError(
            f"optim.factory={config.optim.factory} at ZeRO {level} is refused: ZeRO calls step() once for each "
            "parameter group, with flat parts of its parameters. If the update of an element does not depend on "
            "other elements, set optim.elementwise=true; otherwise use deepspeed=zero0"
        )
    places = [zero.get(key) or {} for key in ("offload_optimizer", "offload_param")]
    if any(place.get("device") == "nvme" for place in places):
        raise ValueError(
            "ds_config: offload to nvme is refused: DeepSpeed 0.19 restores only a part of the optimizer's states from "
            "nvme when a run is resumed; offload to cpu"
        )
    if any(place.get("ratio", 1) != 1 or place.get("super_offload") for place in places):
        raise ValueError(
            "ds_config: zero_optimization.offload_optimizer must have neither super_offload nor a ratio below 1: "
            "DeepSpeed would update parameters with a separate AdamW and would not save its states; remove the key"
        )
    num_micro_batches = config.num_micro_batches(ranks)
    if config.precision == "autocast":
        # DeepSpeed may reduce the gradients of the modules in this list in 16 bits. By default, these
        # are Linear and Conv modules. The empty list prevents this for every module.
        rendered["torch_autocast"].setdefault("lower_precision_safe_modules", [])
    if level:
        zero.setdefault("reduce_bucket_size", GRADIENT_BUCKET)
        # With overlap_comm, ZeRO 1 and 2 wait for the device after every backward pass. The wait
        # costs little if a step has only one backward pass, because the optimizer update waits for
        # the device anyway. On a single rank, overlap_comm gains nothing.
        zero.setdefault("overlap_comm", level == 3 or (num_micro_batches == 1 and ranks > 1))
        # Gradients that ZeRO 1 reduces after the backward pass need no permanent buffer: see
        # fuse_update in distributed/deepspeed_quirks.py. It handles fp32 gradients.
        is_fp32 = config.precision in ("fp32", "autocast")
        without_buffer = level == 1 and is_fp32 and not zero["overlap_comm"]
        zero.setdefault("contiguous_gradients", not without_buffer)
    if run_folder is not None and config.log.tensorboard:
        rendered["tensorboard"] = {
            "enabled": True,
            "output_path": str(run_folder),
            "job_name": "tensorboard",
        }
    return rendered | {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": config.optim.clip_norm,
        # A huge interval turns off DeepSpeed's progress lines and monitor points, because
        # metrics/logger.py writes the log.
        "steps_per_print": 2**31,
    }
