"""The arguments and help texts of all commands.

Import-light: imports neither torch nor the modules of the commands, so that --help is fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from disco_ds.launch.packing import unpack
from disco_ds.models.gpus import GPUS
from disco_ds.plan.assumptions import Assumptions

MAX = 1e15
"""Default upper bound of numeric arguments. Larger numbers, such as infinity, are refused."""
OVERVIEW = """\
Try it without data or GPU:
  disco-ds train --config quickstart
A recipe is a YAML file of settings; docs/settings.md lists them all. Any setting can
be replaced on the command line, as key=value: optim.lr=1e-3 data.shards=/data/mine
`disco-ds COMMAND --help` shows the options of a command, with examples.
"""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments of `disco-ds COMMAND ...`.

    Raises:
        SystemExit: With code 2 for invalid arguments, with code 0 after --help.
    """
    parser, commands = make_parsers()
    if not argv or argv[0] not in commands:
        return parser.parse_args(argv)
    command = commands[argv[0]]
    # Overrides may appear between options. argparse supports that only if the command's parser is called
    # directly, not as a subparser.
    args, unknown = command.parse_known_intermixed_args(
        unpack(argv[1:]), argparse.Namespace(command=argv[0])
    )
    if unknown:
        # Not imported at the top, because help texts do not need these libraries.
        from disco_ds.config.open_clip_flags import explain_word

        flag = unknown[0].partition("=")[0]
        hint = explain_word(flag)
        note = f"; {flag}: {hint} (pass settings as key=value)" if hint else ""
        command.error(f"unrecognized arguments: {' '.join(unknown)}{note}")
    return args


def make_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Build the parser of disco-ds.

    Returns:
        The parser, and the parser of each command by name.
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="disco-ds",
        description="Train CLIP models with large batches on DeepSpeed.",
        epilog=OVERVIEW,
        formatter_class=layout,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (summary, add_arguments) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=layout
        )
        add_arguments(command)
        # DeepSpeed's launcher passes this option to the ranks.
        command.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser, dict(commands.choices)


def _number(kind: type, low: float, high: float = MAX) -> Callable[[str], float]:
    """Return a function for argparse that parses a number and checks that it is from low to high, inclusive."""

    def read(text: str) -> float:
        value: float = kind(text)
        if not low <= value <= high:  # this is also true for NaN
            limits = f"of at least {low:g}" if high == MAX else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"expected a number {limits}, got {text}")
        return value

    # argparse prints this name in its error message if the text is not a number.
    read.__name__ = kind.__name__
    return read


def _add_recipe(parser: argparse.ArgumentParser, required: bool = True) -> None:
    default = "" if required else " (default: the settings of the model's run)"
    parser.add_argument(
        "--config",
        required=required,
        metavar="NAME|FILE",
        help=f"the recipe: the name of a bundled recipe, such as quickstart, or a YAML file{default}",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that replace the recipe's, such as optim.lr=1e-3 deepspeed=zero3",
    )


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        metavar="auto|latest|FOLDER",
        help="continue a run from a checkpoint. FOLDER: a run folder or one checkpoint "
        "(RUN/checkpoints/step-N); latest: the newest run of this name that has a checkpoint; auto: like "
        "latest, but start a new run if there is none",
    )
    parser.add_argument(
        "--allow-change",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="KEY,...",
        help="with --resume: settings that may differ from the checkpoint's, such as "
        "optim.lr,optim.weight_decay",
    )


