"""Compare global batches by training branches of checkpoints on the same number of samples.

Parents that differ in their seeds give the results standard errors:

    python -m tools.study.batches runs/seed-0 runs/seed-1 --batches 128 512 2048 --samples 65536

Exit code: 0 done, 1 a branch failed, 2 invalid settings or data, 3 a branch was stopped by a signal.
"""

import argparse
import json
import math
import shlex
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from disco_ds.checkpoints.keep import find_latest, read_meta
from disco_ds.checkpoints.resume import MAY_BE_ALLOWED, is_within
from disco_ds.cli.main import main as disco_ds
from disco_ds.config import load_config
from disco_ds.config.text_file import write_text
from disco_ds.runs.run_folder import CHECKPOINTS, CONFIG, FINISHED, split_resume


def run(args: argparse.Namespace) -> int:
    """Train the branches that are not finished, and write the results.

    Returns:
        Exit code 0: done. Otherwise the exit code of the branch that failed or was stopped.

    Raises:
        ValueError: If --samples is not a whole number of steps at every batch, two parents have the same name, or a
            parent cannot be branched.
    """
    args.batches.sort()
    unit = math.lcm(*args.batches)
    if args.samples % unit:
        nearest = max(round(args.samples / unit), 1) * unit
        raise ValueError(
            f"--samples {args.samples} is not a whole number of steps at every batch; nearest: {nearest}"
        )
    names = [split_resume(parent)[0].resolve().name for parent in args.parents]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"two parents have a run folder named {repeated[0]}, so their branches would share folders: "
            "pass only one checkpoint of each run, and rename run folders that have the same name"
        )
    reached: list[dict[str, float]] = []
    for batch, factor, parent in product(args.batches, args.rates, args.parents):
        folder, arguments = prepare_branch(parent, batch, factor, args)
        finished = folder / FINISHED
        if args.print:
            print(shlex.join(["disco-ds", *arguments]))
            continue
        if not finished.exists() and (code := disco_ds(arguments)):
            return code
        reached.append(json.loads(finished.read_text(encoding="utf-8")))
    if args.print:
        return 0
    metrics = [name for end in ("_loss_at_", "_top1") for name in reached[0] if end in name]
    values = numpy.array([[values[name] for name in metrics] for values in reached])
    shape = len(args.batches), len(args.rates), len(args.parents), len(metrics)
    report(values.reshape(shape), metrics, args)
    return 0


def prepare_branch(
    parent: str, batch: int, factor: float, args: argparse.Namespace
) -> tuple[Path, list[str]]:
    """Prepare the folder of a branch: link the parent's checkpoint and copy the parent's settings into it.

    A folder that has been prepared before is not changed.

    Args:
        parent: Run folder or checkpoint that the branch starts from.
        batch: Global batch of the branch.
        factor: One of --rates. The learning rate is this factor times the parent's peak rate times the square root of
            the branch's batch divided by the parent's batch.
        args: Arguments of the command.

    Returns:
        The folder, and the arguments of disco-ds that train the branch or resume it.

    Raises:
        ValueError: If the parent has no complete checkpoint, if there is no validation set, or if the folder contains a
            finished branch with other settings.
    """
    source, checkpoint = split_resume(parent)
    checkpoint = checkpoint or find_latest(source)
    config = load_config(source / CONFIG, args.overrides)
    if not config.eval.validation:
        raise ValueError("study compares validation losses: pass --set eval.validation.NAME=SHARDS")
    samples = read_meta(checkpoint)["samples"]
    stage = config.at_sample(samples - 1)
    rate = stage.peak_lr * math.sqrt(batch / stage.global_batch) * factor
    settings = [
        f"global_batch={batch}",
        f"micro_batch={math.gcd(batch // (config.ranks or 1), stage.micro_batch)}",
        f"optim.lr={rate:.4g}",
        f"samples={samples + args.samples}",
        "steps=null",
        "stages=[]",
        # A branch is too short for a learning rate decay, and its parent has completed the warmup.
        "optim.schedule=constant",
        "optim.warmup_steps=0",
        "optim.cooldown_steps=0",
        # The parent's command would overwrite the parent's uploaded checkpoints with those of the branches.
        "checkpoint.copy_command=null",
    ]
    if config.stages:
        shape = {
            "model.image_size": stage.model.image_size,
            "model.patch_dropout": stage.model.patch_dropout,
            "data.crop_scale": stage.data.crop_scale,
        }
        settings += [
            f"{key}={json.dumps(value)}" for key, value in shape.items() if value is not None
        ]
    given = {each.partition("=")[0] for each in args.overrides}
    overrides = [each for each in settings if each.partition("=")[0] not in given]
    overrides += args.overrides
    keys = [each.partition("=")[0] for each in overrides]
    allowed = [key for key in keys if is_within(key, MAY_BE_ALLOWED)]
    folder = args.out.resolve() / f"{source.resolve().name}-b{batch}-x{factor:g}"
    path = folder / CONFIG
    if not path.exists():
        link = folder / CHECKPOINTS / checkpoint.name
        link.parent.mkdir(parents=True, exist_ok=True)
        # The link exists already if this command was killed before it copied the settings.
        if not link.is_symlink():
            link.symlink_to(checkpoint.resolve())
        shutil.copy(source / CONFIG, path)
    if (folder / FINISHED).exists() and load_config(path) != load_config(path, overrides):
        raise ValueError(
            f"{folder} contains a finished branch with another checkpoint or other settings: pass another --out"
        )
    resume = ["--resume", str(folder), "--allow-change", ",".join(allowed)]
    return folder, ["train", "--config", str(path), *resume, *overrides]


