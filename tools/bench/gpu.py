"""Compare our losses and training steps with other implementations on one GPU. Print Markdown for docs/results.md.

    python -m tools.bench.gpu --budget 540         works for up to 540 s; repeat the command until no slice is left
    python -m tools.bench.gpu --only "one: *"      measures only the losses at the shape "one" (see SHAPES)
    python -m tools.bench.gpu --only "step: *"     measures only training steps (see train_rates.py for other kinds)

The work is divided into slices (slices.py), each of which runs in a separate process. A slice is one loss at one shape,
or one measurement of training. Those in train_rates.FIRST run first, and losses last. Results are kept in a file. The
tables show all selected slices whose results are in the file, including those of earlier calls.

In the tables of losses, B is the global batch, b the batch of one rank, D the width and s the logit scale. The columns:
  ms          median time of forward and backward, measured with CUDA events; it does not include communication
  units       number of b x B x D matrix products that the implementation computes
  TFLOP/s     units x 2 b B D FLOP, divided by the time
  of matmul   this rate divided by the rate at which torch multiplies 8192 x 8192 fp16 matrices in the same process
  memory      peak memory in addition to the features and their gradients
  error       |gradient - true| / max(|true|, s / B) for the gradient of the features. `true` is the gradient in
              float64, and |.| is the largest norm of a row. The largest error for random, typical and aligned pairs
              is shown. It is measured only if one GPU computes the whole batch.
"""

import argparse
import math
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from disco_ds.distributed import comm
from tools.bench import loss as bench_loss
from tools.bench import peers, slices, train_rates
from tools.bench.peers import Method
from tools.bench.timing import matmul_tflops, median_ms

FOLDER = "runs/bench_gpu"
SCALES = (1 / 0.07, 100.0)
"""Logit scales. Times are measured at the first scale, and errors at both scales."""
NOISE = (1e6, 2.0, 0.05)
"""Noise of a text relative to its image, for random, typical and aligned pairs."""


@dataclass(frozen=True)
class Shape:
    """The work to measure: one rank's share of a loss. `batch` is the global batch of all `ranks` ranks."""

    title: str
    batch: int
    width: int
    ranks: int
    tiny: int
    """Global batch for --rehearse, a test run that also works on a CPU."""
    kind: str = "softmax"


SHAPES = {
    "one": Shape("B 32,768 on one GPU", 32768, 512, 1, 48),
    "share": Shape("the share of B 196,608 on one of 64 GPUs", 196608, 512, 64, 48 * 4),
    "sigmoid": Shape("the sigmoid loss, B 65,536 on one GPU", 65536, 768, 1, 48, kind="sigmoid"),
}


@dataclass(frozen=True)
class Entry:
    """A loss in the table. `units` is its number of b x B x D matrix products in forward and backward."""

    build: Callable[[float, int], Method]
    """Builds the loss from the scale and the global batch."""
    units: int
    true: str
    """Name of the loss in this package whose float64 gradient is the reference."""


def ours(name: str, units: int = 4, accuracy: bool = False, **options: Any) -> Entry:
    """Return the table entry of a loss of this package.

    Args:
        name: Name of the loss.
        units: Number of b x B x D matrix products in forward and backward.
        accuracy: Whether the loss also computes accuracies. The losses of other authors do not compute them.
        options: Options of the loss.
    """

    def build(_: float, batch: int) -> Method:
        return bench_loss.our_method(name, batch, accuracy, **options)

    return Entry(build, units, "disco_fused" if name == "inf_cl" else name)


OURS = {
    "softmax": {
        "disco_fused": ours("disco_fused"),
        "disco_fused, with accuracies": ours("disco_fused", accuracy=True),
        "disco_fused, impl torch": ours("disco_fused", impl="torch"),
        "inf_cl": ours("inf_cl"),
        "fastclip_v3": ours("fastclip_v3"),
        "siglip": ours("siglip", 3),
    },
    "sigmoid": {
        "siglip": ours("siglip", 3),
        "siglip, with accuracies": ours("siglip", 3, accuracy=True),
    },
}
PEERS = {"softmax": ("disco_fused", peers.SOFTMAX), "sigmoid": ("siglip", peers.SIGMOID)}


