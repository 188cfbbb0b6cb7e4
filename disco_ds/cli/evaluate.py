"""Evaluate a model: `disco-ds eval MODEL [key=value ...]`, or `deepspeed --module disco_ds.evaluate MODEL ...`.

In fp32, as clip_benchmark does it with --no_amp.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from disco_ds.cli.arguments import fail
from disco_ds.config import Config, ModelSettings, check_config, load_config
from disco_ds.config.recipe_yaml import assign, split_overrides
from disco_ds.data import ImageSpec
from disco_ds.distributed import comm
from disco_ds.distributed.agreement import check_agreement
from disco_ds.distributed.host_share import share_host
from disco_ds.distributed.slurm import adopt_slurm
from disco_ds.distributed.watchdog import die_with_launcher
from disco_ds.eval import Result, describe, evaluate_sets, load_sets
from disco_ds.metrics.run_folder import CONFIG
from disco_ds.models.clip import build_model, build_tokenizer, read_preprocessing
from disco_ds.training.weights import build_from, read_weights

_BARE: dict[str, Any] = {
    **{"name": "eval", "global_batch": 64, "micro_batch": 64, "steps": 1, "deepspeed": {}},
    **{"optim": {"warmup_steps": 0}, "data": {"source": "synthetic"}},
}
"""Settings where there is no recipe: of these, evaluation reads micro_batch, data (how to decode) and eval."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disco-ds eval",
        description="Zero-shot accuracy and retrieval of a model on the sets of its run, of a recipe, or named here.",
        epilog="example: disco-ds eval runs/first eval.labelled.imagenet=/data/imagenet/val --json first.json",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run folder, a checkpoint folder, an export, or with --weights a model name as model.name",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. eval.retrieval.coco=/data/coco micro_batch=256"
    )
    parser.add_argument("--weights", type=Path, metavar="FILE", help="weights that open_clip can load")
    parser.add_argument(
        "--config", metavar="NAME|FILE", help="recipe whose data and eval settings to use (default: the run's own)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    return make_parser().parse_intermixed_args(argv)


def read_settings(args: argparse.Namespace) -> Config:
    """Of --config, else of the run that the model belongs to, else none but the overrides. Raises: ValueError."""
    path = Path(args.model)
    own = [folder / CONFIG for folder in (path, *path.parents[:2]) if (folder / CONFIG).is_file()]
    if args.config or (own and not args.weights):
        config = load_config(args.config or own[0], args.overrides)
    else:
        tree = json.loads(json.dumps(_BARE))
        for keys, value in split_overrides(args.overrides):
            assign(tree, keys, value)
        config = check_config(tree, "the command line")
    if not config.eval.labelled and not config.eval.retrieval:
        raise ValueError("nothing to evaluate on: add eval.labelled.NAME=FOLDER or eval.retrieval.NAME=FOLDER")
    if args.json and not args.json.parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")
    return config


def load_model(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The model and its tokenizer. Raises: ValueError."""
    if args.weights:
        settings = ModelSettings(name=args.model, pretrained=args.weights)
        model = build_model(settings)
    elif Path(args.model).exists():
        weights = read_weights(Path(args.model))
        settings, model = weights.settings, build_from(weights)
    else:
        raise ValueError(f"{args.model} does not exist; the name of a model needs its weights: --weights FILE")
    return model.to(comm.local_device()).eval(), build_tokenizer(settings, model)


def write_json(path: Path, model: str, results: Sequence[Result]) -> None:
    """Write the figures of the printed table to a JSON file, unrounded."""
    hidden = ("values", "examples")
    sets = [{key: value for key, value in (vars(r) | r.values).items() if key not in hidden} for r in results]
    path.write_text(json.dumps({"model": model, "sets": sets}, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: done; 1: all ranks stopped together; 2: a mistake in settings or data, told before any work."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    adopt_slurm()
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING if first else logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        config = read_settings(args)
    except ValueError as error:
        return fail(error, first, code=2)
    die_with_launcher()
    with comm.session(config.timeout_s):
        share_host()
        try:
            check_agreement({**config.model_dump(mode="json"), "MODEL": args.model, "--weights": str(args.weights)})
            with comm.all_or_none("data"):
                sets = load_sets(config.eval, config.data)
            with comm.all_or_none("model"):
                model, tokenizer = load_model(args)
        except ValueError as error:
            return fail(error, first, code=2)
        look = read_preprocessing(model)
        spec = ImageSpec(look.size, look.interpolation, look.resize_mode)
        try:
            results = evaluate_sets(model, sets, spec, tokenizer, config.micro_batch)
            with comm.all_or_none("results"):
                if first:
                    print(describe(results), flush=True)
                if first and args.json:
                    write_json(args.json, args.model, results)
        except comm.AgreedError as error:
            return fail(error, first, code=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
