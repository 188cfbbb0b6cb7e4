"""How far the gradients of published contrastive trainers are from the full-batch gradient, and ours beside them.

    python -m tools.check.peers_gradients [--disco-clip FOLDER]

Every trainer gets the same global batch on CPU ranks. The gradient that its optimizer receives is compared with that of
the whole batch in a single process, in float64: its relative error and, for the towers and the logit scale, the factor
of the true gradient that it contains. open_clip_train and sentence-transformers (with accelerate and datasets) run
their own training loops. FOLDER is a checkout of DisCo-CLIP. Peers that are not installed are left out. Inf-CL is
missing because its kernels accept only GPU tensors.
"""

import argparse
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from disco_ds import build_loss, contrastive_step
from disco_ds.distributed import comm

B, WORDS, CONSTANT_SCALE = 64, 400, 20.0
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1},
}
Gradients = dict[str, Tensor]
Trainer = Callable[[Any, int], Gradients]
"""Trains one step of the model on this rank's part of the batch, in K micro-batches, and returns the gradients that
the optimizer receives."""


def make_model() -> nn.Module:
    import open_clip

    torch.manual_seed(0)
    return open_clip.CLIP(**TINY, output_dict=True, nonscalar_logit_scale=True).double()


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(B, 3, 16, 16, generator=generator, dtype=torch.float64)
    return image, torch.randint(1, 60, (B, 8), generator=generator)


def part(values: Tensor) -> Tensor:
    return values.chunk(comm.size())[comm.rank()]


def collect(model: nn.Module) -> Gradients:
    return {name: p.grad.double().clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def contrast(image: Tensor, text: Tensor, scale: Tensor | float) -> Tensor:
    logits, labels = scale * image @ text.T, torch.arange(len(image))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def ours(model: nn.Module, K: int) -> Gradients:
    wrapped = DistributedDataParallel(model)

    def forward(batch: Any) -> tuple[Tensor, ...]:
        return tuple(wrapped(*batch).values())[:3]

    batch = tuple(map(part, make_batch()))
    contrastive_step(wrapped, build_loss("disco_fused"), batch, forward, micro_batches=K)
    return collect(model)


class Recorder(torch.optim.SGD):
    """Keeps the gradients of its first step, and changes no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [p.grad.double().clone() for p in self.param_groups[0]["params"]]


def open_clip_train(**options: bool) -> Trainer:
    def train(model: Any, K: int) -> Gradients:
        import open_clip
        from open_clip_train.train import train_one_epoch

        N, rank = comm.size(), comm.rank()
        image, text = map(part, make_batch())
        loader = Batches(list(zip(image.chunk(K), text.chunk(K), strict=True)))
        data = {"train": types.SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
        args = argparse.Namespace(
            device="cpu", precision="fp32", accum_freq=K, distill=False, horovod=False, skip_scheduler=True,
            grad_clip_norm=None, rank=rank, local_rank=rank, world_size=N, log_local=False, batch_size=B // N // K,
            log_every_n_steps=1, wandb=False, distributed=N > 1,
        )  # fmt: skip
        optimizer = Recorder(model.parameters(), lr=1.0)
        loss = open_clip.ClipLoss(rank=rank, world_size=N, cache_labels=True, **options)
        wrapped = DistributedDataParallel(model) if N > 1 else model
        train_one_epoch(wrapped, data, loss, 0, optimizer, None, None, None, args)
        return dict(zip(dict(model.named_parameters()), optimizer.seen, strict=True))

    return train


class Batches:
    def __init__(self, parts: list[tuple[Tensor, Tensor]]):
        self.parts, self.num_batches = parts, len(parts)
        self.num_samples = B // comm.size()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.parts)


def disco_clip(model: nn.Module, K: int) -> Gradients:
    """The loss of DisCo-CLIP's README, which sums both directions, under DistributedDataParallel."""
    from disco import Gather

    image, text = map(part, make_batch())
    b, rank = len(image), comm.rank()
    wrapped = DistributedDataParallel(model)  # averages gradients only while it exists
    out = wrapped(image, text)
    images, texts = Gather(out["image_features"]), Gather(out["text_features"])
    labels, rows = torch.arange(b) + rank * b, slice(rank * b, rank * b + b)
    sides = (images, texts), (texts, images)
    logits = [out["logit_scale"] * each[rows] @ others.T for each, others in sides]
    (F.cross_entropy(logits[0], labels) + F.cross_entropy(logits[1], labels)).backward()
    return collect(model)


class MeanOfWords(nn.Module):
    """Averages word vectors: the only module of a SentenceTransformer."""

    def __init__(self) -> None:
        super().__init__()
        weights = torch.randn(WORDS, 32, generator=torch.Generator().manual_seed(0))
        self.words = nn.EmbeddingBag.from_pretrained(weights.double(), freeze=False)

    def preprocess(self, texts: list[str], **_: Any) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()] for text in texts])}

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        return features | {"sentence_embedding": self.words(features["input_ids"])}


def make_sentence_model() -> nn.Module:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(modules=[MeanOfWords()], device="cpu")


def make_sentences() -> dict[str, list[str]]:
    words = torch.randint(0, WORDS, (2, B, 6), generator=torch.Generator().manual_seed(2)).tolist()
    columns = ([" ".join(map(str, row)) for row in side] for side in words)
    return dict(zip(("anchor", "positive"), columns, strict=True))


