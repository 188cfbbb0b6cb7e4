"""Measure time, memory, received bytes and gradient error of our losses, open_clip's loss and losses in peers.py.

    python -m tools.bench.loss --ranks 2 --batch 8192        runs on two CPU ranks, or on two GPUs

The table has a row for each loss, with these columns:
  ms         median time of forward and backward. The losses take turns, so that all are measured under the same load.
  memory     peak memory in addition to the features and their gradients
  received   bytes that a rank receives
  error      |gradient - true| / |true| for the gradient of the features, where |.| is the largest norm of a row. It is
             measured at a batch of 1,024. `true` is the gradient in float64: for implementations of InfoNCE, the
             gradient of `clip`, and for every other loss, its own gradient.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, Teacher, build_loss, list_losses
from tools.bench import peers
from tools.bench.peers import Method
from tools.bench.ranks import run_ranks

ERROR_BATCH = 1024
GROUPED = ("ignored", "positives")
"""Values of the losses' option same_group that are measured in addition to its default.

In every measurement, 1% of the pairs share a group with another pair.
"""
TAUGHT = {"teacher_weight": 0.5}
"""Options of the variants called "taught", which have a teacher. The teacher's features are those of the student."""
SAME_AS_CLIP = ("disco", "disco_fused", "inf_cl")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes, one device each (default: 1)"
    )
    parser.add_argument("--batch", type=int, default=8192, help="global batch B")
    parser.add_argument("--width", type=int, default=512, help="width D of the features")
    parser.add_argument("--scale", type=float, default=1 / 0.07)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--methods", nargs="*", help="names in the table (default: all that run here)"
    )
    parser.add_argument(
        "--precisions",
        nargs="*",
        help="precisions in addition to auto (default: all on a GPU, none on a CPU)",
    )
    return parser.parse_args()


def our_methods(precisions: list[str], num_samples: int) -> dict[str, Method]:
    """Return all registered losses and some variants, by label. A variant has other options, which change the cost."""
    options: dict[str, dict[str, Any]] = {}
    for name in list_losses():
        options[name] = {}
        if name in ("disco_fused", "inf_cl", "siglip", "fastclip_v3"):
            options |= {f"{name} {p}": {"precision": p} for p in precisions}
    options["disco_fused unlogged"] = {"accuracy": False}
    options["disco_fused taught"] = TAUGHT
    options["disco_fused taught unlogged"] = TAUGHT | {"accuracy": False}
    for same_group in GROUPED:
        options[f"disco_fused {same_group}"] = {"same_group": same_group}

    return {
        label: our_method(label.split()[0], num_samples, **chosen)
        for label, chosen in options.items()
    }


