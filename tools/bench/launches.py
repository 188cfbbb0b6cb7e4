"""Count the tensor operations of one training step, by phase, and time the part after the last backward pass.

    python -m tools.bench.launches                        the table in tools/lab_notes.md; about a minute on a CPU
    python -m tools.bench.launches --width 256 --time 20

The model has the layers and parameter tensors (302) of ViT-B/32, but is narrow. The step is a logged step of the
trainer: forward, loss, backward, update, metrics and EMA.

An operation is a call that reaches torch's kernels for a device, after autograd. Views, allocations and values that the
host reads do not count. On a GPU, an operation is at least one kernel launch. A torch._foreach operation counts once:
on a GPU, it takes a few launches for all its tensors, and on a CPU one call per tensor. The phases:
  forward    the towers; with several micro-batches, without a graph except for the last one
  loss       forward and backward of the loss
  backward   the backward passes, the forwards that GradAccum repeats, and at ZeRO 2 the reduction
  end        what follows the last backward pass: reduction, norm, clipping, optimizer, EMA and the clamp of the scale
  metrics    the logged figures
tests/test_simulated_cuda.py lists the lines at which the host waits for a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from disco_ds.config import Config, check_config, render_ds_config
from disco_ds.data import MicroBatch
from disco_ds.distributed import comm, deepspeed_quirks
from disco_ds.losses import build_loss
from disco_ds.metrics.anomalies import SAMPLE, features_spread
from disco_ds.models.clip import Texts, build_model
from disco_ds.plan.towers import make_batch
from disco_ds.training.engine import (
    EngineTowers,
    backward_and_step,
    build_engine,
    clamp_scale,
    set_lr,
)
from disco_ds.training.grad_accum import forward_all, loss_at_features, surrogates
from disco_ds.training.optimizer import update_average

PHASES = ("forward", "loss", "backward", "end", "metrics")
NOT_COUNTED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}
NOT_COUNTED |= {"_local_scalar_dense"}
MICRO_BATCH = 4


class Operations(TorchDispatchMode):
    """Counts operations in the current phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "metrics"
        self.counts: Counter[str] = Counter()
        """Phase -> number of operations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NOT_COUNTED:
            self.counts[self.phase] += 1
        return func(*args, **(kwargs or {}))


def make_config(folder: Path, width: int, stage: int, optimizer: str, num: int) -> Config:
    """Return the settings of a run of the narrow model on one rank."""
    tower = {"layers": 12, "width": width}
    model = folder / "narrow.json"
    model.write_text(
        json.dumps(
            {
                "embed_dim": width,
                "vision_cfg": tower | {"image_size": 64, "head_width": 32, "patch_size": 32},
                "text_cfg": tower | {"context_length": 16, "vocab_size": 512, "heads": width // 32},
            }
        )
    )
    return check_config(
        {
            "name": "count",
            "global_batch": MICRO_BATCH * num,
            "micro_batch": MICRO_BATCH,
            "steps": 1000,
            "model": {"name": str(model)},
            "data": {"source": "synthetic"},
            "optim": {"name": optimizer, "clip_norm": 1.0, "ema": {"decay": 0.999}},
            "log": {"tensorboard": False},
            "deepspeed": {"zero_optimization": {"stage": stage}},
        },
        "launches",
    )


def measure(config: Config, repeats: int) -> tuple[Operations, float]:
    """Run steps of a new engine.

    Args:
        config: The settings.
        repeats: How many steps to time.

    Returns:
        The operations of one step, and the median milliseconds of the phase "end".
    """
    torch.manual_seed(0)
    loss = build_loss("disco")
    engine = build_engine(build_model(config.model), config.optim, render_ds_config(config, 1))
    engine.train()
    set_lr(engine, 1e-4)
    num = config.num_micro_batches(1)
    batches = [make_batch(engine.module, MICRO_BATCH, comm.local_device()) for _ in range(num)]
    operations = Operations()
    began = 0.0
    reduce = engine.allreduce_gradients

    def begin_end(*args: Any, **kwargs: Any) -> None:
        nonlocal began
        if engine.is_gradient_accumulation_boundary():
            operations.phase = "end"
            began = time.perf_counter()
        reduce(*args, **kwargs)

    engine.allreduce_gradients = begin_end

    def prepare(batch: MicroBatch) -> tuple[Tensor, Texts, Tensor]:
        return batch["image"], Texts(batch["text"], batch.get("lengths")), batch["index"]

    towers = EngineTowers(engine, prepare)

    def step() -> float:
        operations.phase = "forward"
        features = forward_all(towers, batches, num)
        operations.phase = "loss"
        _, leaves = loss_at_features(loss, features)
        operations.phase = "backward"
        backward_and_step(engine, surrogates(towers, batches, features, leaves))
        clamp_scale(engine, config.model.max_scale, leaves.scale.detach())
        if config.optim.ema:
            update_average(engine, config.optim.ema)
        seconds = time.perf_counter() - began
        operations.phase = "metrics"
        features_spread(leaves.image.detach()[:SAMPLE], leaves.text.detach()[:SAMPLE])
        return 1000 * seconds

    for _ in range(2):
        step()  # creates the states of the optimizer and the average
    ms = statistics.median(step() for _ in range(max(repeats, 1)))
    with operations:
        step()
    deepspeed_quirks.release(engine)
    return operations, ms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=64, help="width of both towers")
    parser.add_argument("--time", type=int, default=0, help="steps to time")
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2])
    args = parser.parse_args()
    print("| ZeRO | optimizer | micro-batches | " + " | ".join(PHASES) + " | ms of the end |")
    print("|" + "---|" * (len(PHASES) + 4))
    with comm.session(600), tempfile.TemporaryDirectory() as folder:
        for stage in args.stages:
            for optimizer in ("adamw", "muon"):
                for num in (1, 4):
                    config = make_config(Path(folder), args.width, stage, optimizer, num)
                    found, ms = measure(config, args.time)
                    values = [f"{found.counts[phase]:,}" for phase in PHASES]
                    time_ms = f"{ms:.1f}" if args.time else "-"
                    print("|", " | ".join([f"{stage}", optimizer, f"{num}", *values, time_ms]), "|")


if __name__ == "__main__":
    main()
