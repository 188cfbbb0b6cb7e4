"""Planned memory of every registered loss, compared with the memory that it allocates on one, two and three ranks."""

from typing import Any

import pytest
import torch

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, Teacher, build_loss, list_losses
from disco_ds.plan.losses import loss_peak
from disco_ds.plan.towers import Allocations
from helpers.dist import run_ranks

TILE = {"tile": (256, 256), "impl": "torch"}
SHAPES = [(512, 32), (256, 256), (64, 512), (1024, 128)]
"""(b, D). Most memory is for the b x b matrix, for matrix and features, for the features, and for a large tile."""
CASES: list[tuple[str, dict[str, Any]]] = [
    ("clip", {}),
    ("disco", {}),
    *((name, TILE) for name in list_losses() if name not in ("clip", "disco")),
    ("inf_cl", {**TILE, "comm_dtype": "bf16"}),
    ("nt_xent", {**TILE, "ring": True}),
    ("disco", {"teacher_weight": 0.5}),
    *((name, {**TILE, "teacher_weight": 0.5}) for name in ("disco_fused", "inf_cl", "siglip")),
    # With tiles that torch processes in strips:
    *((name, {}) for name in ("disco_fused", "inf_cl", "siglip", "fastclip_v2", "nt_xent")),
]


def measure(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, int, int]]:
    """Run forward and backward of each case on this rank. Return (case, planned bytes, allocated bytes)."""
    found = []
    for name, options in cases:
        for b, D in SHAPES:
            torch.manual_seed(comm.rank())
            loss = build_loss(name, **options)
            loss.set_num_samples(b * comm.size(), b * comm.size())
            image, text = (
                torch.nn.functional.normalize(torch.randn(b, D)).requires_grad_() for _ in range(2)
            )
            scale, bias = (
                torch.tensor([14.3], requires_grad=True),
                torch.tensor([-10.0], requires_grad=True),
            )
            index = torch.arange(b) + comm.rank() * b
            T = 96 if options.get("teacher_weight") else 0
            rows = torch.nn.functional.normalize(torch.randn(b, 96))
            teachers = [Teacher(rows, rows.flip(0), torch.tensor([20.0]))] if T else []
            constants = [x for t in teachers for x in (t.image, t.text, t.scale)]
            with Allocations([image, text, scale, bias, index, *constants]) as memory:
                loss(Embeddings(image, text, scale, bias, index, None, teachers)).loss.backward()
            planned = loss_peak(loss, b, comm.size(), D, torch.device("cpu"), T)
            found.append((f"{name} {options} b {b} D {D} N {comm.size()}", planned, memory.peak))
    return found


def test_planned_memory_of_a_loss_is_what_it_allocates() -> None:
    check(measure(CASES[1:3]), 2)


@pytest.mark.slow
def test_planned_memory_of_every_loss_is_what_it_allocates() -> None:
    check(measure(CASES), len(CASES))
    for ranks in (2, 3):
        check(run_ranks(measure, ranks, CASES)[0], len(CASES))


def check(found: list[tuple[str, int, int]], num_cases: int) -> None:
    """Check that planned and allocated bytes agree in all cases."""
    wrong = [
        f"{case}: planned {a:,}, allocated {b:,} ({a / b - 1:+.1%})"
        for case, a, b in found
        if not 0.95 < a / b < 1.25
    ]
    assert not wrong, "\n".join(wrong)
    assert len(found) == num_cases * len(SHAPES)
