"""Faults inside a run: losses and gradients that are not finite, and skipped steps."""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from disco_ds.config import Config
from disco_ds.data import StepData
from disco_ds.distributed import comm
from disco_ds.losses import Embeddings
from disco_ds.training.build import Run, build
from disco_ds.training.loop import train

At = Callable[[Run, int], None]
"""A hook that is called before the loss of each batch, with the run and the batch's number, from 1."""


def start(config: Config, at: At, stack: ExitStack, resume: str | None = None) -> Run:
    """Build a run whose loss calls `at`, which may cause faults."""
    run = build(config, resume, stack)
    count = itertools.count(1)
    run.loss.register_forward_pre_hook(lambda *_: at(run, next(count)))
    return run


def nothing(run: Run, number: int) -> None:
    pass


def poisoned(kinds: dict[int, str]) -> At:
    """Return a hook that spoils batches on rank 1: "loss" makes the loss NaN, "gradient" only its gradient infinite.

    Args:
        kinds: Number of a batch -> "loss" or "gradient".
    """

    def at(run: Run, number: int) -> None:
        if comm.rank() == 1 and number in kinds:
            hook = run.loss.register_forward_hook(SPOIL[kinds[number]])
            run.loss.register_forward_hook(lambda *_: hook.remove())

    return at


def failure(config: Config, at: At, kind: type[comm.AgreedError] = comm.AgreedError) -> str:
    """Train until the run fails with an error of this type. Return its message, which must be equal on all ranks."""
    with ExitStack() as stack, pytest.raises(kind) as caught:
        train(start(config, at, stack))
    said = comm.gather_objects(str(caught.value))
    assert len(set(said)) == 1, said
    return said[0]


def spoil_loss(module: Any, arguments: Any, out: Any) -> Any:
    return type(out)(out.loss * float("nan"), out.metrics)


def spoil_gradient(module: Any, arguments: tuple[Embeddings], out: Any) -> None:
    arguments[0].image.register_hook(lambda gradient: gradient * float("inf"))


SPOIL = {"loss": spoil_loss, "gradient": spoil_gradient}


def leave_out(run: Run, numbers: set[int]) -> Callable[..., StepData]:
    """Return a replacement for run.loader.start_step that passes over the batches with these numbers, from 1."""
    start, count = run.loader.start_step, iter(range(1, 100))

    def wanted(**arguments: Any) -> StepData:
        while next(count) in numbers:
            start()
        return start(**arguments)

    return wanted


NAN, INF = 3, 4
"""Numbers of the spoiled batches: one with a NaN loss, one with an infinite gradient."""
BOTH = {NAN: "loss", INF: "gradient"}
