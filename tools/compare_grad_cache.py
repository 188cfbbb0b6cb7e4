"""Compare contrastive_step with sentence-transformers' cached loss and GradCache: time, memory, gradient error.

    python -m venv compare_env && compare_env/bin/pip install --editable . transformers sentence-transformers GradCache
    compare_env/bin/python tools/compare_grad_cache.py

The separate environment is needed because nothing else in this repository uses these packages. All contenders use the
torch of this environment.

Every contender computes the same gradient: the gradient of CLIP's loss (both directions) over the global batch. One
BERT with random weights and dropout encodes both texts of a pair; it has the shape of BERT-tiny. It runs under
DistributedDataParallel (gloo) on CPU ranks with one thread each. A step consists of the forward passes, the loss and
the backward passes. There is no optimizer.

Each contender runs in separate processes. The contenders take turns: each runs one step, then each runs one step in
the opposite order, and so on. The time of a step is the time of the slowest rank. The columns of the table:
  s a step         median time of a step; `from` and `to` are the shortest and the longest time
  against NAME     median of the time divided by the time of the first contender, NAME, in the same turn
  CPU s            median CPU time of a step, which is more reliable than the time on a busy machine
  peak MiB         growth of the resident set of a rank during its first step. `in all` is the resident set at the peak.
                   Both are for the rank with the largest value.
  error            |gradient - true| / |true| over all weights, without dropout, at the smaller batch --error-batch.
                   `true` is computed in float64, in one process, with the whole batch in one graph.
  factor           the multiple of `true` that best approximates the gradient; 1 is correct
  error / factor   the error that remains after the gradient is divided by `factor`

GradCache 0.0.1 on PyPI is installed as gradcache, but its modules import each other as grad_cache. Therefore this tool
makes the package available under both names.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import wait
from typing import Any

import torch
from bench_loss import Peak
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from disco_ds import build_loss, contrastive_step
from disco_ds.distributed import comm

SCALE = 20.0  # sentence-transformers' default
VOCABULARY = 30_522
Side = dict[str, Tensor]
Step = Callable[[tuple[Side, Side]], object]
"""A function that runs a step with this rank's pairs and leaves the gradient in the parameters."""


class Encoder(nn.Module):
    """A BERT. Its output is the mean of the last layer over the tokens of a text, normalized."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=max(1, args.hidden // 64),
            intermediate_size=4 * args.hidden,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def make_pairs(count: int, length: int) -> tuple[Side, Side]:
    """Return pairs of token sequences without padding.

    The first text of a pair is random. The second is a copy of the first in which about half of the tokens are redrawn.
    """
    generator = torch.Generator().manual_seed(1)
    first, other = (
        torch.randint(1000, VOCABULARY, (count, length), generator=generator) for _ in "ab"
    )
    second = torch.where(torch.rand(count, length, generator=generator) < 0.5, first, other)
    mask = torch.ones_like(first)
    return {"input_ids": first, "attention_mask": mask}, {
        "input_ids": second,
        "attention_mask": mask,
    }


def take(pairs: tuple[Side, Side], rank: int, ranks: int) -> tuple[Side, Side]:
    """Return the pairs of the global batch that belong to one rank."""
    first, second = ({key: x.chunk(ranks)[rank] for key, x in side.items()} for side in pairs)
    return first, second


def cached_loss(encoder: nn.Module, micro_batch: int) -> tuple[nn.Module, Step]:
    """Build the contender sentence-transformers: its CachedMultipleNegativesRankingLoss in both directions.

    The loss is called as in sentence-transformers' trainer.
    """
    from sentence_transformers import SentenceTransformer, losses, util

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, features: Side) -> Side:
            return features | {
                "sentence_embedding": self.encoder(
                    features["input_ids"], features["attention_mask"]
                )
            }

    sentences = SentenceTransformer(modules=[Adapter()], device="cpu")
    loss = losses.CachedMultipleNegativesRankingLoss(
        sentences,
        scale=SCALE,
        similarity_fct=util.dot_score,  # the encoder's outputs are unit rows already
        mini_batch_size=micro_batch,
        gather_across_devices=True,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )
    loss.model = loss.loss.model = model = DistributedDataParallel(sentences)
    return model, lambda pairs: loss(pairs, None).backward()


def grad_cache(encoder: nn.Module, micro_batch: int) -> tuple[nn.Module, Step]:
    """Build the contender GradCache as in its README for DDP and one encoder for both sides.

    Unlike in the README, the loss covers both directions.
    """
    if find_spec("grad_cache") is None:
        sys.modules["grad_cache"] = importlib.import_module("gradcache")
    losses = importlib.import_module("grad_cache.loss")
    published = losses.DistributedContrastiveLoss()

    def symmetric(first: Tensor, second: Tensor) -> Tensor:
        logits = SCALE * published.gather_tensor(first) @ published.gather_tensor(second).T
        target = torch.arange(len(logits))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    model = DistributedDataParallel(encoder)
    cache = importlib.import_module("grad_cache.grad_cache").GradCache(
        [model, model], micro_batch, symmetric
    )
    return model, lambda pairs: cache(*pairs, no_sync_except_last=True)


def ours(name: str, part: int = 1) -> Callable[[nn.Module, int], tuple[nn.Module, Step]]:
    """Return a function that builds the contender contrastive_step with a loss of this package.

    In contrastive_step, the graph of a micro-batch contains both texts of each pair. In the other packages, it contains
    only one of them. The micro-batch is divided by `part`: with part=2, the graph of contrastive_step contains as many
    texts as the graphs of the other packages.
    """

    def build(encoder: nn.Module, micro_batch: int) -> tuple[nn.Module, Step]:
        model, loss = DistributedDataParallel(encoder), build_loss(name)

        def forward(pairs: tuple[Side, Side]) -> tuple[Tensor, Tensor]:
            return model(**pairs[0]), model(**pairs[1])

        def step(pairs: tuple[Side, Side]) -> None:
            micro_batches = max(1, part * len(pairs[0]["input_ids"]) // micro_batch)
            contrastive_step(model, loss, pairs, forward, micro_batches=micro_batches, scale=SCALE)

        return model, step

    return build


@dataclass(frozen=True)
class Contender:
    build: Callable[[nn.Module, int], tuple[nn.Module, Step]]
    """Builds the encoder wrapped in DDP, and the step, from the encoder and the micro-batch. Collective."""
    package: str = ""
    """Name of the package on PyPI; empty for this package."""
    modules: tuple[str, ...] = ()
    """Names of the package's module. The package counts as installed if one of them is found."""


