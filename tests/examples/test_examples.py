"""The programs in examples/, and open_clip's training loop with our loss, compared with open_clip alone."""

import os
import re
import subprocess
import sys
import types
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip_train.train import train_one_epoch

try:  # open_clip 4
    from open_clip.task import CLIPTask
    from open_clip_train.train import TrainState
except ImportError:  # open_clip 3.3
    CLIPTask = None
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from disco_ds.losses import list_losses
from disco_ds.losses.drop_in import ClipLoss
from helpers.dist import run_ranks
from helpers.paths import ROOT

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1},
}
B, STEPS = 8, 3


def launch(name: str, ranks: int, *arguments: str) -> str:
    """Return what an example prints under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        "--standalone",
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    command += [str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow  # the test of the same loop below is in the fast set
def test_open_clip_loop_learns() -> None:
    said = launch("open_clip_loop.py", 2, "--steps", "8", "--batch", "16")
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", said)[0])
    assert "2 ranks, global batch 32" in said
    assert last < first


@pytest.mark.slow  # half a minute each, mostly for importing transformers
@pytest.mark.parametrize("arguments", [("--stage=2",), ("--stage=3", "--full")], ids=" ".join)
def test_bi_encoder_learns(arguments: tuple[str, ...]) -> None:
    said = launch("deepspeed_bi_encoder.py", 2, "--steps", "6", "--batch", "16", *arguments)
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", said)[0])
    assert "global batch 32 in 4 micro-batches per rank" in said
    assert last < first


@pytest.mark.slow
def test_fsdp_learns_equally_with_any_micro_batches() -> None:
    said = [
        launch("fsdp_clip.py", 2, "--steps", "4", "--batch", "16", "--micro-batches", k)
        for k in ("1", "8")
    ]
    ends = [re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)[0] for text in said]
    assert ends[0] == ends[1]
    assert float(ends[0][1]) < float(ends[0][0])


@pytest.mark.slow
def test_losses_alone_prints_the_same_on_two_ranks() -> None:
    alone, together = (
        re.findall(r"^(\w+) +loss +(-?[\d.]+)", launch("losses_alone.py", N), re.M) for N in (1, 2)
    )
    assert [name for name, _ in alone] == [name for name, _ in together] == list_losses()
    assert [float(value) for _, value in together] == pytest.approx(
        [float(value) for _, value in alone], abs=2e-4
    )


class Batches:
    """A data loader for open_clip's loop that yields the given rows of each global batch."""

    num_batches, num_samples = STEPS, STEPS * B

    def __init__(self, rows: slice):
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            image, text = (
                torch.randn(B, 3, 16, 16, generator=generator),
                torch.randint(1, 60, (B, 8), generator=generator),
            )
            image, text = image[self.rows], text[self.rows]
            yield (image, text) if CLIPTask is None else {"image": image, "text": text}


def train(loss: nn.Module, rows: slice, wrap: bool) -> dict[str, Tensor]:
    """Run open_clip's loop on the given rows of each global batch, and return the weights."""
    torch.manual_seed(1)
    model: nn.Module = open_clip.CLIP(**TINY, output_dict=True)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    given = Namespace(
        device="cpu", precision="fp32", accum_freq=1, distill=False, horovod=False, skip_scheduler=True, wandb=False,
        grad_clip_norm=0.5, rank=0, local_rank=0, world_size=1, log_local=False, batch_size=B, log_every_n_steps=1,
        distributed=False,
    )  # fmt: skip
    data = {"train": types.SimpleNamespace(dataloader=Batches(rows), set_epoch=lambda epoch: None)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    trained = DistributedDataParallel(model) if wrap else model
    if CLIPTask is None:
        train_one_epoch(trained, data, loss, 0, optimizer, None, None, None, given)
    else:
        train_one_epoch(TrainState(CLIPTask(trained, loss=loss), optimizer), data, given)
    weights = model.state_dict()
    assert any(not torch.equal(weights[name], start[name]) for name in weights)
    return weights


def train_with_ours() -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    n, N = torch.distributed.get_rank(), torch.distributed.get_world_size()
    weights = train(ClipLoss(rank=n, world_size=N), slice(n * B // N, (n + 1) * B // N), wrap=True)
    torch.distributed.destroy_process_group()
    return {name: value.numpy() for name, value in weights.items()}


@pytest.mark.parametrize("size", [1, 4])
def test_loop_of_open_clip_trains_as_on_one_rank(size: int) -> None:
    """Gradients are clipped, so the result would differ if the gradient had another scale."""
    alone = train(open_clip.ClipLoss(), slice(None), wrap=False)
    for weights in run_ranks(train_with_ours, size, joined=False):
        for name, value in alone.items():
            torch.testing.assert_close(
                torch.from_numpy(weights[name]), value, rtol=1e-4, atol=1e-5, msg=name
            )


def test_every_example_is_run_and_named_in_the_manual(request: pytest.FixtureRequest) -> None:
    source = Path(__file__).read_text()
    page = (ROOT / "docs" / "custom_loop.md").read_text()
    # These are run by test_own_model, test_own_loss, test_own_source, test_export, test_loss_examples and
    # test_shuffled_captions. docs/extending.md describes the first three, docs/evaluation.md the fourth, docs/losses.md
    # the next two, and docs/data.md the last one.
    elsewhere = {
        "own_model.py",
        "smoothed_loss.py",
        "sqlite_source.py",
        "benchmark_exports.py",
        "reference_loss.py",
        "two_captions.py",
        "shuffled_captions.py",
    }
    for path in (ROOT / "examples").glob("*.py"):
        if path.name in elsewhere:
            continue
        assert f'launch("{path.name}"' in source
        assert f"(../examples/{path.name})" in page
