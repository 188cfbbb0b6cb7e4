"""Measure the memory that the towers use on this machine, and compare it with the memory that `disco-ds plan` traces.

python -m tools.check.memory vit_b_32_32k [micro_batch=16 ...]
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.profiler import profile

from disco_ds.config import Config, load_config
from disco_ds.distributed import comm
from disco_ds.plan.memory import GIB
from disco_ds.plan.towers import Towers, make_batch, prepare_model, run_passes, trace

PASSES = ("replay", "forward", "held", "backward")


def measure_towers(config: Config, m: int, device: torch.device) -> Towers:
    """Run the forward and backward passes of the towers with m samples, and measure their memory.

    Returns:
        The memory of the passes as measured. All other fields, such as FLOPs, are those that `disco-ds plan` traces.

    Raises:
        torch.OutOfMemoryError: If the passes do not fit into the memory.
    """
    model = prepare_model(config).to(device)
    batch = make_batch(model, m, device)
    found: dict[str, int] = {}
    base = torch.cuda.memory_allocated() if device.type == "cuda" else 0

    @contextmanager
    def on_gpu(name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        found[name] = torch.cuda.max_memory_allocated() - base

    @contextmanager
    def on_cpu(name: str) -> Iterator[None]:
        nonlocal base
        # Disable oneDNN. The profiler would count its scratch memory (110 MiB for a 16-bit convolution), but the trace
        # does not contain it.
        with torch.backends.mkldnn.flags(enabled=False), profile(profile_memory=True) as profiler:
            yield
        # The profiler records each allocation and release; their running sum is the memory in use.
        events = [
            event
            for event in profiler.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        found[name] = base
        for event in sorted(events, key=lambda event: event.start_ns()):
            base += event.nbytes()
            found[name] = max(found[name], base)

    watch = on_gpu if device.type == "cuda" else on_cpu
    run_passes(config, model, batch, watch)
    return replace(trace(config, m, device.type != "cpu"), **found)


def compare(config: Config) -> str:
    """Return a table that compares the memory that `disco-ds plan` traces with the measured memory."""
    device = comm.local_device()
    m = config.micro_batch
    traced, found = trace(config, m, device.type != "cpu"), measure_towers(config, m, device)
    lines = [
        f"{config.model.label} on {device}, {m} samples; GiB:",
        f"{'':10}{'traced':>9}{'measured':>10}",
    ]
    for name in PASSES:
        a, b = getattr(traced, name), getattr(found, name)
        lines.append(f"{name:10}{a / GIB:9.3f}{b / GIB:10.3f}  {a / b - 1:+.1%}")
    return "\n".join(lines)


def main() -> None:
    recipe, *overrides = sys.argv[1:]
    print(compare(load_config(recipe, overrides)))


if __name__ == "__main__":
    main()