def _add_ranks(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    parser.add_argument(
        "--ranks",
        type=_number(int, 1),
        metavar="N",
        help=f"{prefix}number of ranks, one per GPU (default: the recipe's ranks, or 1)",
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
  disco-ds train --config quickstart
  disco-ds train --config my.yaml --dry-run --ranks 8
  torchrun --nproc_per_node 8 -m disco_ds.train --config my.yaml --resume auto
exit code: 0 finished, 1 failed, 2 invalid settings or data, 3 saved and stopped by a signal
"""
    _add_recipe(parser)
    _add_resume(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check and print the settings, then exit; needs no data and no GPU",
    )
    _add_ranks(parser, "with --dry-run: ")
    # disco-ds launch finds its ranks and their run folder by this id.
    parser.add_argument("--launch-id", help=argparse.SUPPRESS)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
example:
  disco-ds launch --hostfile hosts --restarts 5 --config my.yaml ranks=16
exit code: 0 finished, 1 failed, 2 invalid settings or data, 3 saved and stopped by a signal
"""
    _add_recipe(parser)
    _add_resume(parser)
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="file with a line `host slots=GPUs` for each host of the run",
    )
    parser.add_argument(
        "--restarts",
        type=_number(int, 0),
        default=0,
        metavar="N",
        help="after a failure, resume from the last checkpoint, at most N times (default: 0)",
    )
    parser.add_argument(
        "--min-hosts",
        type=_number(int, 1),
        metavar="N",
        help="continue without hosts that do not answer, as long as N are left (default: wait for "
        "all hosts); the launch first checks that the batch and data.slots allow this",
    )
    parser.add_argument(
        "--patience",
        type=_number(float, 0),
        default=300,
        metavar="SECONDS",
        help="with --min-hosts: how long to wait for a lost host (default: 300)",
    )
    parser.add_argument(
        "--deepspeed",
        default="",
        metavar="ARGS",
        help="additional arguments for the deepspeed command, such as '--num_gpus 4'",
    )


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
  disco-ds eval runs/first
  disco-ds eval runs/first eval.labeled.imagenet=/data/imagenet/val --json first.json
  disco-ds eval ViT-B-32 --weights vit.pt eval.labeled.imagenet=/data/imagenet/val
exit code: 0 done, 1 failed, 2 invalid settings, data or weights
"""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run folder, a checkpoint or an export; with --weights: an open_clip model, as "
        "in model.name",
    )
    _add_recipe(parser, required=False)
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="weights that open_clip can load: a file, a folder or a tag",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to this file"
    )
    _add_ema(parser)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
example:
  disco-ds export runs/first --to exports/first
"""
    parser.add_argument(
        "source", metavar="RUN", type=Path, help="a run folder, a checkpoint or an export"
    )
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="the folder to create"
    )
    parser.add_argument(
        "--format",
        metavar="open_clip|transformers",
        default="open_clip",
        help="open_clip: a folder that open_clip loads as local-dir:FOLDER, in the Hugging Face Hub's "
        "layout; transformers: a folder that AutoModel loads (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        metavar="fp32|bf16|fp16",
        default="fp32",
        help="precision of the weights (default: %(default)s)",
    )
    _add_ema(parser)


