"""`disco-ds plan`: predict memory and step times, and find the largest global batch that fits."""

from __future__ import annotations

import argparse

from disco_ds.config import load_config
from disco_ds.launch.hostfile import count_ranks
from disco_ds.models.gpus import find_gpu
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.fit import write_recipe
from disco_ds.plan.memory import GIB, PARTS, Memory
from disco_ds.plan.overview import Estimate, Plan, plan_run


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: the recipe fits. 1: it does not.

    Raises:
        ValueError: If the recipe cannot be planned.
    """
    config = load_config(args.config, args.overrides)
    # --hostfile takes precedence over --ranks, and --ranks over the recipe.
    ranks = count_ranks(config.ranks if args.ranks is None else args.ranks, args.hostfile)
    assumed = Assumptions(
        slack=args.slack,
        context_gib=args.context,
        image_bytes=int(1000 * args.image_kb),
        num_samples=args.data_samples,
        per_host=args.per_host,
        efficiency=args.efficiency,
        between_hosts=args.bandwidth,
    )
    gpu = find_gpu(args.gpu_memory, args.flops, args.link)
    made = plan_run(config, ranks, gpu, assumed, largest=bool(args.fit), host_gib=args.host_memory)
    config = made.config
    summary = "\n".join(
        [f"{config.name}: {config.describe(ranks)}", "", table(made.now.memory), verdict(made)]
    )
    print(summary)
    print()
    print(describe_host(made))
    print()
    print("\n".join(describe_scaling(made)))
    if args.fit:
        print(f"\n{write_recipe(config, args.fit, summary)}")
    return 0 if made.fits else 1


def table(memory: Memory) -> str:
    """Format the memory of a GPU as a table: a row per part, a column per moment of a step."""
    lines = [f"{'GiB of a GPU':16}" + "".join(f"{name:>10}" for name in memory.moments)]
    rows = [(part, [moment[part] for moment in memory.moments.values()]) for part in PARTS]
    rows.append(("all", [sum(moment.values()) for moment in memory.moments.values()]))
    for part, sizes in rows:
        lines.append(f"{part:16}" + "".join(f"{size / GIB:10.2f}" for size in sizes))
    return "\n".join(lines)


def verdict(made: Plan) -> str:
    """State whether the recipe fits in GPU memory and, if not, which part needs the most."""
    memory = made.now.memory
    text = f"{memory.total / GIB:.2f} of {made.gpu.gib:g} GiB, at its peak in {memory.peak}"
    if made.fits:
        return f"fits: {text}"
    worst = max(memory.parts, key=lambda part: memory.parts[part])
    return f"DOES NOT FIT: {text}; most of it: {worst}, {memory.parts[worst] / GIB:.2f}"


def describe_host(made: Plan) -> str:
    """Describe the memory that a host needs."""
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in made.now.memory.host.items())
    return (
        f"host: {made.host_bytes / GIB:,.1f} GiB for {made.ranks_per_host} ranks, in addition to "
        f"Python and its libraries; of one rank: {parts}"
    )


def describe_scaling(made: Plan) -> list[str]:
    """Format one table line per number of GPUs, and the assumptions behind the times."""
    lines = [
        "  GPUs  micro-batches     GiB   s/step  samples/s  towers s   loss s   comm s   comm GB"
    ]
    lines += [_describe_estimate(estimate, made.config.global_batch) for estimate in made.scaling]
    timeout_s, assumed = made.config.timeout_s, made.assumed
    if made.now.speed is None:
        basis = "no times: pass --flops and --link, or the name of a GPU"
    else:
        # A step may take longer than planned, so warn if the planned time exceeds half of the timeout.
        if made.now.speed.step_s > timeout_s / 2:
            lines.append(
                f"timeout_s is {timeout_s:g}: a rank whose step takes longer counts as hung; "
                "raise it"
            )
        basis = (
            f"{assumed.efficiency:g} of the GPU's FLOP/s, {assumed.between_hosts:g} GB/s between "
            f"hosts of {assumed.per_host} GPUs"
        )
    lines.append(f"Assumed: {basis}; no waiting for data, no stragglers, no latencies.")
    return lines


def _describe_estimate(estimate: Estimate, global_batch: int) -> str:
    line = f"{estimate.ranks:6}{estimate.num_micro_batches:15}{estimate.memory.total / GIB:8.1f}"
    if speed := estimate.speed:
        line += f"{speed.step_s:9.2f}{global_batch / speed.step_s:11,.0f}{speed.towers_s:10.2f}"
        line += f"{speed.loss_s:9.2f}{speed.comm_s:9.2f}{speed.comm_bytes / 1e9:10.1f}"
    return line
