"""`disco-ds plan`: the table, the verdict, the recipe that fits, the picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from disco_ds.cli.messages import fail
from disco_ds.config import load_config
from disco_ds.distributed.hostfile import count_ranks
from disco_ds.models.gpus import find_gpu
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.fit import write_recipe
from disco_ds.plan.measure import measure
from disco_ds.plan.memory import GIB, PARTS, Memory, describe_pixels
from disco_ds.plan.overview import Estimate, Plan, plan_run


def run(args: argparse.Namespace) -> int:
    """Exit code 0: the recipe fits; 1: it does not; 2: a mistake."""
    try:
        return plan(args)
    except ValueError as error:
        return fail(error, code=2)


def plan(args: argparse.Namespace) -> int:
    """Raises: ValueError."""
    config = load_config(args.config, args.overrides)
    if args.measure:
        print(measure(config))
        return 0
    # --hostfile, else --ranks, else the recipe.
    ranks = count_ranks(config.ranks if args.ranks is None else args.ranks, args.hostfile)
    assumed = Assumptions(
        slack=args.slack,
        context_gib=args.context,
        image_bytes=int(1000 * args.image_kb),
        num_samples=args.data_samples,
        per_host=args.per_host,
        efficiency=args.efficiency,
        between_hosts=args.bandwidth,
        save_rate=args.save_rate,
        copy_rate=args.copy_rate,
        failure_hours=args.failure_hours,
    )
    gpu = find_gpu(args.gpu_memory, args.flops, args.link)
    made = plan_run(config, ranks, gpu, assumed, largest=bool(args.fit), host_gib=args.host_memory)
    name = made.config.name
    summary = "\n".join([f"{name}: {made.config.describe(ranks)}", "", table(made.now.memory), verdict(made)])
    pixels = describe_pixels(made.config.global_batch // ranks, made.towers, assumed.image_bytes)
    print("\n".join([summary, "", describe_host(made), pixels, "", *describe_scaling(made), *describe_interval(made)]))
    if args.fit:
        print(f"\n{write_recipe(made.config, args.fit, summary)}")
    if args.picture:
        title = f"{name}: {made.config.global_batch:,} on {ranks} x {gpu.name}"
        draw(made.now.memory, gpu.gib, title, args.picture)
    return 0 if made.fits else 1


def table(memory: Memory) -> str:
    """GiB by part and moment."""
    lines = [f"{'GiB of a GPU':16}" + "".join(f"{name:>10}" for name in memory.moments)]
    for part in PARTS:
        lines.append(f"{part:16}" + "".join(f"{moment[part] / GIB:10.2f}" for moment in memory.moments.values()))
    totals = (sum(moment.values()) / GIB for moment in memory.moments.values())
    return "\n".join([*lines, f"{'all':16}" + "".join(f"{total:10.2f}" for total in totals)])


def verdict(made: Plan) -> str:
    """Whether the recipe fits; if it does not, what takes the most memory."""
    memory = made.now.memory
    worst = max(memory.parts, key=lambda part: memory.parts[part])
    most = "" if made.fits else f"; most of it: {worst}, {memory.parts[worst] / GIB:.2f}"
    begin = "fits" if made.fits else "DOES NOT FIT"
    return f"{begin}: {memory.total / GIB:.2f} of {made.gpu.gib:g} GiB, at its peak in {memory.peak}{most}"


def describe_host(made: Plan) -> str:
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in made.now.memory.host.items())
    total = f"{made.host_bytes / GIB:,.1f} GiB for {made.ranks_per_host} ranks"
    return f"host: {total}, beside Python and its libraries; of one rank: {parts}"


def describe_scaling(made: Plan) -> list[str]:
    """A line for every number of GPUs, and what their times assume."""
    lines = ["  GPUs  micro-batches     GiB   s/step  samples/s  towers s   loss s   comm s  exposed s   comm GB"]
    lines += [_describe_estimate(estimate, made.config.global_batch) for estimate in made.scaling]
    speed, timeout_s, assumed = made.now.speed, made.config.timeout_s, made.assumed
    # Half of it, since a step may take longer than planned.
    if speed and speed.step_s > timeout_s / 2:
        lines.append(f"timeout_s is {timeout_s:g}: a rank that takes so long for a step is taken to hang; set more")
    how = "no times: give --flops and --link, or a GPU by name"
    if speed:
        how = f"{assumed.efficiency:g} of the GPU's FLOP/s, {assumed.between_hosts:g} GB/s between hosts of "
        how += f"{assumed.per_host} GPUs"
    return [*lines, f"Assumed: {how}; no waiting for data, no stragglers, no latencies."]


def describe_interval(made: Plan) -> list[str]:
    """How often to save, where a time between failures is given."""
    interval, speed, assumed = made.interval, made.now.speed, made.assumed
    if interval is None:
        return []
    minutes = interval.every_s / 60
    steps = f", or every_steps={max(round(interval.every_s / speed.step_s), 1):,}" if speed else ""
    return [
        f"save every {minutes:.1f} min (checkpoint.every_minutes={minutes:.0f}{steps}): a checkpoint of "
        f"{interval.num_bytes / 1e9:.1f} GB stops the training for {interval.stall_s:.2f} s and is written in "
        f"{interval.write_s:.1f} s",
        f"saves and repeated steps then cost {interval.lost:.1%} of the time, without restarts",
        f"Assumed: a failure every {assumed.failure_hours:g} h, {assumed.save_rate:g} GB/s of all ranks to the disk, "
        f"{assumed.copy_rate:g} GB/s of a GPU to its host.",
    ]


def _describe_estimate(estimate: Estimate, global_batch: int) -> str:
    line = f"{estimate.ranks:6}{estimate.num_micro_batches:15}{estimate.memory.total / GIB:8.1f}"
    if speed := estimate.speed:
        line += f"{speed.step_s:9.2f}{global_batch / speed.step_s:11,.0f}{speed.towers_s:10.2f}{speed.loss_s:9.2f}"
        line += f"{speed.comm_s:9.2f}{speed.exposed_s:11.2f}{speed.comm_bytes / 1e9:10.1f}"
    return line


def draw(memory: Memory, gib: float, title: str, path: Path) -> None:
    """Write a picture with stacked bars, one for each moment of the step."""
    from matplotlib import colormaps, style
    from matplotlib.figure import Figure

    from disco_ds.metrics.report import STYLE

    with style.context(["default", STYLE]):
        figure = Figure((9, 5), dpi=110, layout="constrained")
        axes = figure.subplots()
        # Each part stands on those before it.
        base = [0.0] * len(memory.moments)
        for number, part in enumerate(PARTS):
            heights = [moment[part] / GIB for moment in memory.moments.values()]
            axes.bar(
                list(memory.moments), heights, bottom=base, label=part, color=colormaps["tab10"](number), width=0.6
            )
            base = [low + height for low, height in zip(base, heights, strict=True)]
        axes.axhline(gib, color="black", linestyle="--", linewidth=1, label=f"the GPU: {gib:g} GiB")
        axes.set(ylabel="GiB", title=title)
        figure.legend(loc="outside right center", reverse=True)
        figure.savefig(path)