def report(values: NDArray[Any], metrics: list[str], args: argparse.Namespace) -> None:
    """Write and print a table of the results of each batch at its best learning rate.

    Args:
        values: [batches, rates, parents, metrics]; the first metric is the validation loss that is compared.
        metrics: Names of the metrics.
        args: Arguments of the command.
    """
    # A rate whose loss is NaN is never the best.
    losses = numpy.nan_to_num(values[..., 0].mean(axis=2), nan=math.inf)
    best = losses.argmin(axis=1)
    chosen = values[numpy.arange(len(best)), best]
    num_parents = len(args.parents)
    means, errors = chosen.mean(axis=1), find_errors(chosen)
    rates = [args.rates[number] for number in best]
    lines = [f"| batch | rate | {' | '.join(metrics)} |", "|---" * (2 + len(metrics)) + "|"]
    for batch, rate, *row in zip(args.batches, rates, means, errors, strict=True):
        cells = [f"{mean:.4f} ± {error:.4f}" for mean, error in zip(*row, strict=True)]
        lines.append(f"| {batch:,} | x{rate:g} | {' | '.join(cells)} |")
    # Branches of one parent have the same seed, so compare each with its parent's branch of the smallest batch.
    worse = chosen[..., :1] - chosen[:1, :, :1]
    within = worse.mean(axis=1) <= 2 * find_errors(worse)
    fitting = [batch for batch, fits in zip(args.batches, within, strict=True) if fits]
    largest = f"{max(fitting):,}" if fitting else "none, because the smallest batch's loss is NaN"
    text = "\n".join(
        [
            f"{args.samples:,} samples; learning rates {args.rates} x sqrt(batch ratio) x the parent's rate; "
            f"number of parents: {num_parents}",
            "",
            *lines,
            "",
            f"Largest batch whose loss is at most two standard errors above the smallest batch's: {largest}"
            if num_parents > 1
            else "A single parent has no standard error: add parents with other seeds.",
            "",
        ]
    )
    write_text(args.out / "study.md", text)
    print(text)


def find_errors(values: NDArray[Any]) -> NDArray[Any]:
    """Return the standard errors of the means over axis 1; 0 if this axis has only one value."""
    count = values.shape[1]
    return values.std(axis=1, ddof=min(count - 1, 1)) / math.sqrt(count)


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, and run the study. A mistake in them is one line and exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parents", nargs="+", metavar="RUN", help="run folders or checkpoints, one for each seed"
    )
    parser.add_argument(
        "--batches", nargs="+", type=int, required=True, help="global batches to compare"
    )
    parser.add_argument(
        "--samples",
        type=int,
        required=True,
        help="samples of each branch, a multiple of every batch",
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=[0.5, 1.0, 2.0],
        metavar="X",
        help="factors to try at each batch; the learning rate is X times the parent's peak rate times "
        "sqrt(batch / the parent's batch) (default: 0.5 1 2)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        default=[],
        metavar="key=value",
        help="settings of all branches, such as eval.validation.NAME=SHARDS",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/study"),
        metavar="FOLDER",
        help="folder for the branches and the results (default: %(default)s)",
    )
    parser.add_argument(
        "--print",
        action="store_true",
        help="prepare the branches and print a command for each, without training; when the commands are "
        "done, run the study again without --print",
    )
    try:
        return run(parser.parse_args(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
