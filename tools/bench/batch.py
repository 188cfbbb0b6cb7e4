"""Take one optimizer step of the quickstart at a large global batch on CPU ranks, and compare the gradients.

    python -m tools.bench.batch --batch 196608 --ranks 2 8 [--losses disco_fused inf_cl] [--micro-batch 512]

The tool repeats the step for each combination of a loss and a number of ranks, and prints a row for each. The columns:
  gradient         |g - g1| / |g1| over all parameters, where g is the gradient of this row and g1 that of the first row
  step             duration of the step on rank 0
  loss allocates   peak memory that the loss allocates on rank 0, measured
  planned          the same memory, predicted for a CPU by the code behind `disco-ds plan` (disco_ds/plan/losses.py)
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from disco_ds.config import load_config
from disco_ds.distributed import comm
from disco_ds.plan.losses import loss_peak
from disco_ds.plan.towers import Allocations
from disco_ds.training.build import build
from disco_ds.training.engine import set_lr
from disco_ds.training.grad_accum import forward_all, loss_at_features, surrogates
from tools.bench.ranks import run_ranks


def take_step(ranks: int, name: str, args: argparse.Namespace, folder: Path) -> None:
    """Take one step. Rank 0 saves the gradient and the measurements in FOLDER/NAME-RANKS.pt."""
    config = load_config(
        "quickstart",
        [
            f"runs={folder}",
            f"global_batch={args.batch}",
            f"samples={args.batch}",
            f"micro_batch={args.micro_batch}",
            f"loss={{name: {name}}}",
            "optim.warmup_steps=0",
            "eval.labeled={}",
            "log.tensorboard=false",
            "timeout_s=36000",
        ],
    )
    gradient: dict[str, Tensor] = {}
    memory = Allocations([])

    with ExitStack() as stack:
        run = build(config, None, stack)

        set_lr(run.engine, 0.0)
        data = run.loader.start_step()
        start = time.perf_counter()
        K = run.engine.gradient_accumulation_steps()
        features = forward_all(run.towers, run.loader.first_pass(), K)
        with memory:
            _, leaves = loss_at_features(run.loss, features)
        for surrogate in surrogates(run.towers, run.loader.second_pass(), features, leaves):
            run.engine.backward(surrogate, scale_wrt_gas=False)
            for parameter, value in run.engine.module.named_parameters():
                # Keep the gradient of the last backward pass, which is averaged over ranks.
                if value.grad is not None:
                    gradient[parameter] = value.grad.double()
            run.engine.step()
        seconds = time.perf_counter() - start
        assert data.error is None, data.error
        width = run.engine.module.text_projection.shape[1]
        b = args.batch // ranks
        planned = loss_peak(run.loss, b, ranks, width, torch.device("cpu"))
        # The plan excludes the fp32 features [b, D] of images and texts, so subtract them from the measured peak.
        # Allocations has counted them, because it counts an existing tensor as new when it first sees a view of it.
        peak = memory.peak - 2 * 4 * b * width
    if comm.rank() == 0:
        found = {"gradient": gradient, "s": seconds, "planned": planned, "peak": peak}
        torch.save(found, folder / f"{name}-{ranks}.pt")


def compare(gradient: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return |gradient - other| / |other| over all parameters."""
    assert gradient.keys() == other.keys()
    difference = sum((gradient[key] - other[key]).square().sum() for key in other)
    norm = sum(value.square().sum() for value in other.values())
    return float((difference / norm) ** 0.5)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=2048, help="global batch")
    parser.add_argument("--micro-batch", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--losses", nargs="+", default=["disco_fused", "inf_cl"])
    args = parser.parse_args()
    for ranks in args.ranks:
        if args.batch % (ranks * args.micro_batch):
            print(f"--batch {args.batch} is not a multiple of {ranks} ranks x micro-batch")
            return 2
    print(
        "| loss | ranks | gradient | step, s | loss allocates, MB | planned, MB |\n|---|---|---|---|---|---|"
    )
    first: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.losses:
            for ranks in args.ranks:
                given = (ranks, name, args, Path(folder))
                run_ranks(take_step, ranks, *given, timeout_s=36000)
                found = torch.load(Path(folder) / f"{name}-{ranks}.pt")
                first = first or found["gradient"]
                difference = compare(found["gradient"], first)
                sizes = f"{found['peak'] / 1e6:,.1f} | {found['planned'] / 1e6:,.1f}"
                print(
                    f"| {name} | {ranks} | {difference:.1e} | {found['s']:.0f} | {sizes} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
