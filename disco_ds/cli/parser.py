"""The command line of disco-ds as one tree of parsers.

Light: it imports neither torch nor the modules of the commands, which main.py imports when they are asked for.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from disco_ds.cli.packing import unpack
from disco_ds.models.gpus import GPUS
from disco_ds.plan.assumptions import Assumptions


class Command(NamedTuple):
    module: str
    """Module with the command's run(args), which returns the exit code."""
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The arguments of `disco-ds COMMAND ...`. Raises: SystemExit with code 2 for a mistake, 0 after --help."""
    parser, commands = make_parsers()
    if not argv or argv[0] not in commands:
        return parser.parse_args(argv)
    command = commands[argv[0]]
    try:
        given = unpack(argv[1:])
    except ValueError as error:
        command.error(str(error))
    # Overrides may stand between options, which argparse understands of a command's own parser alone.
    args, unknown = command.parse_known_intermixed_args(given, argparse.Namespace(command=argv[0]))
    if unknown:
        from disco_ds.config.open_clip_flags import (
            explain_word,  # not at the top: a help text needs no libraries
        )

        words = (word.partition("=")[0] for word in unknown if word.startswith("--"))
        hints = [
            f"; {word}: {hint}, as key=value" for word in words if (hint := explain_word(word))
        ]
        command.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(hints[:1])}")
    return args


def make_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of disco-ds, and that of each command by name."""
    parser = argparse.ArgumentParser(
        prog="disco-ds", description="Large-batch CLIP training on DeepSpeed."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(name, help=command.summary, description=command.summary)
        )
    return parser, dict(commands.choices)