def build_peer(peer: peers.Peer, scale: float, _: int) -> Method:
    return peer.build(scale)


def entries(shape: Shape) -> dict[str, Entry]:
    """Return all losses that are measured at this shape, by label."""
    found = dict(OURS[shape.kind])
    true, others = PEERS.get(shape.kind, ("", {}))
    for label, peer in others.items():
        units = peer.units if shape.ranks == 1 else peer.units_of_share
        if units is not None:
            found[label] = Entry(partial(build_peer, peer), units, true)
    return found


def list_slices() -> list[slices.Slice]:
    """Return all slices. The most important ones come first, because the budget may not suffice for all."""
    losses = [
        slices.Slice(f"{key}: {label}", 40)
        for key, shape in SHAPES.items()
        for label in entries(shape)
    ]
    losses.sort(key=lambda x: not _is_ours(x.name))
    first = list(train_rates.FIRST)
    training = [*train_rates.our_slices(), *train_rates.other_slices()]
    training.sort(key=lambda x: first.index(x.name) if x.name in first else len(first))
    return [*training, *losses]


def _is_ours(name: str) -> bool:
    key, label = name.split(": ")
    return label in OURS[SHAPES[key].kind] if key in SHAPES else train_rates.is_ours(name)


def measure(name: str, rehearse: bool, record: slices.Record) -> None:
    """Run the slice with this name, and record its measurements.

    If the slice fails, record the error as `problem` instead. If a package is not installed, record the message of the
    ImportError as `missing`.
    """
    key, label = name.split(": ")
    if key in train_rates.KINDS:
        with comm.session(timeout_s=600):
            train_rates.measure(name, rehearse, record)
        return
    shape = SHAPES[key]
    entry, batch = entries(shape)[label], shape.tiny if rehearse else shape.batch
    ranks = min(shape.ranks, 4) if rehearse else shape.ranks
    # open_clip calls deprecated collectives of torch.
    warnings.simplefilter("ignore", FutureWarning)
    if comm.size() != ranks:
        bench_loss.pretend(ranks)
    with slices.case(record):
        try:
            methods = [entry.build(scale, batch) for scale in SCALES]
        except ImportError as error:
            record(missing=str(error))
            return
        figures: dict[str, Any] = {"units": entry.units}
        if ranks == 1:
            for scale, method in zip(SCALES, methods, strict=True):
                figures[f"error {scale:.0f}"] = find_error(
                    method, entry.true, batch, shape.width, scale
                )
        leaves = bench_loss.make_leaves(batch // ranks, shape.width, SCALES[0], 0)

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            methods[0](*leaves).sum().backward()

        step()  # the first step compiles and autotunes
        for leaf in leaves:
            leaf.grad = None
        with bench_loss.Peak() as peak:
            step()
        ms, rate = median_ms(step, *((2, 0) if rehearse else (20, 3))), matmul_tflops()
        flop = entry.units * 2.0 * (batch // ranks) * batch * shape.width
        figures |= {
            "ms": ms,
            "memory_bytes": peak.bytes - sum(leaf.nbytes for leaf in leaves[:2]),
            "tflops": flop / ms / 1e9,
            "matmul_tflops": rate,
        }
        record(**figures)


def find_error(method: Method, true_name: str, batch: int, width: int, scale: float) -> float:
    """Return the largest gradient error of images and texts over all kinds of pairs (NOISE).

    The whole batch is computed in this process.
    """
    worst = 0.0
    for noise in NOISE:
        leaves = bench_loss.make_leaves(batch, width, scale, 1, noise=noise)
        method(*leaves).sum().backward()
        double = [leaf.detach().double().requires_grad_() for leaf in leaves]
        bench_loss.our_method(true_name, batch, False)(*double).backward()
        errors = [
            bench_loss.row_error(x.grad, y.grad, scale / batch)
            for x, y in zip(leaves[:2], double[:2], strict=True)
        ]
        worst = max(worst, *(math.inf if math.isnan(x) else x for x in errors))
    return worst


def show(name: str, outcome: slices.Outcome) -> str:
    """Describe in one line the result of a slice that has ended."""
    record = outcome.records[0] if outcome.records else {}
    return f"{name}: {train_rates.in_short(record) or problem(outcome)} ({outcome.seconds:.0f} s)"


def problem(outcome: slices.Outcome) -> str:
    """Describe why a slice has no results."""
    record = outcome.records[0] if outcome.records else {}
    return str(record.get("missing") or record.get("problem") or outcome.end)


def failed(name: str, outcome: slices.Outcome) -> bool:
    """Return whether a slice has failed.

    A slice has failed if it crashed or was stopped. A slice that measures this package has also failed if it ended
    without results. A slice that measures another implementation may end without results, for example because a package
    is not installed.
    """
    ours_has_none = _is_ours(name) and not any(train_rates.in_short(x) for x in outcome.records)
    return outcome.end is not None and (outcome.end != "done" or ours_has_none)


def tables(outcomes: dict[str, slices.Outcome], command: str) -> Iterator[str]:
    """Yield lines of Markdown: the machine, a table for each shape and each kind of measurement of training.

    Below each table, a line lists the slices that have no results.
    """
    for where in {str(x.where): x.where for x in outcomes.values() if x.where}.values():
        versions = ", ".join(
            f"{package} {version}" for package, version in where["versions"].items()
        )
        yield f"`{command}`: {where['device']}, {where['date']}; {versions}."
    rates = [
        x["matmul_tflops"]
        for outcome in outcomes.values()
        for x in outcome.records
        if "matmul_tflops" in x
    ]
    if rates:
        yield f"torch's own matmul: {min(rates):.0f} to {max(rates):.0f} TFLOP/s over the slices."
    for key, shape in SHAPES.items():
        mine = {
            name.split(": ")[1]: x for name, x in outcomes.items() if name.startswith(f"{key}: ")
        }
        measured = {
            label: x.records[0] for label, x in mine.items() if x.records and "ms" in x.records[0]
        }
        if not mine:
            continue
        share = (
            " (error not measured: the other ranks' features are copies of this rank's)"
            if shape.ranks > 1
            else ""
        )
        yield f"\n### {shape.title}, D {shape.width}{share}\n"
        if measured:
            yield "| loss | ms | units | TFLOP/s | of matmul | memory MiB | error, s 14 | error, s 100 |"
            yield "|---|---|---|---|---|---|---|---|"
        for label, x in measured.items():
            name = f"`{label}`" if label in OURS[shape.kind] else label
            errors = " | ".join(
                f"{x[key]:.1e}" if key in x else "" for key in ("error 14", "error 100")
            )
            yield (
                f"| {name} | {x['ms']:.2f} | {x['units']} | {x['tflops']:.0f} | "
                f"{100 * x['tflops'] / x['matmul_tflops']:.0f}% | {x['memory_bytes'] / 2**20:.0f} | {errors} |"
            )
        left_out = [f"{label}: {problem(x)}" for label, x in mine.items() if label not in measured]
        if left_out:
            yield "\nLeft out: " + "; ".join(left_out) + "."
    yield from train_rates.tables(outcomes, problem)


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args = slices.parse(parser, argv, FOLDER)
    if not (torch.cuda.is_available() or args.rehearse):
        print(
            "no GPU here: --rehearse runs every slice at a tiny shape on the CPU", file=sys.stderr
        )
        return 1
    if args.slice:
        return slices.run_here(args, lambda record: measure(args.slice, args.rehearse, record))
    outcomes, left = slices.run(list_slices(), args, 1, show)
    command = shlex.join(["python", "-m", "tools.bench.gpu", *argv])
    print("\nA test run at tiny shapes: the numbers mean nothing." if args.rehearse else "")
    print("\n".join(tables(outcomes, command)))
    if left:
        print(f"\n{left} slices are left: repeat the command")
    return int(any(failed(name, x) for name, x in outcomes.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