def cached_ranking(gathers: bool) -> Trainer:
    """sentence-transformers' trainer with CachedMultipleNegativesRankingLoss, which has one direction by default."""

    def train(model: Any, K: int) -> Gradients:
        from datasets import Dataset
        from sentence_transformers import (
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
        )
        from sentence_transformers.sentence_transformer.losses import (
            CachedMultipleNegativesRankingLoss as Cached,
        )

        b = B // comm.size()
        recorder = Recorder(model.parameters(), lr=1.0)
        with tempfile.TemporaryDirectory() as folder:
            arguments = SentenceTransformerTrainingArguments(
                output_dir=folder, use_cpu=True, per_device_train_batch_size=b, max_steps=1, max_grad_norm=0.0,
                report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
            )  # fmt: skip
            loss = Cached(
                model, CONSTANT_SCALE, mini_batch_size=b // K, gather_across_devices=gathers
            )
            data = Dataset.from_dict(make_sentences())
            constant = torch.optim.lr_scheduler.LambdaLR(recorder, lambda step: 1.0)
            SentenceTransformerTrainer(
                model, arguments, train_dataset=data, loss=loss, optimizers=(recorder, constant)
            ).train()
        return dict(zip(dict(model.named_parameters()), recorder.seen, strict=True))

    return train


def true_gradients(model: Any, is_clip: bool) -> Gradients:
    """Return the gradient of the whole batch in one process, by autograd alone."""
    if is_clip:
        out = model(*make_batch())
        contrast(out["image_features"], out["text_features"], out["logit_scale"]).backward()
    else:
        sides = [
            F.normalize(model(model[0].preprocess(texts))["sentence_embedding"], dim=-1)
            for texts in make_sentences().values()
        ]
        F.cross_entropy(CONSTANT_SCALE * sides[0] @ sides[1].T, torch.arange(B)).backward()
    return collect(model)


def compare(found: Gradients, true: Gradients) -> str:
    """Return the cells of a table: the error of the whole gradient, and the factors of the towers and the scale."""
    flat = lambda part, names: torch.cat([part[name].flatten() for name in names])  # noqa: E731
    error = (flat(found, true) - flat(true, true)).norm() / flat(true, true).norm()
    cells = [f"{error:.0e}"]
    for names in ([n for n in true if n != "logit_scale"], [n for n in true if n == "logit_scale"]):
        if not names:
            cells.append("constant")
            continue
        a, b = flat(found, names), flat(true, names)
        factor = (a @ b) / (b @ b)
        rest = ((a - factor * b).norm() / (factor * b).norm()).item()
        wrong = ((a - b).norm() / b.norm()).item()
        inexact = f"x {factor:.3g}" if rest < 1e-4 else f"wrong by {wrong:.0%}"
        cells.append("exact" if wrong < 1e-5 else inexact)
    return " | ".join(cells)


CASES: dict[str, tuple[Trainer, bool, list[tuple[int, int]]]] = {
    "disco_ds, contrastive_step": (ours, True, [(1, 1), (1, 4), (2, 1), (2, 4)]),
    "open_clip_train, defaults": (open_clip_train(), True, [(1, 1), (1, 4), (2, 1), (2, 4)]),
    "open_clip_train --local-loss": (open_clip_train(local_loss=True), True, [(2, 1)]),
    "open_clip_train --gather-with-grad": (open_clip_train(gather_with_grad=True), True, [(2, 1)]),
    "open_clip_train --local-loss --gather-with-grad": (
        open_clip_train(local_loss=True, gather_with_grad=True),
        True,
        [(2, 1), (2, 4)],
    ),
    "DisCo-CLIP, README": (disco_clip, True, [(2, 1), (4, 1)]),
    "sentence-transformers, cached ranking loss": (
        cached_ranking(False),
        False,
        [(1, 1), (1, 4), (2, 4)],
    ),
    "sentence-transformers, gather_across_devices": (cached_ranking(True), False, [(2, 1), (2, 4)]),
}
NEEDED = {"open_clip": "open_clip_train", "DisCo": "disco", "sentence": "sentence_transformers"}


def run_rank(rank: int, name: str, N: int, K: int, port: int, to: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(N)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    train, is_clip, _ = CASES[name]
    with comm.session(300):
        make = make_model if is_clip else make_sentence_model
        found = train(make(), K)
        if rank == 0:
            Path(to).write_text(compare(found, true_gradients(make(), is_clip)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--disco-clip", type=Path, help="a checkout of DisCo-CLIP's repository")
    parser.add_argument("--only", default="", help="only trainers whose name contains this")
    given = parser.parse_args()
    if given.disco_clip:
        sys.path.insert(0, str(given.disco_clip))
    print(
        "| trainer | ranks | micro-batches | error | towers | logit scale |\n|---|---|---|---|---|---|"
    )
    for name, (_, _, settings) in CASES.items():
        module = next((m for start, m in NEEDED.items() if name.startswith(start)), "disco_ds")
        if given.only not in name or find_spec(module) is None:
            continue
        for N, K in settings:
            with tempfile.NamedTemporaryFile("r") as file:
                arguments = (name, N, K, comm._free_port(), file.name)
                torch.multiprocessing.spawn(run_rank, arguments, nprocs=N)
                print(f"| {name} | {N} | {K} | {file.read()} |", flush=True)


if __name__ == "__main__":
    main()