def _number(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return a reader for argparse that takes numbers from low to high, both included, and refuses NaN."""

    def read(text: str) -> float:
        value: float = kind(text)
        if not low <= value <= high or math.isinf(value):
            limits = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
            raise argparse.ArgumentTypeError(f"expected a number {limits}, got {text}")
        return value

    read.__name__ = kind.__name__  # argparse's name of it, for texts that are no numbers
    return read


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _add_recipe(parser: argparse.ArgumentParser, required: bool = True) -> None:
    default = "" if required else "; default: the settings of the model's own run"
    text = f"a recipe: the name of a bundled one, or a YAML file{default}"
    parser.add_argument("--config", required=required, metavar="NAME|FILE", help=text)
    text = "settings that replace those of the recipe, such as optim.lr=1e-3 deepspeed=zero3"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=text)


def _add_resume(parser: argparse.ArgumentParser) -> None:
    text = (
        "continue from the last complete checkpoint of a run folder, or from the checkpoint RUN/checkpoints/step-N; "
        "latest: of the newest run of this name; auto: of that too, or start a new run if it has none"
    )
    parser.add_argument("--resume", metavar="auto|latest|FOLDER", help=text)
    text = "with --resume: settings that may differ from the checkpoint's, such as optim.lr,optim.weight_decay"
    parser.add_argument("--allow-change", type=_names, default=(), metavar="KEY,...", help=text)


def _add_ranks(parser: argparse.ArgumentParser, ranks: str, hostfile: str) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=int, metavar="N", help=ranks)
    where.add_argument("--hostfile", type=Path, metavar="FILE", help=hostfile)


def _add_rank(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--local_rank", type=int, help=argparse.SUPPRESS
    )  # DeepSpeed's launcher passes it


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    _add_resume(parser)
    text = "print the resolved settings and stop; this needs neither ranks nor data"
    parser.add_argument("--dry-run", action="store_true", help=text)
    _add_ranks(
        parser,
        "with --dry-run: resolve for N ranks",
        "with --dry-run: resolve for the slots of a hostfile",
    )
    _add_rank(parser)
    # disco-ds launch finds its ranks and their run folder by it.
    parser.add_argument("--launch-id", help=argparse.SUPPRESS)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    _add_resume(parser)
    text = "the hosts, one `host slots=GPUs` a line; default: this host alone"
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help=text)
    text = "restart a run that has failed from its last checkpoint, at most N times (default: %(default)s)"
    parser.add_argument("--restarts", type=_number(int, 0), default=0, metavar="N", help=text)
    text = (
        "go on with N hosts or more of the hostfile while others do not answer; every number of ranks that this may "
        "give is checked before the start"
    )
    parser.add_argument("--min-hosts", type=_number(int, 1), metavar="N", help=text)
    text = (
        "with --min-hosts: seconds to wait for a host that does not answer (default: %(default)s)"
    )
    parser.add_argument("--patience", type=_number(float, 0), default=300, metavar="S", help=text)
    text = 'more arguments for the `deepspeed` command, such as "--num_gpus 4"'
    parser.add_argument("--deepspeed", default="", metavar="ARGS", help=text)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example: disco-ds eval runs/first eval.labeled.imagenet=/data/imagenet/val --json first.json"
    text = "a run folder, a checkpoint folder or an export; with --weights the name of a model, as model.name has it"
    parser.add_argument("model", metavar="MODEL", help=text)
    _add_recipe(parser, required=False)
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="a file of weights that open_clip can load"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results to this file, too"
    )
    _add_rank(parser)


def _add_export(parser: argparse.ArgumentParser) -> None:
    text = "a run folder, of which the last checkpoint is taken, a checkpoint folder or an export"
    parser.add_argument("source", type=Path, help=text)
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="the new folder to write"
    )
    text = (
        "open_clip: a folder that open_clip loads, also from the Hugging Face Hub; "
        "pt: one file; default: %(default)s"
    )
    parser.add_argument("--format", metavar="open_clip|pt|both", default="both", help=text)
    text = "precision of the weights that are written (default: %(default)s)"
    parser.add_argument("--dtype", metavar="fp32|bf16|fp16", default="fp32", help=text)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="a run folder, of a run that may still be going on"
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit code: 0 if nothing fails, 1 otherwise"
    _add_recipe(parser)
    text = "check the hosts of this hostfile too, over ssh if there are several"
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help=text)
    text = "number of ranks that the run will have (default: the recipe's ranks)"
    parser.add_argument("--ranks", type=int, metavar="N", help=text)
    text = "compare the gradient of one step on these ranks with that of a single process"
    parser.add_argument("--gradients", action="store_true", help=text)
    _add_rank(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit code: 0 if the recipe fits, 1 if it does not, 2 for a mistake"
    _add_recipe(parser)
    _add_ranks(
        parser,
        "number of GPUs (default: the recipe's ranks, else 1)",
        "plan for the slots of a hostfile",
    )
    text = f"memory of a GPU in GiB, or one of {', '.join(GPUS)} (default: %(default)s)"
    parser.add_argument("--gpu-memory", metavar="GIB|NAME", default="A100-80G", help=text)
    text = "search the largest global batch that fits, and write its recipe into this folder"
    parser.add_argument("--fit", type=Path, metavar="FOLDER", help=text)
    text = "memory of a host; with --fit, pixels may then wait there"
    parser.add_argument("--host-memory", type=_number(float, 0), metavar="GIB", help=text)
    text = "number of samples in the data, which losses that keep state for each sample need"
    parser.add_argument("--data-samples", type=_number(int, 1), metavar="N", help=text)
    text = "draw the memory of each moment of the step as stacked bars"
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help=text)
    assumed = parser.add_argument_group("what is assumed")
    fraction, rate = _number(float, 0, 1), _number(float, 1e-3)
    for option, kind, default, metavar, text in (
        (
            "--slack",
            fraction,
            Assumptions.slack,
            "FRACTION",
            "fraction of the memory that the allocator cannot use",
        ),
        (
            "--context",
            _number(float, 0),
            Assumptions.context_gib,
            "GIB",
            "memory that CUDA and NCCL take on each GPU",
        ),
        ("--image-kb", rate, Assumptions.image_bytes / 1000, "KB", "size of a compressed image"),
        ("--per-host", _number(int, 1), Assumptions.per_host, "N", "number of GPUs in a host"),
        (
            "--flops",
            rate,
            None,
            "TFLOPS",
            "rate of products on a GPU (default: as its maker promises)",
        ),
        (
            "--efficiency",
            fraction,
            Assumptions.efficiency,
            "FRACTION",
            "fraction of that rate that is reached",
        ),
        (
            "--link",
            rate,
            None,
            "GB/S",
            "rate at which a GPU receives from others of its host (default: as promised)",
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
        assumed.add_argument(option, type=kind, default=default, metavar=metavar, help=text + shown)


def _add_index(parser: argparse.ArgumentParser) -> None:
    text = "a folder of .tar files, or shards by name: '/data/{000..099}.tar', 'https://...'"
    parser.add_argument("shards", help=text)
    text = "the manifest to write (default: manifest.json in the folder of the shards)"
    parser.add_argument("--to", type=Path, metavar="FILE", help=text)
    text = "write nothing, and list what has changed since the manifest was written; exit code 1 if anything has"
    parser.add_argument("--check", action="store_true", help=text)
    text = (
        "number of processes that read shards; 0: this one (default: one for each core, at most 4)"
    )
    parser.add_argument("--workers", type=_number(int, 0, 1024), metavar="N", help=text)
    parser.add_argument(
        "--pipe", action="store_true", help="allow pipe:COMMAND, which runs in a shell"
    )


COMMANDS = {
    "train": Command(
        "disco_ds.cli.train",
        "Train a recipe, in this process alone or on every rank that a launcher has started: deepspeed, torchrun or "
        "srun.",
        _add_train,
    ),
    "launch": Command(
        "disco_ds.cli.launch",
        "Train a recipe unattended: start `deepspeed` on one host or several, clean up after it, and restart it after "
        "a failure.",
        _add_launch,
    ),
    "eval": Command(
        "disco_ds.cli.evaluate",
        "Evaluate a model: zero-shot accuracy and retrieval on the sets of its run, of a recipe, or named here.",
        _add_eval,
    ),
    "export": Command(
        "disco_ds.cli.export",
        "Write trained weights into a new folder, as open_clip loads them.",
        _add_export,
    ),
    "report": Command(
        "disco_ds.cli.report",
        "Draw the curves of a run, and the images of its last evaluation, as report.png in its folder.",
        _add_report,
    ),
    "doctor": Command(
        "disco_ds.cli.doctor",
        "Check a run before it is started: packages, ds_config, batch, data, hosts, and the gradient of its ranks.",
        _add_doctor,
    ),
    "plan": Command(
        "disco_ds.cli.plan",
        "Plan a recipe: memory of each GPU and host by part, the largest batch that fits, the time of a step. No GPU "
        "is needed.",
        _add_plan,
    ),
    "index": Command(
        "disco_ds.cli.index",
        "Count the samples of shards and write their manifest; counts of unchanged shards are kept.",
        _add_index,
    ),
}