CONTENDERS = {
    "disco_fused": Contender(ours("disco_fused")),
    "disco_fused, micro-batch / 2": Contender(ours("disco_fused", 2)),
    "inf_cl": Contender(ours("inf_cl")),
    "sentence-transformers": Contender(
        cached_loss, "sentence-transformers", ("sentence_transformers",)
    ),
    "GradCache": Contender(grad_cache, "GradCache", ("grad_cache", "gradcache")),
}


class Ranks:
    """The processes of one contender, one for each rank. They wait for commands."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        port = comm._free_port()
        self.name = name
        self.pipes, self.processes = [], []
        for rank in range(args.ranks):
            pipe, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(name, rank, port, args, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def call(self, command: str) -> list[Any]:
        """Send a command to all ranks, and return the answer of each rank.

        Raises:
            RuntimeError: With the traceback of the first rank that fails.
        """
        for pipe in self.pipes:
            pipe.send(command)
        answers: dict[Any, Any] = {}
        while len(answers) < len(self.pipes):
            for pipe in wait([pipe for pipe in self.pipes if pipe not in answers]):
                answers[pipe] = pipe.recv()
                if isinstance(answers[pipe], str):
                    raise RuntimeError(f"{self.name}: {answers[pipe]}")
        return [answers[pipe] for pipe in self.pipes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def serve(name: str, rank: int, port: int, args: argparse.Namespace, pipe: Any) -> None:
    """Run one rank of one contender. It answers each command with a result or, after an error, a traceback."""
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # the other packages call deprecated functions of torch
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo")
        encoder = Encoder(args)
        model, step = CONTENDERS[name].build(encoder, args.micro_batch)
        batches = {
            B: take(make_pairs(B, args.length), rank, args.ranks)
            for B in (args.batch, args.error_batch)
        }
        while True:
            command = pipe.recv()
            model.train(command != "gradient")
            model.zero_grad(set_to_none=True)
            dist.barrier()
            if command == "gradient":
                step(batches[args.error_batch])
                pipe.send(gradient_of(encoder).numpy())
            elif command == "peak":
                with Peak() as peak:
                    step(batches[args.batch])
                pipe.send((peak.bytes, peak.start + peak.bytes))
            else:
                start, cpu = time.perf_counter(), time.process_time()
                step(batches[args.batch])
                pipe.send((time.perf_counter() - start, time.process_time() - cpu))
    except BaseException:
        pipe.send(traceback.format_exc())


def gradient_of(encoder: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])


def true_gradient(args: argparse.Namespace) -> Tensor:
    """Return the float64 gradient of --error-batch pairs, computed in this process with all pairs in one graph."""
    encoder = Encoder(args).double().eval()
    first, second = (encoder(**side) for side in make_pairs(args.error_batch, args.length))
    logits, target = SCALE * first @ second.T, torch.arange(args.error_batch)
    ((F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2).backward()
    return gradient_of(encoder)


def compare_gradients(got: Tensor, true: Tensor) -> dict[str, float]:
    """Return `error`, `factor` and `error / factor` of a gradient, as defined in the module's docstring."""
    got, length = got.double(), true.norm()
    factor = got @ true / length**2
    return {
        "error": ((got - true).norm() / length).item(),
        "factor": factor.item(),
        "error / factor": ((got / factor - true).norm() / length).item(),
    }


