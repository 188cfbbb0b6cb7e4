"""`disco-ds plan`: predict memory and times, and find faster settings or the largest global batch that fits."""

from disco_ds.cli.options import Plan as PlanOptions
from disco_ds.config import load_config
from disco_ds.models.gpus import find_gpu
from disco_ds.names import plural
from disco_ds.plan.memory import GIB, PARTS, Memory
from disco_ds.plan.overview import Plan, list_changes, plan_run, write_recipe


def run(options: PlanOptions) -> int:
    """Run the command.

    Returns:
        Exit code 0: the recipe fits. 1: it does not.

    Raises:
        ValueError: If the recipe cannot be planned or, with --fit, nothing fits.
    """
    config = load_config(options.config, options.overrides)
    ranks = options.ranks or config.ranks or 1
    gpu = find_gpu(options.gpu_memory, options.flops, options.link)
    if options.fit and config.stages:
        raise ValueError("--fit finds settings for the whole run: set samples instead of stages")
    search = options.batch if options.fit else None
    plans = [
        plan_run(stage, ranks, gpu, options, search, options.host_memory)
        for stage in config.stage_configs
    ]
    if config.stages:
        print(f"{config.name}: {config.describe(ranks)}\n")
    for made in plans:
        planned = made.config
        title = f"{config.name}: {planned.describe(ranks)}"
        if config.stages:
            title = f"until {planned.samples:,} samples:"
        summary = "\n".join([title, "", table(made.memory), verdict(made)])
        if not options.fit:
            summary += f"\n{describe_fastest(made, options.host_memory)}"
        print(f"{summary}\n\n{describe_host(made)}\n\n{describe_time(made)}\n")
        if options.fit:
            print(write_recipe(planned, options.fit, summary))
    if (length := describe_length(plans)) is not None:
        print(length)
    return 0 if all(made.fits for made in plans) else 1


def table(memory: Memory) -> str:
    """Format the memory of a GPU as a table with a row for each part and a column for each moment of a step."""
    lines = [f"{'GiB of a GPU':16}" + "".join(f"{name:>10}" for name in memory.moments)]
    columns = [{**moment, "all": sum(moment.values())} for moment in memory.moments.values()]
    for part in (*PARTS, "all"):
        sizes = [column[part] for column in columns]
        if part != "teacher" or any(sizes):
            lines.append(f"{part:16}" + "".join(f"{size / GIB:10.2f}" for size in sizes))
    return "\n".join(lines)


def verdict(made: Plan) -> str:
    """State whether the recipe fits in GPU memory and, if not, which part needs the most."""
    memory = made.memory
    text = f"{memory.total / GIB:.2f} of {made.gpu.gib:g} GiB, at its peak in {memory.peak}"
    if made.fits:
        return f"fits: {text}"
    worst = max(memory.parts, key=lambda part: memory.parts[part])
    return f"DOES NOT FIT: {text}; largest part: {worst}, {memory.parts[worst] / GIB:.2f}"


def describe_fastest(made: Plan, host_gib: float | None) -> str:
    """Describe the fastest settings for the global batch of a plan."""
    try:
        best = plan_run(made.config, made.ranks, made.gpu, made.assumed, "same", host_gib)
    except ValueError as error:
        return f"no settings for this batch fit: {error}"
    changes = " ".join(list_changes(made.config, best.config))
    if not changes:
        return "no other micro-batch, activation checkpointing or ZeRO stage is faster"
    seconds = f"{best.speed.step_s:,.2f} s a step, " if best.speed else ""
    label = "faster:" if made.fits else "fits with"
    return f"{label} {changes}: {seconds}{best.memory.total / GIB:.2f} of {made.gpu.gib:g} GiB"


def describe_length(plans: list[Plan]) -> str | None:
    """Describe the number of steps and the duration of the whole run; None if they are unknown."""
    num_steps = samples = 0
    duration_s = 0.0
    for made in plans:
        if made.speed is None or made.config.epochs is not None:
            return None
        steps, samples = made.config.find_end(0, samples)
        num_steps += steps
        duration_s += steps * made.speed.step_s
    hours = duration_s / 3600
    return f"{num_steps:,} steps, {hours:,.1f} hours on {plural(plans[0].ranks, 'GPU')}"


def describe_host(made: Plan) -> str:
    """Describe the memory that a host needs."""
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in made.memory.host.items())
    return (
        f"host: {made.host_bytes / GIB:,.1f} GiB for all ranks of a host ({made.ranks_per_host}), in addition "
        f"to Python and the libraries; GiB per rank: {parts}"
    )


def describe_time(made: Plan) -> str:
    """Describe the time of a step and what it is based on."""
    speed, assumed = made.speed, made.assumed
    if speed is None:
        return "step time unknown: pass --flops and --link, or name the GPU in --gpu-memory"
    images_per_s = made.config.global_batch / speed.step_s
    text = (
        f"step: {speed.step_s:,.2f} s, {images_per_s:,.0f} samples/s; "
        f"towers {speed.towers_s:,.2f} s, loss {speed.loss_s:,.2f} s, communication "
        f"{speed.comm_s:,.3f} s for {speed.comm_bytes / 1e9:,.1f} GB per GPU, of which {speed.hidden_s:,.3f} s "
        "overlap with the towers\n"
        f"Assumed: {speed.rate:.3g} of the GPU's FLOP/s ({speed.source}), {assumed.bandwidth:g} GB/s between "
        f"hosts of {assumed.per_host} GPUs; no waiting for data, no stragglers, no latencies."
    )
    per_host = images_per_s * made.ranks_per_host / made.ranks
    text += f"\nthe data workers must deliver {per_host:,.0f} images/s on each host"
    if assumed.text_tokens is None:
        text += "\ntexts: as long as the model allows; --text-tokens N plans for shorter ones"
    else:
        text += f"\ntexts: {assumed.text_tokens:.1f} tokens on average, padding is not computed"
    return text