def our_method(name: str, num_samples: int, accuracy: bool = True, **options: Any) -> Method:
    """Build a loss of this package. `accuracy`: whether it also computes accuracies, as in logged steps."""
    taught = "teacher_weight" in options
    loss = build_loss(name, **options)
    loss.set_num_samples(num_samples, num_samples)
    loss.accuracy = accuracy

    def run(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        index = torch.arange(len(image), device=image.device) + comm.rank() * len(image)
        group_id = torch.where(index % 200 == 1, index - 1, index)
        teacher = [Teacher(*(x.detach() for x in (image, text, scale)))] if taught else []
        return loss(Embeddings(image, text, scale, bias, index, group_id, teacher=teacher)).loss

    return run


def other_methods(args: argparse.Namespace) -> dict[str, Method]:
    """Return losses of other authors: open_clip's in both modes and, on a GPU, the installed ones in peers.SOFTMAX.

    In open_clip's mode "local", a rank computes only its rows of the logits. In the mode "full", it computes all rows.
    """
    found = {
        f"open_clip {way}": peers.open_clip(way == "local", autocast=False)(0)
        for way in ("full", "local")
    }
    for label, peer in peers.SOFTMAX.items() if torch.cuda.is_available() else ():
        try:
            found[label] = peer.build(args.scale)
        except ImportError as error:
            print(f"{label} is skipped: {error}", file=sys.stderr)
    return found


def pretend(N: int) -> None:
    """Simulate N ranks in this process. Nothing is sent: the features of the other ranks are copies of this rank's."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=N)
    comm.init(timeout_s=60)

    # The gathers of torch's fake group copy this rank's block, but its point-to-point receives write nothing. So
    # replace the exchange with a function that copies each outgoing tensor into the corresponding incoming tensor.
    def stay(operations: list[Any]) -> list[Any]:
        sent, received = (
            [x.tensor for x in operations if x.op is op] for op in (dist.isend, dist.irecv)
        )
        for x, into in zip(sent, received, strict=True):
            into.copy_(x)
        return []

    dist.batch_isend_irecv = stay  # type: ignore[assignment]


class Received(TorchDispatchMode):
    """Counts the bytes that this rank receives, assuming that every collective uses a ring algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")
        if name[0] == "c10d":
            self.bytes += self._received(name[1], args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _received(name: str, args: Any) -> float:
        others = 1 - 1 / comm.size()
        size = _nbytes(args[0])
        if "allreduce" in name:
            return 2 * others * size
        if "reduce_scatter" in name:  # args: output, input
            return others * _nbytes(args[1])
        if "gather" in name or "alltoall" in name:
            return others * size
        return size if name.startswith("recv") else 0.0


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


class Peak:
    """Measures the peak memory of a `with` block minus the memory at its start, in bytes.

    On a CPU, the memory is the resident set of this process.
    """

    def __enter__(self) -> Peak:
        self.bytes, self.done = 0, threading.Event()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
            return self
        self.start = _resident()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.is_set():
            self.bytes = max(self.bytes, _resident() - self.start)
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            self.bytes = torch.cuda.max_memory_allocated() - self.start
            return
        self.done.set()
        self.thread.join()


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def make_leaves(b: int, D: int, scale: float, seed: int, noise: float = 2.0) -> list[Tensor]:
    """Return image and text [b, D], which are unit rows, and scale and bias [1]. All are fp32 and require gradients.

    An image is a random vector. A text is the same vector plus `noise` times another random vector. Both are then
    normalized.
    """
    device = comm.local_device()
    generator = torch.Generator(device).manual_seed(seed)
    image, other = (
        torch.randn(b, D, generator=generator, dtype=torch.float64, device=device) for _ in "ab"
    )
    rows = [F.normalize(x, dim=1) for x in (image, image + noise * other)]
    vectors = [*rows, torch.tensor([scale]), torch.tensor([-10.0])]
    return [x.to(device, torch.float32).requires_grad_() for x in vectors]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_once(method: Method, leaves: list[Tensor]) -> float:
    """Run forward and backward once, and return the seconds that they took."""
    for leaf in leaves:
        leaf.grad = None
    synchronize()
    comm.barrier()
    start = time.perf_counter()
    method(*leaves).sum().backward()
    synchronize()
    return time.perf_counter() - start


def row_error(got: Tensor | None, true: Tensor | None, floor: float = 0.0) -> float:
    """Return the largest norm of a row of got - true, divided by the largest norm of a row of true.

    The divisor is at least `floor`.
    """
    assert got is not None
    assert true is not None
    size = true.norm(dim=1).max().clamp(min=floor)
    return ((got.double() - true).norm(dim=1).max() / size).item()


def find_errors(methods: dict[str, Method], args: argparse.Namespace) -> dict[str, float]:
    """Return the gradient error of each method at a global batch of ERROR_BATCH. Collective."""
    b = max(ERROR_BATCH // comm.size(), 1)
    leaves = make_leaves(b, args.width, args.scale, comm.rank())
    errors = {}
    for label, method in methods.items():
        double = [x.detach().double().requires_grad_() for x in leaves]
        name, *words = label.split()
        same_group = next((word for word in words if word in GROUPED), "negatives")
        true_name = name if name in list_losses() and name not in SAME_AS_CLIP else "clip"
        true_options: dict[str, Any] = TAUGHT if "taught" in words else {}
        if same_group != "negatives":
            true_name, true_options = name, {"same_group": same_group}
        our_method(true_name, len(leaves[0]) * comm.size(), **true_options)(*double).backward()
        for leaf in leaves:
            leaf.grad = None
        method(*leaves).sum().backward()
        worst = max(row_error(x.grad, y.grad) for x, y in zip(leaves[:2], double[:2], strict=True))
        errors[label] = comm.all_reduce_max(
            torch.tensor([worst], device=comm.local_device())
        ).item()
    return errors


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure all methods. Return the results of each method: the maximum over ranks of each number. Collective."""
    # open_clip calls deprecated collectives of torch.
    warnings.simplefilter("ignore", FutureWarning)
    on_gpu = torch.cuda.is_available()
    precisions = args.precisions or (["fp32", "tf32", "bf16"] if on_gpu else [])
    methods = our_methods(precisions, max(args.batch, ERROR_BATCH))
    methods = {
        label: method
        for label, method in (methods | other_methods(args)).items()
        if not args.methods or label in args.methods
    }
    errors = find_errors(methods, args)
    leaves = make_leaves(args.batch // comm.size(), args.width, args.scale, comm.rank())
    rows: dict[str, dict[str, float]] = {}
    for label, method in list(methods.items()):
        try:
            with Received() as received:
                run_once(method, leaves)
            for leaf in leaves:
                leaf.grad = None
            with Peak() as peak:
                run_once(method, leaves)
        except torch.OutOfMemoryError:
            methods.pop(label)
            rows[label] = {
                "memory_bytes": float("inf"),
                "ms": float("nan"),
                "received_bytes": float("nan"),
            }
            continue
        gradients = sum(_nbytes(leaf) for leaf in leaves[:2])
        rows[label] = {"memory_bytes": peak.bytes - gradients, "received_bytes": received.bytes}
    times: dict[str, list[float]] = {label: [] for label in methods}
    for _ in range(args.repeats):
        for label, method in methods.items():
            times[label].append(run_once(method, leaves))
    for label, seconds in times.items():
        rows[label] |= {"ms": 1000 * statistics.median(seconds)}
    for label, row in rows.items():
        worst = comm.all_reduce_max(
            torch.tensor(list(row.values()), dtype=torch.float64, device=leaves[0].device)
        )
        rows[label] = dict(zip(row, worst.tolist(), strict=True)) | {
            "error": errors.get(label, float("nan"))
        }
    return rows


def print_table(rows: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"B {args.batch:,}, D {args.width}, N {args.ranks}, s {args.scale:.1f}, {device}, torch {torch.__version__}"
    )
    print(f"{'loss':28} {'ms':>10} {'memory MiB':>11} {'received MiB':>13} {'error':>9}")
    for label, row in sorted(rows.items(), key=lambda item: item[1]["ms"]):
        memory, received = row["memory_bytes"] / 2**20, row["received_bytes"] / 2**20
        print(f"{label:28} {row['ms']:10.1f} {memory:11.1f} {received:13.1f} {row['error']:9.1e}")


def run(args: argparse.Namespace) -> None:
    rows = measure(args)
    if comm.rank() == 0:
        print_table(rows, args)


def main() -> int:
    args = parse_args()
    if args.batch % args.ranks:
        nearest = args.batch - args.batch % args.ranks
        print(
            f"--batch {args.batch} is not a multiple of {args.ranks} ranks; nearest: {nearest}",
            file=sys.stderr,
        )
        return 2
    run_ranks(run, args.ranks, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
