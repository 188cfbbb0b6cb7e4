"""The options of each command, as typed classes whose docstrings are the help texts, and their parser.

Import-light: imports neither torch nor the modules of the commands, so that --help is fast.
"""

import argparse
import inspect
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from disco_ds.launch.packing import unpack
from disco_ds.plan.assumptions import Assumptions

OVERVIEW = """\
Try it without data or GPU:
  disco-ds train --config quickstart
A recipe is a YAML file of settings; docs/settings.md lists them all. Any setting can
be replaced on the command line, as key=value: optim.lr=1e-3 data.shards=/data/mine
`disco-ds COMMAND --help` shows the options of a command, with examples.
"""
INTRODUCTION = "Train CLIP models with large batches on DeepSpeed.\n\ncommands:\n"

File = Annotated[Path | None, Field(title="FILE")]
Folder = Annotated[Path | None, Field(title="FOLDER")]
Count = Annotated[int | None, Field(ge=1, title="N")]
Words = Annotated[list[str], BeforeValidator(shlex.split)]
Keys = Annotated[tuple[str, ...], BeforeValidator(lambda text: tuple(text.split(",")))]


class Command(BaseModel):
    """Options of one command.

    The docstring of a field is its help text, and its title is the placeholder for the value there. A field without a
    docstring is left out of the help text.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    positional: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that are positional arguments."""


class WithRecipe(Command):
    """Options of a command that reads a recipe."""

    positional: ClassVar[tuple[str, ...]] = ("overrides",)
    config: str = Field(title="NAME|FILE")
    """The recipe: the name of a bundled recipe, such as quickstart, or a YAML file."""
    overrides: list[str] = Field([], title="key=value")
    """Settings that replace the recipe's, such as optim.lr=1e-3 deepspeed=zero3."""


class WithResume(WithRecipe):
    """Options of a command that trains."""

    resume: str | None = Field(None, title="auto|latest|FOLDER")
    """Continue a run from a checkpoint. FOLDER: a run folder or one checkpoint (RUN/checkpoints/step-N); latest: the
    newest run of this name that has a checkpoint; auto: like latest, but start a new run if there is none."""
    allow_change: Keys = Field((), title="KEY,...")
    """With --resume: settings that may differ from the checkpoint's, such as optim.lr,optim.weight_decay."""


class Train(WithResume):
    """Train a recipe, alone or as a rank of deepspeed, torchrun or srun.

    Examples:
      disco-ds train --config quickstart
      disco-ds train --config my.yaml --dry-run --ranks 8
      torchrun --nproc_per_node 8 -m disco_ds.train --config my.yaml --resume auto
    exit code: 0 finished, 1 failed, 2 invalid settings or data, 3 saved and stopped by a signal
    """

    dry_run: bool = False
    """Check and print the settings, then exit; needs no data and no GPU."""
    ranks: Count = None
    """With --dry-run: number of ranks, one per GPU (default: the recipe's ranks, or 1)."""
    # disco-ds launch finds its ranks and their run folder by this id.
    launch_id: str | None = None


class Launch(WithResume):
    """Train unattended: run deepspeed on one or several hosts, and restart it if it fails.

    Example:
      disco-ds launch --hostfile hosts --restarts 5 --config my.yaml ranks=16
    exit code: 0 finished, 1 failed, 2 invalid settings or data, 3 saved and stopped by a signal
    """

    hostfile: File = None
    """File with a line `host slots=GPUs` for each host of the run."""
    restarts: int = Field(0, ge=0, title="N")
    """After a failure, resume from the last checkpoint, at most N times."""
    min_hosts: Count = None
    """Continue without hosts that do not answer, as long as N are left (default: wait for all hosts). The launch first
    checks that the batch and data.slots allow this."""
    patience: float = Field(300, ge=0, title="SECONDS")
    """With --min-hosts: how long to wait for a lost host."""
    deepspeed: Words = Field([], title="ARGS")
    """Additional arguments for the deepspeed command, such as '--num_gpus 4'."""


class Eval(WithRecipe):
    """Measure a model's zero-shot accuracy, retrieval and validation loss.

    Examples:
      disco-ds eval runs/first
      disco-ds eval runs/first eval.labeled.imagenet=/data/imagenet/val --json first.json
      disco-ds eval ViT-B-32 --weights vit.pt eval.labeled.imagenet=/data/imagenet/val
    exit code: 0 done, 1 failed, 2 invalid settings, data or weights
    """

    positional = ("model", "overrides")
    model: str = Field(title="MODEL")
    """A run folder, a checkpoint or an export; with --weights: an open_clip model, as in model.name."""
    config: str | None = Field(None, title="NAME|FILE")  # type: ignore[assignment]
    """The recipe, by name or file (default: the settings of the model's run)."""
    weights: File = None
    """Weights that open_clip can load: a file, a folder or a tag."""
    json_file: File = Field(None, alias="json")
    """Also write the results to this file."""
    ema: bool = False
    """Use the moving average of the weights (optim.ema) instead of the last weights."""


