"""Explain an out-of-memory error: its phase, the memory in use, and the settings that save memory in that phase."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepspeed.accelerator import get_accelerator

from disco_ds.config import Config
from disco_ds.distributed import comm
from disco_ds.distributed.comm import is_out_of_memory

GIB = 2**30
STORE_TIMEOUT_S = 10.0


class OutOfMemory(RuntimeError):  # noqa: N818
    """The accelerator of this rank ran out of memory.

    Args:
        text: The error message, in one line.
        explanation: Lines that list the memory in use and the settings that save memory. Empty if
            another rank on this host has already reported them.
    """

    def __init__(self, text: str, explanation: list[str]):
        super().__init__(text)
        self.explanation = explanation


@contextmanager
def explained(
    config: Config,
    phase: Callable[[], str],
    report: Callable[[str], object],
    describe_texts: Callable[[], str | None] = lambda: None,
) -> Iterator[None]:
    """Turn an out-of-memory error raised in the `with` block into OutOfMemory, which names settings that save memory.

    Args:
        config: Settings of the run.
        phase: Returns the name of the phase that the run is in, such as "forward".
        report: Called with the explanation. On each host, only the first rank that runs out of memory calls it.
        describe_texts: Returns a line if the texts of the current micro-batch are unusually long.

    Raises:
        OutOfMemory: On the ranks that ran out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        place = phase()
        first_line = str(error).partition("\n")[0]
        text = f"out of memory in {place}: {first_line}"
        explanation = _explain(config, place, describe_texts()) if _is_first_of_host() else []
        if explanation:
            report("\n  ".join([f"rank {comm.rank()} is {text}", *explanation]))
        raise OutOfMemory(text, explanation) from error


def _is_first_of_host() -> bool:
    """Return True if this rank is the first on its host to call this. Not collective."""
    if comm.size() == 1:
        return True
    store = comm.open_store(STORE_TIMEOUT_S)
    # The store belongs to torchrun's agent and outlives the ranks, so use a new key after each restart.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store.add(f"disco_ds/out_of_memory/{attempt}/{socket.gethostname()}", 1) == 1


def _explain(config: Config, phase: str, texts: str | None) -> list[str]:
    # This works on the CPU too: DeepSpeed's CPU accelerator gets these numbers from psutil.
    device = get_accelerator()
    allocated = device.memory_allocated() / GIB
    peak = device.max_memory_allocated() / GIB
    reserved = device.memory_reserved() / GIB
    capacity = device.total_memory() / GIB
    return [
        f"{allocated:.2f} GiB allocated (peak {peak:.2f}) and {reserved:.2f} GiB reserved by torch; "
        f"total memory: {capacity:.2f} GiB on {device.current_device_name()}",
        *([texts] if texts else []),
        f"to save memory in {phase}, try in this order:",
        *(f"  {change}" for change in _remedies(config, phase)),
        f"disco-ds plan --config NAME --ranks {comm.size()} shows where the memory goes; "
        "--fit FOLDER writes a recipe that fits",
    ]


def _remedies(config: Config, phase: str) -> Iterator[str]:
    """Yield changes to the recipe that save memory in this phase, cheapest first."""
    if phase == "building":
        yield "check with nvidia-smi whether another process uses this GPU"
    if phase == "loss":
        if config.loss.name in ("clip", "disco", "disco_fused"):
            yield "loss.name=inf_cl, which computes the same loss with the least memory"
        yield "a smaller loss.options.tile, if the loss has this option"
    elif phase != "building" and config.micro_batch > 1:
        yield f"micro_batch={config.micro_batch // 2} (now {config.micro_batch})"
    if config.image_staging == "device":
        yield "image_staging=compressed, or image_staging=host"
    if phase in ("forward", "backward and update") and not config.model.activation_checkpointing:
        yield "model.activation_checkpointing=true"
    level = config.zero_stage
    if level < 3:
        yield f"deepspeed=zero{level + 1} (now ZeRO {level}), or more ranks"
    else:
        yield "deepspeed=zero3_offload, or more ranks"
