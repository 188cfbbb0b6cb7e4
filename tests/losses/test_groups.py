"""Losses that ignore pairs of the same group or treat them as positives, compared with float64 references."""

from typing import Any

import pytest
import torch
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, build_loss
from helpers.dist import run_ranks
from helpers.oracle import Answer, answer, errors, features, grouped, grouped_sigmoid

LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5}
LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("disco_fused", {"tile": (64, 48)}),
    ("inf_cl", {"tile": (48, 64)}),
    ("siglip", {"tile": (64, 64)}),
]
BIAS = -5.0


def groups(kind: str, B: int, N: int) -> Tensor:
    """Return group ids [B], some of them negative or large."""
    i = torch.arange(B)
    return {
        "few": torch.where(i % 7 == 3, i % 35, 1000 + i) * (2**40 + 1) - 2**50,
        "across ranks": torch.where(i % (B // N) == 2, -1, i),
        "on one rank": torch.where(i < 5, 0, i),
        "classes": i % 5,
        "whole batch": torch.zeros(B, dtype=torch.int64),
    }[kind]


def evaluate(
    name: str,
    options: dict[str, Any],
    image: Tensor,
    text: Tensor,
    scale: float,
    ids: Tensor | None,
) -> tuple[Answer, float, dict[str, Tensor]]:
    """Compute a loss on this rank's rows, and average over ranks as an engine would. Collective.

    Returns:
        The loss and its gradients for the whole batch, the gradient of the bias (0 if there is none), and the metrics.
    """
    N, n = comm.size(), comm.rank()
    b = len(image) // N
    own = slice(n * b, (n + 1) * b)
    I, T = (x[own].detach().clone().requires_grad_() for x in (image, text))  # noqa: E741
    s, bias = (torch.tensor([x], dtype=image.dtype, requires_grad=True) for x in (scale, BIAS))
    ids = None if ids is None else ids[own]
    out = build_loss(name, **options)(Embeddings(I, T, s, bias, group_id=ids))
    (-3.0 * out.loss).backward()
    mine = answer(out.loss.item(), I, T, s)
    d_bias = 0.0 if bias.grad is None else bias.grad.item()
    values = torch.tensor([mine.loss, mine.ds, d_bias], dtype=torch.float64)
    loss, ds, d_bias = (comm.all_reduce_sum(values) / N).tolist()
    assert out.metrics["loss"].item() == pytest.approx(loss, rel=1e-5)
    dI, dT = (comm.gather(grad) / (-3.0 * N) for grad in (mine.dI, mine.dT))
    return Answer(loss, dI, dT, ds / -3.0), d_bias / -3.0, out.metrics


def contract(shapes: list[tuple[int, int]], rows: tuple[str, ...]) -> list[str]:
    failures = []
    for (b, D), kind, row, dtype in [
        (shape, kind, row, dtype)
        for shape in shapes
        for kind in ("few", "across ranks", "on one rank", "classes", "whole batch")
        for row in rows
        for dtype in LIMIT
    ]:
        N = comm.size()
        image, text = features(b * N, D, dtype, row)
        ids = groups(kind, b * N, N)
        shared = (ids[:, None] == ids).sum(1) > 1
        for same_group, scale in [(x, s) for x in ("ignored", "positives") for s in (14.3, 100.0)]:
            softmax = grouped(image, text, scale, ids, same_group)
            sigmoid = grouped_sigmoid(image, text, scale, BIAS, ids, same_group)
            for name, options in LOSSES:
                true, d_bias = sigmoid if name == "siglip" else (softmax, 0.0)
                got, mine, metrics = evaluate(
                    name, options | {"same_group": same_group}, image, text, scale, ids
                )
                wrong = errors(got, true, scale)
                wrong["bias"] = abs(mine - d_bias) / max(abs(d_bias), 1)
                wrong["share"] = abs(metrics["grouped_pairs"].item() - shared.float().mean().item())
                if not max(wrong.values()) <= LIMIT[dtype]:
                    failures.append(
                        f"{name} {same_group} {(b, D)} {kind} {row} s {scale} {dtype}: {wrong}"
                    )
    return failures


@pytest.mark.parametrize(
    ("size", "shapes", "rows"), [(1, [(33, 24)], ("aligned",)), (2, [(50, 40)], ("random",))]
)
def test_loss_and_gradients_equal_the_oracle(size, shapes, rows):
    for failures in run_ranks(contract, size, shapes, rows):
        assert not failures, "\n".join(failures[:30])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_loss_and_gradients_equal_the_oracle_at_every_shape(size):
    shapes = [(33, 192), (100, 64)]
    for failures in run_ranks(contract, size, shapes, ("random", "aligned", "repeated")):
        assert not failures, "\n".join(failures[:30])


def other_paths() -> list[str]:
    """Check a very large logit scale, products of 16-bit matrices, and training of one side only."""
    failures = []
    N, b = comm.size(), 40
    own = slice(comm.rank() * b, (comm.rank() + 1) * b)
    image, text = features(b * N, 24, torch.float64)
    ids = groups("few", b * N, N)
    for same_group in ("ignored", "positives"):
        true = grouped(image, text, 900.0, ids, same_group)
        for name, options in LOSSES[:2]:
            changed = options | {"same_group": same_group}
            got, *_ = evaluate(name, changed, image, text, 900.0, ids)
            wrong = errors(got, true, 900.0)
            if not max(wrong.values()) <= 1e-11:
                failures.append(f"{name} {same_group} s 900: {wrong}")
        true = grouped(image, text, 14.3, ids, same_group)
        changed = {"precision": "fp16", "same_group": same_group, "tile": (64, 48)}
        got, *_ = evaluate("disco_fused", changed, image.float(), text.float(), 14.3, ids)
        wrong = errors(got, true, 14.3)
        if not max(wrong.values()) <= 2**-7:
            failures.append(f"disco_fused {changed}: {wrong}")
        for trained in ("image", "text"):
            sides = {"image": image[own].clone(), "text": text[own].clone()}
            sides[trained].requires_grad_()
            loss = build_loss("inf_cl", same_group=same_group)
            s = torch.tensor([14.3], dtype=torch.float64)
            loss(Embeddings(**sides, scale=s, group_id=ids[own])).loss.backward()
            right = {"image": true.dI, "text": true.dT}[trained][own]
            if not torch.allclose(sides[trained].grad / N, right, atol=1e-12):
                failures.append(f"inf_cl {same_group} only {trained} is trained")
    return failures


def without_groups() -> list[str]:
    """Check that the bits do not change if no pairs share a group, or if pairs of a group are negatives."""
    failures = []
    B = 40 * comm.size()
    image, text = features(B, 24, torch.float32)
    for name, options in LOSSES:
        plain = evaluate(name, options, image, text, 14.3, None)
        assert "grouped_pairs" not in plain[2]
        for same_group, ids, share in (
            ("negatives", torch.zeros(B, dtype=torch.int64), 1.0),
            ("ignored", torch.arange(B), 0.0),
            ("positives", torch.arange(B).flip(0) - 7, 0.0),
        ):
            changed = options | {"same_group": same_group}
            got = evaluate(name, changed, image, text, 14.3, ids)
            same = all(map(torch.equal, (got[0].dI, got[0].dT), (plain[0].dI, plain[0].dT)))
            same &= (got[0].loss, got[0].ds, got[1]) == (plain[0].loss, plain[0].ds, plain[1])
            if not same or got[2] != plain[2] | {"grouped_pairs": torch.tensor(share)}:
                failures.append(f"{name} {same_group}: other bits than without groups")
    return failures


def other_cases() -> list[str]:
    return other_paths() + without_groups()


def test_other_paths_equal_the_oracle_and_no_groups_change_no_bit():
    for failures in run_ranks(other_cases, 2):
        assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("same_group", "accuracy"), [("negatives", 0.25), ("ignored", 0.5), ("positives", 0.75)]
)
@pytest.mark.parametrize("name", ["disco_fused", "inf_cl", "siglip"])
def test_accuracy_counts_any_positive_and_no_ignored_pair(name, same_group, accuracy):
    # Image 0 is nearest to text 2, and image 2 to text 0. Text 3 is nearer to image 2 than its own text is.
    image = torch.eye(4)
    text = torch.tensor([[0.8, 0, 0.6, 0.6], [0.0, 1, 0, 0], [0.9, 0.1, 0.4, 0], [0, 0, 0.5, 0.3]])
    group_id = torch.tensor([0, 1, 0, 3])
    bias = torch.zeros(1)
    loss = build_loss(name, same_group=same_group)
    metrics = loss(Embeddings(image, text, torch.ones(1), bias, group_id=group_id)).metrics
    x = image @ text.T
    same = group_id[:, None] == group_id
    own = torch.eye(4, dtype=torch.bool)
    for key, logits in (("i2t_accuracy", x), ("t2i_accuracy", x.T)):
        if same_group == "ignored":
            logits = logits.masked_fill(same & ~own, -1)
        right = same if same_group == "positives" else own
        expected = right[torch.arange(4), logits.argmax(1)].float().mean()
        assert metrics[key] == expected
    assert metrics["i2t_accuracy"] == accuracy
    assert metrics["grouped_pairs"] == 0.5


def test_mistakes_are_refused():
    rows, one = torch.eye(4), torch.ones(1)
    with pytest.raises(ValueError, match=r"same_group=.*'negatives', 'ignored' or 'positives'"):
        build_loss("inf_cl", same_group="neutral")
    for name in ("clip", "disco", "nt_xent", "fastclip_v3"):
        with pytest.raises(ValueError, match="has no option same_group"):
            build_loss(name, same_group="ignored")
    for name, _ in LOSSES:
        with pytest.raises(ValueError, match=r"same_group=ignored needs the groups.*group_id"):
            build_loss(name, same_group="ignored")(Embeddings(rows, rows, one, one))
    for group_id, message in (
        (torch.zeros(3, dtype=torch.int64), r"group_id must be \[b\] = \[4\] int64, got \(3,\)"),
        (torch.zeros(4), r"group_id must be .* int64, got .* torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            Embeddings(rows, rows, one, group_id=group_id)
    with pytest.raises(ValueError, match=r"index must be .* int64, got .* torch.float32"):
        Embeddings(rows, rows, one, index=torch.zeros(4))
