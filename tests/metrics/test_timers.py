"""Measurements of a step (phases, memory, slowest rank), and what MFU needs: FLOPs, and GPUs recognized by name."""

import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from disco_ds.config import ModelSettings
from disco_ds.distributed import comm
from disco_ds.metrics.step_metrics import Phases
from disco_ds.models.clip import build_model
from disco_ds.models.flops import count_flops, peak_samples_per_s
from disco_ds.models.gpus import recognize
from helpers.dist import run_ranks
from helpers.towers import CONTEXT, IMAGE_SIZE, TINY, write_tiny

SLOW = 1


def step(phases: Phases, sampled: bool) -> tuple[dict[str, float], list[float]]:
    """Run a step in which one rank waits for data in its forward phase.

    Returns:
        What was measured, and this test's own seconds of the forward phase and the loss.
    """
    late = comm.rank() == SLOW
    timer = phases.timer(sampled)
    times = [time.perf_counter()]
    with timer("step/forward"):
        time.sleep(0.3 if late else 0.1)
    times.append(time.perf_counter())
    with timer("step/loss"):
        comm.gather(torch.ones(4, 8))
        comm.all_reduce_sum(torch.ones(10))
    times.append(time.perf_counter())
    with timer("step/backward and update"):
        comm.all_reduce_sum(torch.ones(1000))
    seconds = [end - start for start, end in pairwise(times)]
    return phases.read(wait_s=0.2 if late else 0.0), seconds


def measure() -> tuple[dict[str, float], dict[str, float], list[float]]:
    phases = Phases()
    sampled, seconds = step(phases, sampled=True)
    return sampled, step(phases, sampled=False)[0], seconds


def test_sampled_step_tells_the_slow_rank() -> None:
    results = run_ranks(measure, 2)
    sampled, other, _ = results[0]
    assert results[1][0] == sampled, "all ranks must get the same measurements"
    assert other == {}
    forward, loss = zip(*(seconds for *_, seconds in results), strict=True)
    assert sampled["ranks/slowest"] == SLOW
    assert sampled["ranks/slowest_s"] == pytest.approx(forward[SLOW], abs=0.05)
    assert sampled["ranks/median_s"] == pytest.approx(fmean(forward), abs=0.05)
    assert sampled["time/data_wait_s"] == pytest.approx(0.1)
    assert sampled["time/forward_s"] == pytest.approx(fmean(forward), abs=0.05)
    # The faster rank waits for the other one in the loss.
    assert sampled["time/loss_s"] == pytest.approx(fmean(loss), abs=0.05)
    assert sampled["memory/host_bytes"] > 10 * 2**20


def test_step_that_is_not_sampled_is_not_timed() -> None:
    assert Phases().timer(sampled=False) is record_function


def tower(tokens: int, width: int, packed: bool = False) -> int:
    """Return the FLOPs of the matrix products of two layers: q k v, scores and sums, projection, MLP.

    The scores and sums of packed texts are not counted.
    """
    scores = 0 if packed else 2 * tokens * tokens * width
    per_layer = tokens * width * 3 * width + scores + tokens * width * width
    return 2 * 2 * (per_layer + 2 * tokens * width * 4 * width)


@pytest.mark.parametrize(("settings", "weights"), [({}, (3, 3)), ({"lock_image": True}, (1, 3))])
def test_flops_are_those_of_the_matrix_products(
    settings: dict[str, Any], weights: tuple[int, int], tmp_path: Path
) -> None:
    model: Any = build_model(ModelSettings(name=write_tiny(tmp_path), **settings))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    width, patches = (
        TINY["vision_cfg"]["width"],
        (IMAGE_SIZE // TINY["vision_cfg"]["patch_size"]) ** 2,
    )
    project = 2 * width * TINY["embed_dim"]
    image = (
        2 * patches * width * 3 * TINY["vision_cfg"]["patch_size"] ** 2
        + tower(patches + 1, width)
        + project
    )
    peak = peak_samples_per_s(model, 1e9)
    for tokens in (CONTEXT, 5, None):
        text = tower(tokens or CONTEXT, TINY["text_cfg"]["width"], packed=True) + project
        assert count_flops(model, tokens) == weights[0] * image + weights[1] * text
        assert peak is not None
        assert peak(tokens) == pytest.approx(1e9 / (weights[0] * image + weights[1] * text))
    assert peak_samples_per_s(model, None) is None, "the peak speed of a CPU is unknown"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40G"),
        ("A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-80G"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200-96G"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
    ],
)
def test_gpu_is_recognized_by_the_name_of_its_device(device: str, name: str) -> None:
    gpu = recognize(device)
    assert gpu is not None
    assert gpu.name == name


@pytest.mark.parametrize(
    "device",
    [
        "Tesla T4",
        "NVIDIA L40",
        "NVIDIA A10",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA GB200",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
    ],
)
def test_gpu_that_is_not_known_is_no_other(device: str) -> None:
    assert recognize(device) is None