class Export(Command):
    """Write trained weights to a folder that open_clip or transformers can load.

    Example:
      disco-ds export runs/first --to exports/first
    """

    positional = ("source",)
    source: Path = Field(title="RUN")
    """A run folder, a checkpoint or an export."""
    to: Path = Field(title="FOLDER")
    """The folder to create."""
    format: Literal["open_clip", "transformers"] = Field(
        "open_clip", title="open_clip|transformers"
    )
    """open_clip: a folder that open_clip loads as local-dir:FOLDER, in the Hugging Face Hub's layout; transformers: a
    folder that AutoModel loads."""
    ema: bool = False
    """Use the moving average of the weights (optim.ema) instead of the last weights."""


class Embed(WithRecipe):
    """Store a teacher's embeddings with the samples of a data set, or score the samples for data.filter.

    Examples:
      disco-ds embed --model ViT-L-14 --pretrained vit_l.pt --config recipe.yaml --to /data/with-embeddings
      torchrun --nproc-per-node 8 -m disco_ds embed --model ... (one rank per GPU)
      disco-ds embed --score --model ViT-L-14 --pretrained vit_l.pt --config recipe.yaml --to /data/scored
    The shards have all members of the samples and two more, img.npy and txt.npy. The command prints the settings for
    training on them. Run it again to continue after an interruption.
    """

    model: str = Field(title="MODEL")
    """The teacher: an open_clip model, as in model.name; without --pretrained: a run folder, a checkpoint or an
    export."""
    pretrained: str | None = Field(None, title="FILE")
    """The teacher's weights, as in model.pretrained."""
    to: Path = Field(title="FOLDER")
    """The folder of the new shards."""
    views: int | None = Field(None, ge=0, le=1000, title="N")
    """Number of augmentations of each image, as the recipe's data section describes them; training on the shards
    repeats them. 0: store one embedding of the image without augmentation. Default: 10; with --score, store no
    embeddings."""
    batch: int = Field(256, ge=1, le=2**20, title="N")
    """Maximum number of images, or of texts, in a forward pass."""
    score: bool = False
    """Store each sample's similarity: the cosine of the embeddings of the image, resized as in evaluation, and of the
    caption; the mean if there are several captions. Print quantiles and the settings of data.filter that keep the best
    70, 50 and 30%, and draw 24 pairs around each of these thresholds."""


class Report(Command):
    """Draw a run's curves and its last evaluation into its report.png."""

    positional = ("folder",)
    folder: Path = Field(title="RUN")
    """A run folder; the run may still be training."""


class Doctor(WithRecipe):
    """Check packages, settings, data and hosts before you start a run.

    Examples:
      disco-ds doctor --config my.yaml --ranks 8
      disco-ds doctor --config my.yaml --picture samples.png
      deepspeed --module disco_ds.doctor --config my.yaml --gradients
    exit code: 0 no check failed, 1 a check failed
    """

    ranks: Count = None
    """Number of ranks, one per GPU (default: the recipe's ranks, or 1)."""
    gradients: bool = False
    """Compare the gradient of one step on these ranks with that of one process."""
    picture: File = None
    """Write a PNG of 24 samples as the model gets them (image, caption, number of tokens)."""


class Plan(Assumptions, WithRecipe):
    """Predict memory and time, and find faster settings or a larger batch.

    Examples:
      disco-ds plan --config my.yaml --ranks 8 --gpu-memory H100-80G
      disco-ds plan --config my.yaml --ranks 8 --gpu-memory A100-40G --fit fitted --batch largest
    The options from --data-samples to --bandwidth are assumptions: replace them with measured values.
    exit code: 0 it fits, 1 it does not fit, 2 invalid settings, or nothing fits (--fit)
    """

    ranks: Count = None
    """Number of ranks, one per GPU (default: the recipe's ranks, or 1)."""
    gpu_memory: str = Field("A100-80G", title="GIB|NAME")
    """Memory of a GPU in GiB, or a GPU's name, such as H100-80G or RTX-4090; an unknown name lists them all."""
    flops: float | None = Field(None, gt=0, title="TFLOPS")
    """Peak rate of a GPU (default: from its data sheet)."""
    link: float | None = Field(None, gt=0, title="GB/S")
    """Rate at which a GPU receives from the other GPUs of its host (default: from its data sheet)."""
    fit: Folder = None
    """Write a recipe with the fastest settings that fit to this folder."""
    batch: Literal["same", "largest"] = Field("same", title="same|largest")
    """With --fit: keep the global batch, or use the largest one that fits."""
    host_memory: float | None = Field(None, ge=0, title="GIB")
    """Memory of a host in GiB; allows --fit to keep images in host memory."""


