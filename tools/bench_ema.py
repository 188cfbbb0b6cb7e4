"""Measure how much time and memory the moving average of the weights (optim.ema) takes.

    python tools/bench_ema.py --model ViT-B-32 --stage 1

The tool runs in one process; --stage is the ZeRO stage. It prints the times of three operations in milliseconds: an
AdamW update (without forward and backward), an update of the average, and an exchange. An exchange swaps the weights
with their average; an evaluation needs two exchanges. The tool also prints the memory of AdamW's first moment (exp_avg)
and of the average (ema).
"""

from __future__ import annotations

import argparse
import functools

import torch
from timing import median_ms

from disco_ds.config import check_config, render_ds_config
from disco_ds.distributed import comm
from disco_ds.models.clip import build_model
from disco_ds.training.ema import AVERAGE, _swap, update_average
from disco_ds.training.engine import build_engine, set_lr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    tree = {
        "name": "bench",
        "global_batch": 2,
        "micro_batch": 2,
        "steps": 1000,
        "model": {"name": args.model},
        "data": {"source": "synthetic"},
        "optim": {"warmup_steps": 0, "ema": {"decay": 0.999}},
        "log": {"tensorboard": False},
        "deepspeed": {"zero_optimization": {"stage": args.stage}},
    }
    config = check_config(tree, "bench_ema")
    with comm.session(600):
        engine = build_engine(build_model(config.model), config.optim, render_ds_config(config, 1))
        set_lr(engine, 1e-4)
        # The values of the gradient do not matter, so use the sum over all parameters as the loss.
        engine.backward(sum(p.sum() for p in engine.module.parameters()))
        engine.step()
        optimizer = engine.basic_optimizer
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        update = functools.partial(update_average, engine, config.optim.ema)
        update()
        bytes_ = {
            key: sum(state[key].nbytes for state in optimizer.state.values())
            for key in ("exp_avg", AVERAGE)
        }
        calls = {
            "AdamW update": optimizer.step,
            "update of the average": update,
            "exchange": functools.partial(_swap, engine),
        }
        count = sum(weight.numel() for weight in weights)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        threads = torch.get_num_threads()
        print(f"{args.model}, {count:,} parameters, ZeRO {args.stage}, {device}, {threads} threads")
        for name, call in calls.items():
            print(f"{name:24}{median_ms(call, args.repeats):10.1f} ms")
        for name, value in bytes_.items():
            print(f"{name:24}{value / 2**20:10.1f} MiB")


if __name__ == "__main__":
    main()