def measure(names: list[str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure the contenders in turn. Return, for each of them, the worst results of all ranks."""
    true = true_gradient(args)
    rows: dict[str, dict[str, Any]] = {}
    contenders = [Ranks(name, args) for name in names]
    try:
        # The peak is measured in the first step, so it includes the gradients of the parameters and DDP's buckets.
        for ranks in contenders:
            beyond, whole = (max(values) for values in zip(*ranks.call("peak"), strict=True))
            rows[ranks.name] = {"peak": beyond, "resident": whole, "seconds": [], "cpu": []}
        for ranks in contenders:
            errors = [compare_gradients(torch.from_numpy(x), true) for x in ranks.call("gradient")]
            rows[ranks.name] |= max(errors, key=lambda found: found["error"])
        for turn in range(args.repeats):
            for ranks in contenders[:: 1 if turn % 2 == 0 else -1]:
                seconds, cpu = (max(values) for values in zip(*ranks.call("time"), strict=True))
                rows[ranks.name]["seconds"].append(seconds)
                rows[ranks.name]["cpu"].append(cpu)
                print(
                    f"{ranks.name}: {seconds:.2f} s, {cpu:.2f} s of CPU time",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        for ranks in contenders:
            ranks.close()
    return rows


def describe(rows: dict[str, dict[str, Any]], args: argparse.Namespace) -> str:
    """Format the results as a Markdown table."""
    base = next(iter(rows))
    packages = filter(None, ["torch", "transformers", *(CONTENDERS[name].package for name in rows)])
    ranks = f"{args.ranks} CPU ranks of one thread, global batch {args.batch:,}, micro-batch {args.micro_batch}"
    lines = [
        f"{ranks}, length {args.length}; {', '.join(f'{package} {version(package)}' for package in packages)}",
        "",
        f"| contender | s a step | from | to | against {base} | CPU s | peak MiB beyond the start | in all |"
        " error | factor | error / factor |",
        f"|{11 * '---|'}",
    ]
    for name, row in rows.items():
        seconds = row["seconds"]
        ratio = statistics.median(
            x / y for x, y in zip(seconds, rows[base]["seconds"], strict=True)
        )
        times = f"{statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {ratio:.2f}"
        times += f" | {statistics.median(row['cpu']):.2f}"
        memory = f"{row['peak'] / 2**20:.0f} | {row['resident'] / 2**20:.0f}"
        error = f"{row['error']:.1e} | {row['factor']:.3f} | {row['error / factor']:.1e}"
        lines.append(f"| {name} | {times} | {memory} | {error} |")
    return "\n".join(lines)


def missing(names: list[str]) -> list[str]:
    """Return the packages that these contenders need but that are not installed."""
    asked = (CONTENDERS[name] for name in names)
    return [x.package for x in asked if x.modules and not any(map(find_spec, x.modules))]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4096, help="global batch, in pairs")
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=128,
        help="pairs per forward pass of one rank",
    )
    parser.add_argument(
        "--error-batch", type=int, default=1024, help="global batch for the error, in pairs"
    )
    parser.add_argument("--length", type=int, default=16, help="tokens per text")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each contender")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if absent := missing(args.contenders):
        print(
            f"not installed here: {', '.join(absent)}. Install them in a separate environment; --help begins with "
            "the commands. --contenders disco_fused runs without them.",
            file=sys.stderr,
        )
        return 1
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }  # without these, the ranks would use a GPU
    for batch in (args.batch, args.error_batch):
        if batch % (unit := args.ranks * args.micro_batch):
            print(
                f"{batch} pairs are not a multiple of ranks x micro-batch ({unit})", file=sys.stderr
            )
            return 2
    print(describe(measure(args.contenders, args), args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
