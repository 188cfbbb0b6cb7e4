"""Loss and gradients of NT-Xent equal those of a float64 reference that computes all views in one process."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, build_loss
from helpers.all_losses import evaluate
from helpers.dist import run_ranks
from helpers.oracle import Answer, answer, errors, features

LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5}
OPTIONS: list[dict[str, Any]] = [{"tile": (64, 64)}, {"tile": (64, 64), "ring": True}]


def oracle(first: torch.Tensor, second: torch.Tensor, scale: float) -> Answer:
    """NT-Xent: cross_entropy of every view with all others. The similarity of a view with itself is masked."""
    a, b = (x.detach().double().requires_grad_() for x in (first, second))
    s = torch.tensor([scale], dtype=torch.float64, requires_grad=True)
    views = torch.cat([a, b])
    logits = (s * views @ views.T).masked_fill(torch.eye(len(views), dtype=torch.bool), -torch.inf)
    loss = F.cross_entropy(logits, torch.arange(len(views)).roll(len(a)))
    loss.backward()
    return answer(loss.item(), a, b, s)


def cases() -> list[str]:
    failures = []
    for b, D, scale, dtype in [
        (b, D, s, t)
        for b, D in ((33, 192), (100, 64))
        for s in (0.0, 1.0, -10.0, 100.0)
        for t in LIMIT
    ]:
        for kind in ("random", "repeated"):
            first, second = features(b * comm.size(), D, dtype, kind)
            true = oracle(first, second, scale)
            for options in OPTIONS:
                wrong = errors(
                    evaluate("nt_xent", options, first, second, scale, 2.0),
                    true,
                    max(abs(scale), 1.0),
                )
                if not max(wrong.values()) <= LIMIT[dtype]:
                    failures.append(f"{options} {(b, D)} s {scale} {dtype} {kind}: {wrong}")
    return failures


@pytest.mark.parametrize("size", [1, 2])
def test_nt_xent_equals_the_oracle(size):
    for failures in run_ranks(cases, size):
        assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_nt_xent_equals_the_oracle_on_three_ranks():
    for failures in run_ranks(cases, 3):
        assert not failures, "\n".join(failures)


def test_rounded_second_views_are_the_same_in_all_their_blocks() -> None:
    """With comm_dtype, the second views are rounded before they are compared with first views and with each other."""
    first, second = features(8, 4, torch.float32)
    scale = torch.tensor([20.0])
    out = build_loss("nt_xent", precision="fp32", comm_dtype="bf16")(
        Embeddings(first, second, scale)
    )
    sent_first, sent_second = first.bfloat16().double(), second.bfloat16().double()
    first = first.double()
    own = torch.eye(8, dtype=torch.bool)
    across = 20 * first @ sent_second.T
    same_first = (20 * first @ sent_first.T).masked_fill(own, -torch.inf)
    same_second = (20 * sent_second @ sent_second.T).masked_fill(own, -torch.inf)
    sums = torch.cat([across, same_first], 1), torch.cat([across.T, same_second], 1)
    true = sum((x.logsumexp(1) - across.diagonal()).mean() for x in sums) / 2
    assert abs(out.loss.item() - true) < 1e-5
