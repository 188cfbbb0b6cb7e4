"""Explain an out-of-memory error: the phase it happened in, how much memory was held, and which settings help."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepspeed.accelerator import get_accelerator

from disco_ds.config import Config
from disco_ds.config.ds_config import stage
from disco_ds.distributed import comm
from disco_ds.distributed.device_memory import is_out_of_memory
from disco_ds.losses import build_loss

GIB = 2**30
STORE_TIMEOUT_S = 10.0


class OutOfMemory(RuntimeError):  # noqa: N818
    """The accelerator of this rank ran out of memory.

    Args:
        text: One line.
        explanation: What was held and what helps; empty if another rank of this host has reported it.
    """

    def __init__(self, text: str, explanation: list[str]):
        super().__init__(text)
        self.explanation = explanation


@contextmanager
def explained(
    config: Config, phase: Callable[[], str], report: Callable[[str], object]
) -> Iterator[None]:
    """Turn an out-of-memory error of the body into one that says what helps.

    Args:
        config: Settings of the run.
        phase: Returns what the run is doing.
        report: Called with the explanation on the first rank of each host that runs out of memory.

    Raises:
        OutOfMemory: On the ranks that ran out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        place = phase()
        text = f"out of memory in {place}: {_first_line(error)}"
        explanation = list(_explain(config, place)) if _is_first_of_host() else []
        if explanation:
            report("\n  ".join([f"rank {comm.rank()} is {text}", *explanation]))
        raise OutOfMemory(text, explanation) from error


def _is_first_of_host() -> bool:
    """Return True on the first rank of this host that calls. Not collective: only ranks without memory get here."""
    if comm.size() == 1:
        return True
    return (
        comm.open_store(STORE_TIMEOUT_S).add(f"disco_ds/out_of_memory/{socket.gethostname()}", 1)
        == 1
    )


def _explain(config: Config, phase: str) -> Iterator[str]:
    # DeepSpeed's CPU accelerator has these numbers too, from psutil.
    device = get_accelerator()
    held = device.memory_allocated()
    peak = device.max_memory_allocated()
    reserved = device.memory_reserved()
    capacity = device.total_memory()
    yield (
        f"{held / GIB:.2f} GiB allocated (peak {peak / GIB:.2f}), {reserved / GIB:.2f} GiB reserved by torch, of "
        f"{capacity / GIB:.2f} GiB on {device.current_device_name()}"
    )
    if reserved - held > 0.1 * capacity:
        yield (
            f"{(reserved - held) / GIB:.2f} GiB are reserved but unused, so the memory is fragmented: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment of all ranks"
        )
    yield f"what helps in {phase}, in this order:"
    for change in _remedies(config, phase):
        yield f"  {change}"
    yield (
        f"disco-ds plan --config NAME --ranks {comm.size()} shows where the memory goes; --fit FOLDER writes a recipe "
        "that fits"
    )


def _remedies(config: Config, phase: str) -> Iterator[str]:
    """Yield changes that save memory in this phase and that the recipe can still make, cheapest first."""
    level = stage(config.deepspeed)
    two_passes = config.num_micro_batches(comm.size()) > 1
    half_micro_batch = f"micro_batch={config.micro_batch // 2} (now {config.micro_batch})"
    smaller = [half_micro_batch] if config.micro_batch > 1 else []
    pixels_wait = config.pixels == "device" and (two_passes or phase != "building")
    pixels = ["pixels=compressed, or pixels=host"] if pixels_wait else []
    recompute = (
        [] if config.model.activation_checkpointing else ["model.activation_checkpointing=true"]
    )
    if level < 3:
        states = [f"deepspeed=zero{level + 1} (now ZeRO {level}), or more ranks"]
    else:
        states = ["deepspeed=zero3_offload, or more ranks"]
    bucket = ["deepspeed.zero_optimization.reduce_bucket_size=20000000"] if level in (1, 2) else []

    if phase == "forward":
        yield from smaller + pixels + recompute + states
    elif phase == "loss":
        yield from _remedies_of_loss(config)
        yield from [*pixels, *states, "a smaller global_batch"]
    elif phase == "backward and update":
        yield from smaller + recompute + states + bucket + pixels
    elif phase == "evaluating":
        yield from smaller + states
    else:
        yield "nvidia-smi: does another process use this GPU?"
        yield from states + pixels + smaller


def _remedies_of_loss(config: Config) -> Iterator[str]:
    name = config.loss.name
    if name in ("clip", "disco"):
        yield "loss.name=disco_fused: it holds no matrix of similarities"
    if hasattr(build_loss(name, **config.loss.options), "tiling"):
        yield "loss.options.tile=[1024, 1024], or a smaller one than now"
    if name in ("clip", "disco", "disco_fused"):
        yield "loss.name=inf_cl: it holds no gathered features"


def _first_line(error: RuntimeError) -> str:
    """Return the first line of torch's message, without its advice."""
    lines = str(error).split(" If reserved but")[0].splitlines()
    return lines[0] if lines else type(error).__name__
