"""The commands that only call the package and print the result.

Each function imports what it needs, so that no command waits for the libraries of another one.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from disco_ds.checks.report import Line, examine
from disco_ds.cli.options import Doctor, Embed, Eval, Export, Report, Train
from disco_ds.config import Config, load_config, render_ds_config
from disco_ds.distributed.launcher import die_with_launcher
from disco_ds.runs.messages import fail_rank, say, set_up_logging, show


def train(options: Train) -> int:
    """Train a recipe. Runs alone or on every rank of a launcher.

    Returns:
        Exit code 0: finished, or --resume auto found a finished run. 1: failed. 2: invalid
        settings or data, found before any work. 3: stopped by a signal, after saving.
    """
    is_rank_0 = set_up_logging()
    # Otherwise this rank would keep training after its launcher has died.
    die_with_launcher()
    problem: ValueError | None = None
    try:
        config = load_config(options.config, options.overrides)
        if is_rank_0:
            say(f"{config.name}: loading the libraries, the data and the model")
    except ValueError as error:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return fail_rank(error, 2)
        problem = error
    # Imported here, because these imports take several seconds.
    import torch

    from disco_ds.distributed.comm import AgreedError, RendezvousError
    from disco_ds.run import refuse_recipe, train_session

    try:
        if problem is not None:
            refuse_recipe(problem)
        train_session(
            config, options.resume, options.allow_change, options.launch_id, is_command=True
        )
    except RendezvousError as error:
        return fail_rank(error, 1)
    except torch.OutOfMemoryError:
        return 1  # already reported
    except AgreedError as error:
        if problem is not None:
            fail_rank(error, error.exit_code, speaks=is_rank_0)
        return error.exit_code  # already reported
    return 0


def export(options: Export) -> int:
    """Write trained weights for open_clip or transformers.

    Raises:
        ValueError: If an argument is invalid. Then nothing is written.
        OSError: If the files cannot be written.
    """
    from disco_ds.checkpoints.export import export_run

    folder = export_run(options.source, options.to, options.format, options.ema)
    files = ", ".join(sorted(path.name for path in folder.iterdir()))
    print(f"{folder}: {files}; README.md explains how to load the weights")
    return 0


def report(options: Report) -> int:
    """Redraw a run's report.png.

    Raises:
        ValueError: If the folder is not a run folder with metrics.
        OSError: If the picture cannot be written.
    """
    from disco_ds.metrics.report import write_report

    print(write_report(options.folder))
    return 0


def evaluate(options: Eval) -> int:
    """Evaluate a model and print a table of results. Runs alone or on every rank of a launcher."""
    from disco_ds.config.text_file import write_json
    from disco_ds.distributed.comm import AgreedError, RefusedError, RendezvousError
    from disco_ds.eval import describe
    from disco_ds.run import evaluate_run

    is_rank_0 = set_up_logging()
    die_with_launcher()
    path = options.json_file
    try:
        if path and not path.parent.is_dir():
            raise RefusedError(f"--json {path}: there is no folder {path.parent}")
        results = evaluate_run(
            options.model, options.overrides, options.config, options.weights, options.ema
        )
        if is_rank_0:
            print(describe(results), flush=True)
            if path:
                sets = [
                    {"kind": result.kind, "name": result.name} | result.values | result.counts
                    for result in results
                ]
                write_json(path, {"model": options.model, "sets": sets})
    except AgreedError as error:
        return fail_rank(error, error.exit_code, speaks=is_rank_0)
    except (RendezvousError, OSError) as error:
        return fail_rank(error, 1)
    return 0


def embed(options: Embed) -> int:
    """Store a teacher's embeddings or similarities with the samples. Runs alone or on every rank of a launcher.

    Raises:
        ValueError: If the settings or the model are invalid, or if the folder given by --to has shards of another
            teacher, other data or other settings. In this case, nothing is written.
        DataError: If too many samples are broken.
        OSError: If a shard cannot be read or written.
    """
    from disco_ds.checks.samples import NUM_SHOWN, draw_pairs
    from disco_ds.data.embed import IMAGE, SCORE, TEXT, Embedder, read_scores
    from disco_ds.eval.model import in_precision, load_model, read_input_spec
    from disco_ds.models.pretrained import hash_weights

    is_rank_0 = set_up_logging()
    config = load_config(options.config, options.overrides)
    model, tokenizer = load_model(options.model, options.pretrained)
    identity = {"model": options.model, "weights": hash_weights(model)}
    clip: Any = model
    scale, bias = clip.logit_scale.exp().item(), clip.logit_bias
    model = in_precision(model.requires_grad_(False), config.precision)
    spec = read_input_spec(model, tokenizer)
    views = 10 if options.views is None and not options.score else options.views
    embedder = Embedder(config.data, spec, model, identity, views, options.batch, options.score)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    complete = embedder.write(options.to, rank, size)
    if is_rank_0 and views is not None:
        known = "" if bias is None else f", bias: {bias.item():.6g}"
        print(
            f"train on {options.to} with\nteacher: {{image: {IMAGE}, text: {TEXT}, scale: {scale:.6g}{known}}}"
        )
    if options.score and complete:
        scores = read_scores(options.to)
        order = scores.argsort(kind="stable")
        quantiles = {p: float(scores[order[p * len(order) // 100]]) for p in (10, 30, 50, 70, 90)}
        below = ", ".join(f"{p}% are below {score:.2f}" for p, score in quantiles.items())
        print(f"{SCORE} of {len(scores):,} samples: {below}\ntrain on data.shards={options.to} and")
        for p in (30, 50, 70):
            print(f"the best {100 - p}%: data.filter='{{{SCORE}: {{min: {quantiles[p]}}}}}'")
            start = max(p * len(order) // 100 - NUM_SHOWN // 2, 0)
            pairs = embedder.read_pairs(options.to, scores, order[start : start + NUM_SHOWN])
            draw_pairs(pairs, options.to / f"best_{100 - p}.png")
    return 0


def dry_run(options: Train) -> int:
    """Print the settings of a run, or the reason why the run would be refused.

    Raises:
        ValueError: If a run with these settings would refuse to start.
    """
    config = load_config(options.config, options.overrides)
    ranks = options.ranks or config.ranks or 1
    text = describe_run(config, ranks)
    # Imported only now, because importing the model libraries takes seconds. Mistakes in the settings
    # are reported before that.
    from disco_ds.checks.recipe import check_length, check_recipe
    from disco_ds.data import count_epoch, load_sources

    lines = list(check_recipe(config, ranks))
    if not options.resume:
        epoch_samples = 0
        with suppress(ValueError):  # the data may be on another machine
            epoch_samples = count_epoch(config.data, load_sources(config.data))
        lines += check_length(config, epoch_samples)
    for line in lines:
        if line.status == "warn":
            show(line.found, "warning")
    print(f"{text}\nData and hosts are not checked here; disco-ds doctor does that.")
    return 0


def describe_run(config: Config, ranks: int) -> str:
    """Return the resolved settings, the rendered ds_config, the batch and the length of the run as text."""
    ds_config = json.dumps(render_ds_config(config.stage_configs[0], ranks), indent=2)
    return f"{config.to_yaml()}\nds_config.json:\n{ds_config}\n\n{config.describe(ranks)}"


def doctor(options: Doctor) -> int:
    """Print the result of each check. Runs alone or on every rank of a launcher.

    Returns:
        Exit code 0: no check failed (there may be warnings). 1: a check failed.
    """
    die_with_launcher()
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    failed = False
    for line in _check_all(options, is_rank_0, int(os.environ.get("WORLD_SIZE", "1"))):
        failed |= line.status == "fail"
        if is_rank_0:
            print(line, flush=True)
    return int(failed)


def _check_all(options: Doctor, is_rank_0: bool, size: int) -> Iterator[Line]:
    """Run all checks of the doctor.

    Args:
        options: The command's options.
        is_rank_0: Whether this is rank 0. The other ranks skip the checks that need only one rank.
        size: Number of ranks that a launcher has started.

    Yields:
        The lines to print.
    """
    # A package that cannot be imported is reported like other problems.
    try:
        from disco_ds.checks.hosts import check_host
        from disco_ds.checks.ranks import check_ranks
        from disco_ds.checks.recipe import check_data, check_start
        from disco_ds.checks.samples import check_samples
    except Exception as error:  # a broken installation may raise anything
        remedy = (
            "reinstall the package that cannot be imported; torch and torchvision must be of the same build "
            "(CPU or CUDA)"
        )
        yield Line("fail", "imports", f"{type(error).__name__}: {error}", remedy)
        return
    try:
        config = load_config(options.config, options.overrides)
    except ValueError as error:
        yield Line("fail", "recipe", str(error))
        return
    ranks = size if size > 1 else options.ranks or config.ranks or 1
    if is_rank_0:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # 0: unknown
        reported = set[str]()
        for lines in (
            examine("recipe", check_start(config, ranks)),
            examine("data", check_data(config, ranks, ranks_here)),
            examine("samples", check_samples(config, options.picture)),
        ):
            # Several checks may find the same mistake, for example an unknown model.
            yield from (line for line in lines if line.found not in reported)
            reported.update(line.found for line in lines)
        yield from examine("runs folder", check_host(config.runs))
    if size > 1 or options.gradients:
        yield from check_ranks(config, ranks, is_rank_0, options.gradients)
