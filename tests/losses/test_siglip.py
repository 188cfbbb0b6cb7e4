"""Loss and gradients of the sigmoid loss equal those of a float64 reference in one process."""

import math

import pytest
import torch
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, build_loss
from helpers.dist import run_ranks
from helpers.oracle import features

LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5}


def oracle(
    image: torch.Tensor, text: torch.Tensor, scale: float, bias: float
) -> list[torch.Tensor]:
    """Return the loss and its gradients for image, text, scale and bias."""
    leaves = [
        x.detach().double().requires_grad_()
        for x in (image, text, torch.tensor([scale]), torch.tensor([bias]))
    ]
    I, T, s, beta = leaves  # noqa: E741
    y = 2 * torch.eye(len(I), dtype=torch.float64) - 1
    loss = F.softplus(-y * (s * I @ T.T + beta), threshold=1e9).sum() / len(I)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def test_opposed_pair_has_a_finite_loss() -> None:
    """At a logit of -1000 for a positive pair, the loss is softplus(1000) = 1000, not log(inf)."""
    image, scale = torch.eye(2, 4), torch.tensor([990.0])
    out = build_loss("siglip")(Embeddings(image, -image, scale, torch.tensor([-10.0])))
    assert out.loss.item() == pytest.approx(1000.0)


def cases() -> list[str]:
    failures = []
    N, n = comm.size(), comm.rank()
    for b, D, scale, bias, dtype in [
        (b, D, s, beta, dtype)
        for b, D in ((33, 192), (100, 64))
        for s, beta in ((10.0, -10.0), (118.0, -13.0), (1.0, 0.5), (0.0, 0.5))
        for dtype in LIMIT
    ]:
        for kind in ("random", "aligned", "repeated"):
            image, text = features(b * N, D, dtype, kind)
            own = slice(n * b, (n + 1) * b)
            true = oracle(image, text, scale, bias)
            for trains in ("both", "image", "text"):
                I, T = image[own].clone(), text[own].clone()  # noqa: E741
                I.requires_grad_(trains != "text")
                T.requires_grad_(trains != "image")
                s, beta = (
                    torch.tensor([x], dtype=dtype, requires_grad=True) for x in (scale, bias)
                )
                out = build_loss("siglip", tile=(64, 64))(Embeddings(I, T, s, beta))
                (2 * out.loss).backward()
                got = [out.metrics["loss"], *(x.grad for x in (I, T, s, beta))]
                # Average the gradients of scale and bias over ranks, as an engine would. The gradients of features are
                # N times those of the global mean.
                got[3:] = [comm.all_reduce_sum(x) / N for x in got[3:]]
                truth = [true[0], *(N * x[own] for x in true[1:3]), *true[3:]]
                for name, mine, right, factor in zip(
                    "LITsb", got, truth, (1, 2, 2, 2, 2), strict=True
                ):
                    if mine is None:
                        continue
                    error = (mine.double() / factor - right).norm() / max(
                        right.norm().item(), max(abs(scale), 1.0) / b
                    )
                    limit = 1e-6 if name == "L" else LIMIT[dtype]  # metrics are fp32
                    if not error <= limit:
                        failures.append(
                            f"{name} {(b, D)} s {scale} {bias} {dtype} {kind} {trains}: {error}"
                        )
    return failures


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_siglip_equals_the_oracle(size):
    for failures in run_ranks(cases, size):
        assert not failures, "\n".join(failures)


def test_siglip_at_large_logits_is_finite():
    image, text = features(8, 16, torch.float64)
    out = build_loss("siglip")(
        Embeddings(image, -text, torch.tensor([1e4]), torch.tensor([-10.0], dtype=torch.float64))
    )
    z = -1e4 * image @ text.T - 10
    y = 2 * torch.eye(8, dtype=torch.float64) - 1
    assert out.loss.item() == pytest.approx((-y * z).clamp(min=0).sum().item() / 8, rel=1e-6)


def test_siglip_needs_a_bias_and_starts_where_negatives_weigh_as_much_as_the_pair():
    loss = build_loss("siglip")
    assert loss.initial_scale == 10.0
    for B in (2, 128, 32_768, 1_000_000):
        # With random embeddings, every negative pair then contributes about 1 / B, and all together about 1.
        assert (B - 1) * math.exp(loss.initial_bias(B)) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="needs a bias"):
        loss(Embeddings(torch.eye(4), torch.eye(4), torch.ones(1)))


def test_siglip_counts_hits_of_both_directions():
    text = torch.eye(4)[[0, 1, 3, 2]]
    out = build_loss("siglip")(
        Embeddings(torch.eye(4), text, torch.tensor([10.0]), torch.tensor([-10.0]))
    )
    assert out.metrics["i2t_accuracy"] == out.metrics["t2i_accuracy"] == 0.5


def test_siglip_in_16_bits_is_as_good_as_its_inputs():
    image, text = features(64, 96, torch.float32)
    true = oracle(image, text, 30.0, -5.0)
    for half, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        rounded = oracle(image.to(dtype).float(), text.to(dtype).float(), 30.0, -5.0)
        leaf = image.clone().requires_grad_()
        bias = torch.tensor([-5.0])
        build_loss("siglip", precision=half)(
            Embeddings(leaf, text, torch.tensor([30.0]), bias)
        ).loss.backward()
        assert (leaf.grad - true[1]).norm() <= 2 * (rounded[1] - true[1]).norm()
