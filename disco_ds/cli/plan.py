"""`disco-ds plan`: the table, the verdict, the recipe that fits, the picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from disco_ds.config import Config, load_config
from disco_ds.distributed.hostfile import count_ranks
from disco_ds.models.gpus import GPUS, find_gpu
from disco_ds.plan.fit import fit, write_recipe
from disco_ds.plan.measure import measure
from disco_ds.plan.memory import GIB, IMAGE_BYTES, PARTS, Memory, Slack, describe_pixels, plan_memory
from disco_ds.plan.speed import BETWEEN_HOSTS, EFFICIENCY, Rates, plan_speed
from disco_ds.plan.towers import Towers, trace


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disco-ds plan",
        description="Memory of each GPU and host by part, and the time of a step, of a recipe; no GPU needed.",
        epilog="exit code: 0 it fits, 1 it does not, 2 a mistake",
    )
    parser.add_argument("--config", required=True, metavar="NAME|FILE", help="a recipe: a bundled name or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. micro_batch=512 deepspeed=zero2")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=int, metavar="N", help="GPUs (default: the recipe's ranks, else 1)")
    where.add_argument("--hostfile", type=Path, metavar="FILE", help="for the slots of a hostfile")
    parser.add_argument(
        "--gpu-memory",
        metavar="GIB|NAME",
        default="A100-80G",
        help=f"GiB, or one of {', '.join(GPUS)} (default: %(default)s)",
    )
    parser.add_argument("--fit", type=Path, metavar="FOLDER", help="write the recipe of the largest global batch there")
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="of a host; with --fit, pixels may wait there")
    parser.add_argument("--data-samples", type=int, metavar="N", help="of the data, for losses that keep state of each")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the memory as stacked bars")
    parser.add_argument("--measure", action="store_true", help="run the towers on the device at hand, and compare")
    assumed = parser.add_argument_group("what is assumed")
    assumed.add_argument(
        "--slack", type=float, default=Slack.share, help="fraction lost to the allocator (%(default)s)"
    )
    assumed.add_argument("--context", type=float, default=Slack.gib, help="GiB of CUDA, NCCL, libraries (%(default)s)")
    assumed.add_argument(
        "--image-kb", type=float, default=IMAGE_BYTES / 1000, help="of a compressed image (%(default)s)"
    )
    assumed.add_argument("--per-host", type=int, default=8, help="GPUs of a host (%(default)s)")
    assumed.add_argument("--flops", type=float, metavar="T", help="TFLOP/s of 16-bit products (default: the GPU's)")
    assumed.add_argument("--efficiency", type=float, default=EFFICIENCY, help="fraction reached (%(default)s)")
    assumed.add_argument("--link", type=float, metavar="GB/S", help="a GPU receives in its host (default: the GPU's)")
    assumed.add_argument(
        "--bandwidth", type=float, default=BETWEEN_HOSTS, metavar="GB/S", help="from others (%(default)s)"
    )
    return parser


def main(argv: list[str]) -> int:
    try:
        return plan(make_parser().parse_intermixed_args(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def plan(args: argparse.Namespace) -> int:
    """Raises: ValueError."""
    config = load_config(args.config, args.overrides)
    if args.measure:
        print(measure(config))
        return 0
    ranks = count_ranks(config.ranks if args.ranks is None else args.ranks, args.hostfile)
    gpu = find_gpu(args.gpu_memory, args.flops, args.link)
    per_host = min(ranks, args.per_host)
    assumed: dict[str, Any] = {
        "slack": Slack(args.slack, args.context),
        "num_samples": args.data_samples,
        "image_bytes": int(1000 * args.image_kb),
    }
    if args.fit:
        config = fit(config, ranks, gpu.gib, args.host_memory, per_host, **assumed)
    words = config.describe(ranks)  # raises where the batch does not divide, before the trace
    towers = trace(config, config.micro_batch)
    memory = plan_memory(config, ranks, towers, **assumed)
    lines = [f"{config.name}: {words}", "", table(memory), verdict(memory, gpu.gib)]
    lines += ["", describe_host(per_host, memory)]
    lines += [describe_pixels(config.global_batch // ranks, towers, assumed["image_bytes"]), ""]
    lines += scaling(config, ranks, towers, Rates(gpu, args.efficiency, args.bandwidth, args.per_host), assumed)
    print("\n".join(lines))
    if args.fit:
        print(f"\n{write_recipe(config, args.fit, chr(10).join(lines[:3]) + lines[3])}")
    if args.picture:
        draw(memory, gpu.gib, f"{config.name}: {config.global_batch:,} on {ranks} x {gpu.name}", args.picture)
    return 0 if memory.total <= gpu.gib * GIB else 1


def table(memory: Memory) -> str:
    """GiB by part and moment."""
    lines = [f"{'GiB of a GPU':16}" + "".join(f"{name:>10}" for name in memory.moments)]
    for part in PARTS:
        lines.append(f"{part:16}" + "".join(f"{moment[part] / GIB:10.2f}" for moment in memory.moments.values()))
    totals = (sum(moment.values()) / GIB for moment in memory.moments.values())
    return "\n".join([*lines, f"{'all':16}" + "".join(f"{total:10.2f}" for total in totals)])


def verdict(memory: Memory, gib: float) -> str:
    fits, worst = memory.total <= gib * GIB, max(memory.parts, key=lambda part: memory.parts[part])
    words = "fits" if fits else "DOES NOT FIT"
    most = f"; most of it: {worst}, {memory.parts[worst] / GIB:.2f}"
    return f"{words}: {memory.total / GIB:.2f} of {gib:g} GiB, at its peak in {memory.peak}{'' if fits else most}"


def describe_host(per_host: int, memory: Memory) -> str:
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.host.items())
    of_all = per_host * sum(memory.host.values()) / GIB
    return f"host: {of_all:,.1f} GiB for {per_host} ranks, beside Python and its libraries; of one rank: {parts}"


def scaling(config: Config, ranks: int, towers: Towers, rates: Rates, assumed: dict[str, Any]) -> list[str]:
    """A line for every number of GPUs that divides the batch."""
    lines = ["  GPUs  micro-batches     GiB   s/step  samples/s  towers s   loss s   wire s   wire GB"]
    free = config.model_copy(update={"ranks": None})
    for n in sorted({ranks, *(2**i for i in range(11))}):
        if ranks / 8 <= n <= 8 * ranks and config.global_batch % (n * config.micro_batch) == 0:
            memory, speed = plan_memory(free, n, towers, **assumed), plan_speed(free, n, towers, rates)
            line = f"{n:6}{config.global_batch // n // config.micro_batch:15}{memory.total / GIB:8.1f}"
            if speed:
                line += f"{speed.step_s:9.2f}{config.global_batch / speed.step_s:11,.0f}"
                line += f"{speed.towers_s:10.2f}{speed.loss_s:9.2f}{speed.wire_s:9.2f}{speed.wire_bytes / 1e9:10.1f}"
            lines.append(line)
    now = plan_speed(config, ranks, towers, rates)
    if now and now.step_s > config.timeout_s / 2:
        lines.append(
            f"timeout_s is {config.timeout_s:g}: a rank that takes so long for a step is taken to hang; set more"
        )
    told = (
        f"{rates.efficiency:g} of the GPU's FLOP/s, {rates.between_hosts:g} GB/s between hosts of {rates.per_host} GPUs"
    )
    if not now:
        told = "no times: say --flops and --link, or a GPU by name"
    return [*lines, f"Assumed: {told}; nothing overlaps, no waiting for data, no stragglers."]


def draw(memory: Memory, gib: float, title: str, path: Path) -> None:
    """Stacked bars, one for each moment of the step."""
    from matplotlib import colormaps, style
    from matplotlib.figure import Figure

    from disco_ds.metrics.report import STYLE

    with style.context(["default", STYLE]):
        figure = Figure((9, 5), dpi=110, layout="constrained")
        axes = figure.subplots()
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