class Index(Command):
    """Count the samples of tar shards, and write their manifest.

    Examples:
      disco-ds index /data/shards
      disco-ds index 'https://example.org/{000..099}.tar' --to manifest.json
    exit codes: 0 = written, or unchanged (with --check); 1 = changed (with --check); 2 = invalid arguments or shards
    """

    positional = ("shards",)
    shards: str = Field(title="SHARDS")
    """A folder of .tar files, or their names with braces: '/data/{000..099}.tar'."""
    to: File = None
    """The manifest to write (default: manifest.json in the folder of the shards)."""
    check: bool = False
    """Write nothing; list what has changed since the manifest was written."""
    full: bool = False
    """Read every shard whole, even if it has not changed or its count is published; with --check, this finds all
    damaged shards."""
    workers: int = Field(4, ge=0, le=1024, title="N")
    """Number of processes that read shards; 0: this process reads them."""
    missing: Literal["fail", "skip"] = Field("fail", title="fail|skip")
    """What to do if shards do not exist: fail after counting all others, or skip them."""
    cache: Folder = None
    """Folder in which fetched remote shards are kept, as in data.remote.cache."""
    pipe: bool = False
    """Allow shards of the form pipe:COMMAND, which run in a shell."""


class FromOpenClip(Command):
    """Translate a command line of open_clip into a recipe, and print it.

    Example:
      disco-ds from-open-clip --ranks 8 -- --model ViT-B-32 --train-data '/data/{0000..0999}.tar' ... > my.yaml
    Paste the command as it is typed; the words up to open_clip_train.main are skipped.
    exit code: 0 translated, 2 invalid arguments
    """

    positional = ("arguments",)
    arguments: list[str] = Field([], title="ARGUMENTS")
    """The flags of open_clip_train, or its whole command line, after `--`."""
    ranks: int = Field(ge=1, title="N")
    """Number of GPUs on which open_clip_train runs."""


COMMANDS: dict[str, tuple[type[Command], str]] = {
    "train": (Train, "disco_ds.cli.commands:train"),
    "launch": (Launch, "disco_ds.launch.launcher:run"),
    "eval": (Eval, "disco_ds.cli.commands:evaluate"),
    "export": (Export, "disco_ds.cli.commands:export"),
    "embed": (Embed, "disco_ds.cli.commands:embed"),
    "report": (Report, "disco_ds.cli.commands:report"),
    "doctor": (Doctor, "disco_ds.cli.commands:doctor"),
    "plan": (Plan, "disco_ds.cli.plan:run"),
    "index": (Index, "disco_ds.cli.index:run"),
    "from-open-clip": (FromOpenClip, "disco_ds.cli.from_open_clip:run"),
}
"""Maps each command to its options and to the function that runs it, which is imported only then."""

_Parser = partial(
    argparse.ArgumentParser,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    argument_default=argparse.SUPPRESS,  # the class of the options has the defaults
)


def parse_args(argv: list[str]) -> Any:
    """Parse the arguments of `disco-ds COMMAND ...`.

    Returns:
        The options, an instance of the command's class.

    Raises:
        SystemExit: With code 2 for invalid arguments, with code 0 after --help.
    """
    name, *words = argv or ["--help"]
    if name not in COMMANDS:
        description = INTRODUCTION
        for each, (options, _) in COMMANDS.items():
            description += f"  {each:16}{str(options.__doc__).splitlines()[0]}\n"
        overview = _Parser("disco-ds", description=description, epilog=OVERVIEW)
        overview.add_argument("command", metavar="COMMAND", choices=COMMANDS)
        return overview.parse_args([name])
    options, parser = COMMANDS[name][0], make_parser(name)
    parse = parser.parse_known_args
    if "overrides" in options.positional:  # they may appear between options
        parse = parser.parse_known_intermixed_args
    given, unknown = parse(unpack(words))
    # Not imported at the top, because help texts do not need these modules.
    if unknown:
        from disco_ds.config.load import explain_word
        from disco_ds.names import did_you_mean

        flag = unknown[0].partition("=")[0]
        note = did_you_mean(flag, parser.format_help().split())
        if hint := explain_word(flag):
            note = f"; {flag}: {hint} (pass settings as key=value)"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{note}")
    try:
        return options.model_validate(vars(given))
    except ValidationError as error:
        from disco_ds.config.settings import explain_value

        item = error.errors()[0]
        parser.error(explain_value(_flag(str(item["loc"][0])), item))


def make_parser(name: str) -> argparse.ArgumentParser:
    """Build the parser of a command from its class."""
    options = COMMANDS[name][0]
    summary, _, details = (inspect.getdoc(options) or "").partition("\n\n")
    parser = _Parser(f"disco-ds {name}", description=summary, epilog=details)
    # DeepSpeed's launcher passes this option to the ranks.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    fields = options.model_fields
    # The overrides follow all other positional arguments.
    for key, field in sorted(fields.items(), key=lambda item: item[0] == "overrides"):
        key = field.alias or key
        text = " ".join((field.description or argparse.SUPPRESS).split()).replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(_flag(key), action="store_true", help=text)
            continue
        if isinstance(field.default, str | int | float) and field.default != "":
            text = f"{text.rstrip('.')} (default: {field.default})."
        if key not in options.positional:
            parser.add_argument(
                _flag(key), required=field.is_required(), metavar=field.title, help=text
            )
        else:
            nargs = "*" if get_origin(field.annotation) is list else None
            parser.add_argument(key, nargs=nargs, metavar=field.title, help=text)
    return parser


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"
