"""Float64 references for contrastive losses on one process, and errors relative to them (docs/losses.md section 2)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Answer:
    """The mean loss over the global batch and its gradients.

    dI and dT are the gradients of the image and text features, [batch, width]. ds is that of the logit scale.
    """

    loss: float
    dI: Tensor  # noqa: N815
    dT: Tensor  # noqa: N815
    ds: float


def answer(loss: float, image: Tensor, text: Tensor, scale: Tensor) -> Answer:
    """Return the loss and the gradients of the leaves after a backward pass."""
    dI, dT, ds = (leaf.grad for leaf in (image, text, scale))
    assert dI is not None
    assert dT is not None
    assert ds is not None
    return Answer(loss, dI, dT, ds.item())


def infonce(image: Tensor, text: Tensor, scale: float) -> Answer:
    """InfoNCE as log1p(sum of negatives / positive), which is exact near convergence, unlike cross_entropy."""
    I, T = (x.detach().double().requires_grad_() for x in (image, text))  # noqa: E741
    s = torch.tensor([scale], dtype=torch.float64, requires_grad=True)
    loss = (_one_way(I, T, s) + _one_way(T, I, s)) / 2
    loss.backward()
    return answer(loss.item(), I, T, s)


def naive(image: Tensor, text: Tensor, scale: float) -> Answer:
    """InfoNCE with cross_entropy, in the precision of the inputs."""
    I, T = (x.detach().clone().requires_grad_() for x in (image, text))  # noqa: E741
    s = torch.tensor([scale], dtype=image.dtype, requires_grad=True)
    logits = s * I @ T.T
    labels = torch.arange(len(I))
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    loss.backward()
    return answer(loss.item(), I, T, s)


def _one_way(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    x = s * (a @ b.T)
    off = ~torch.eye(len(x), dtype=torch.bool)
    over_positive = (x - x.diagonal()[:, None])[off].view(len(x), -1)
    return torch.log1p(over_positive.exp().sum(1)).mean()


def grouped(image: Tensor, text: Tensor, scale: float, group_id: Tensor, same_group: str) -> Answer:
    """InfoNCE in which pairs of the same group are ignored, or are all positives, as `same_group` says."""
    I, T = (x.detach().double().requires_grad_() for x in (image, text))  # noqa: E741
    s = torch.tensor([scale], dtype=torch.float64, requires_grad=True)
    same = group_id[:, None] == group_id
    loss = _one_way_grouped(I, T, s, same, same_group) + _one_way_grouped(T, I, s, same, same_group)
    loss = loss / 2
    loss.backward()
    return answer(loss.item(), I, T, s)


def _one_way_grouped(a: Tensor, b: Tensor, s: Tensor, same: Tensor, same_group: str) -> Tensor:
    x = s * (a @ b.T)
    over_own = x - x.diagonal()[:, None]
    own = torch.eye(len(x), dtype=torch.bool)
    left_out = own | same if same_group == "ignored" else own
    loss = torch.log1p(over_own.exp().masked_fill(left_out, 0).sum(1))
    if same_group == "positives":
        loss = loss - (over_own * same).sum(1) / same.sum(1)
    return loss.mean()


def grouped_sigmoid(
    image: Tensor, text: Tensor, scale: float, bias: float, group_id: Tensor, same_group: str
) -> tuple[Answer, float]:
    """The sigmoid loss in which pairs of the same group are ignored, or are all positives.

    Returns:
        The loss and its gradients, and the gradient of the bias.
    """
    I, T = (x.detach().double().requires_grad_() for x in (image, text))  # noqa: E741
    s, beta = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (scale, bias))
    same = group_id[:, None] == group_id
    own = torch.eye(len(I), dtype=torch.bool)
    y = torch.where(same if same_group == "positives" else own, 1.0, -1.0)
    terms = F.softplus(-y * (s * I @ T.T + beta), threshold=1e9)
    if same_group == "ignored":
        terms = terms.masked_fill(same & ~own, 0)
    loss = terms.sum() / len(I)
    loss.backward()
    assert beta.grad is not None
    return answer(loss.item(), I, T, s), beta.grad.item()


def errors(got: Answer, true: Answer, scale: float) -> dict[str, float]:
    """Return the relative error of the loss and of each gradient.

    The error of dI and dT is the largest norm of a row of the difference, divided by the largest norm of a row of the
    true gradient. The divisor is at least scale / batch. The errors of the loss and of ds are relative to the true
    value. There, the divisor is at least 1.
    """
    floor = scale / len(true.dI)

    def rows(mine: Tensor, truth: Tensor) -> float:
        return (
            (mine.double() - truth).norm(dim=1).max() / max(truth.norm(dim=1).max().item(), floor)
        ).item()

    return {
        "loss": abs(got.loss - true.loss) / max(abs(true.loss), 1),
        "dI": rows(got.dI, true.dI),
        "dT": rows(got.dT, true.dT),
        "ds": abs(got.ds - true.ds) / max(abs(true.ds), 1),
    }


def features(
    B: int, D: int, dtype: torch.dtype, kind: str = "random", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return image and text rows [B, D] of unit norm.

    Args:
        B: Number of pairs.
        D: Width.
        dtype: Type of the result.
        kind: "random": image and text of a pair are a little similar; "aligned": nearly equal; "repeated": as random,
            but every third text equals the first one.
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    image, other = (torch.randn(B, D, generator=generator, dtype=torch.float64) for _ in range(2))
    noise = {"random": 2.0, "aligned": 0.05, "repeated": 2.0}[kind]
    text = image + noise * other
    if kind == "repeated":
        text[1::3] = text[0]
    return F.normalize(image, dim=1).to(dtype), F.normalize(text, dim=1).to(dtype)