def _add_embed(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
  disco-ds embed --model ViT-L-14 --pretrained vit_l.pt --config recipe.yaml --to /data/with-embeddings
  torchrun --nproc-per-node 8 -m disco_ds embed --model ... (one rank per GPU)
The shards have all members of the samples and two more, img.npy and txt.npy. The command prints the settings for
training on them. Run it again to continue after an interruption.
"""
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="the teacher: an open_clip model, as in model.name; without --pretrained: a run folder, a checkpoint or "
        "an export",
    )
    parser.add_argument(
        "--pretrained", metavar="FILE", help="the teacher's weights, as in model.pretrained"
    )
    _add_recipe(parser)
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="the folder of the new shards"
    )
    parser.add_argument(
        "--views",
        type=_number(int, 0, 1000),
        default=10,
        metavar="N",
        help="number of augmentations of each image, as the recipe's data section describes them; training on the "
        "shards repeats them. 0: store one embedding of the image without augmentation (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=_number(int, 1, 2**20),
        default=256,
        metavar="N",
        help="maximum number of images, or of texts, in a forward pass (default: %(default)s)",
    )


def _add_ema(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ema",
        action="store_true",
        help="use the moving average of the weights (optim.ema) instead of the last weights",
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="a run folder; the run may still be training"
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
  disco-ds doctor --config my.yaml --ranks 8
  disco-ds doctor --config my.yaml --picture samples.png
  deepspeed --module disco_ds.doctor --config my.yaml --gradients
exit code: 0 no check failed, 1 a check failed
"""
    _add_recipe(parser)
    _add_ranks(parser)
    parser.add_argument(
        "--gradients",
        action="store_true",
        help="compare the gradient of one step on these ranks with that of one process",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="write a PNG of 24 samples as the model gets them (image, caption, number of tokens)",
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
  disco-ds plan --config my.yaml --ranks 8 --gpu-memory H100-80G
  disco-ds plan --config my.yaml --ranks 8 --gpu-memory 40 --fit fitted --batch largest
exit code: 0 it fits, 1 it does not fit, 2 invalid settings, or nothing fits (--fit)
"""
    _add_recipe(parser)
    _add_ranks(parser)
    parser.add_argument(
        "--gpu-memory",
        metavar="GIB|NAME",
        default="A100-80G",
        help=f"memory of a GPU in GiB, or one of {', '.join(GPUS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="FOLDER",
        help="write a recipe with the fastest settings that fit to this folder",
    )
    parser.add_argument(
        "--batch",
        choices=["same", "largest"],
        default="same",
        help="with --fit: keep the global batch, or use the largest one that fits (default: %(default)s)",
    )
    parser.add_argument(
        "--host-memory",
        type=_number(float, 0),
        metavar="GIB",
        help="memory of a host in GiB; allows --fit to keep images in host memory",
    )
    parser.add_argument(
        "--data-samples",
        type=_number(int, 1),
        metavar="N",
        help="number of samples in the data (default: from the manifest)",
    )
    assumed = parser.add_argument_group("assumptions; replace them with measured values")
    fraction, rate = _number(float, 0, 1), _number(float, 1e-3)
    for option, kind, default, unit, text in (
        (
            "--slack",
            fraction,
            Assumptions.slack,
            "FRACTION",
            "memory lost to fragmentation, as a fraction of all other memory",
        ),
        (
            "--context",
            _number(float, 0),
            Assumptions.context_gib,
            "GIB",
            "memory that CUDA and NCCL use on each GPU",
        ),
        ("--image-kb", rate, Assumptions.image_bytes / 1000, "KB", "size of a compressed image"),
        (
            "--text-tokens",
            _number(float, 1),
            None,
            "N",
            "mean number of tokens per caption (default: read from the shards if they are local)",
        ),
        ("--per-host", _number(int, 1), Assumptions.per_host, "N", "GPUs per host"),
        ("--flops", rate, None, "TFLOPS", "peak rate of a GPU (default: from its data sheet)"),
        (
            "--efficiency",
            fraction,
            None,
            "FRACTION",
            "fraction of the peak rate that is reached (default: as measured on other runs, see docs/planning.md)",
        ),
        (
            "--link",
            rate,
            None,
            "GB/S",
            "rate at which a GPU receives from the other GPUs of its host (default: from its data sheet)",
        ),
        (
            "--bandwidth",
            rate,
            Assumptions.between_hosts,
            "GB/S",
            "rate at which a GPU receives from other hosts",
        ),
    ):
        shown = "" if default is None else " (default: %(default)s)"
        assumed.add_argument(option, type=kind, default=default, metavar=unit, help=text + shown)


def _add_study(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
example, with parents that differ in their seed:
  disco-ds study runs/seed-0 runs/seed-1 --batches 128 512 2048 --samples 65536
exit code: 0 done, 1 a branch failed, 2 invalid settings or data, 3 a branch was stopped by a signal
"""
    count, factor = _number(int, 1), _number(float, 1e-3)
    parser.add_argument(
        "parents", nargs="+", metavar="RUN", help="run folders or checkpoints, one for each seed"
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        type=count,
        required=True,
        metavar="B",
        help="global batches to compare",
    )
    parser.add_argument(
        "--samples",
        type=count,
        required=True,
        metavar="N",
        help="number of samples in each branch, a multiple of every batch",
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        type=factor,
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
        "done, run study again without --print",
    )


def _add_index(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
  disco-ds index /data/shards
  disco-ds index 'https://example.org/{000..099}.tar' --to manifest.json
exit codes: 0 = written, or unchanged (with --check); 1 = changed (with --check); 2 = invalid arguments or shards
"""
    parser.add_argument(
        "shards", help="a folder of .tar files, or their names with braces: '/data/{000..099}.tar'"
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FILE",
        help="the manifest to write (default: manifest.json in the folder of the shards)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; list what has changed since the manifest was written",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="read every shard whole, even if it has not changed or its count is published; with --check, this "
        "finds all damaged shards",
    )
    parser.add_argument(
        "--workers",
        type=_number(int, 0, 1024),
        default=4,
        metavar="N",
        help="number of processes that read shards; 0: this process reads them (default: %(default)s)",
    )
    parser.add_argument(
        "--missing",
        choices=["fail", "skip"],
        default="fail",
        help="what to do if shards do not exist: fail after counting all others, or skip them "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="folder in which fetched remote shards are kept, as in data.remote.cache",
    )
    parser.add_argument(
        "--pipe",
        action="store_true",
        help="allow shards of the form pipe:COMMAND, which run in a shell",
    )


def _add_from_open_clip(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
  disco-ds from-open-clip "torchrun --nproc_per_node 8 -m open_clip_train.main --train-data ..." > my.yaml
  disco-ds from-open-clip "$(cat train.sh)" --ranks 64 > my.yaml
exit code: 0 translated, 2 invalid arguments
"""
    parser.add_argument(
        "line",
        metavar="ARGUMENTS",
        help="the command line, its flags alone, or a script that contains it, quoted as one argument",
    )
    parser.add_argument(
        "--ranks",
        type=_number(int, 1),
        metavar="N",
        help="number of GPUs in open_clip (default: from torchrun or srun in ARGUMENTS)",
    )


COMMANDS = {
    "train": ("Train a recipe, alone or as a rank of deepspeed, torchrun or srun.", _add_train),
    "launch": (
        "Train unattended: run deepspeed on one or several hosts, and restart it if it fails.",
        _add_launch,
    ),
    "eval": ("Measure a model's zero-shot accuracy, retrieval and validation loss.", _add_eval),
    "export": (
        "Write trained weights to a folder that open_clip or transformers can load.",
        _add_export,
    ),
    "embed": ("Store a teacher's embeddings with the samples of a data set.", _add_embed),
    "report": ("Draw a run's curves and its last evaluation into its report.png.", _add_report),
    "doctor": ("Check packages, settings, data and hosts before you start a run.", _add_doctor),
    "plan": ("Predict memory and time, and find faster settings or a larger batch.", _add_plan),
    "study": ("Compare global batches by training short branches of a checkpoint.", _add_study),
    "index": ("Count the samples of tar shards, and write their manifest.", _add_index),
    "from-open-clip": (
        "Translate a command line of open_clip into a recipe, and print it.",
        _add_from_open_clip,
    ),
}
"""Maps each command to its summary and the function that adds its arguments."""
