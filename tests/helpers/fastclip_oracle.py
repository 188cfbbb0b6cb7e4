"""FastCLIP's formulas (docs/losses.md section 6) in plain float64 on one process, with whole matrices."""

import math
from typing import Any

import torch
from torch import Tensor

from disco_ds.losses import build_loss
from disco_ds.losses.fastclip import FastCLIPLoss

NUM_SAMPLES = 70

PRESETS = ("sogclr", "fastclip_v0", "fastclip_v1", "isogclr", "fastclip_v2", "fastclip_v3")
PER_SAMPLE = ("isogclr", "fastclip_v2")
RHO = {"isogclr": 7.0, "fastclip_v2": 7.0, "fastclip_v3": 6.5}


def as_tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Sample:
    """FastCLIP's state of one side of one sample. It stores u (docs/losses.md, section 6); the package stores log u."""

    def __init__(self, tau: float):
        self.u: float | None = None
        self.tau, self.m, self.v, self.steps = tau, 0.0, 0.0, 0


class Oracle:
    """The loss and its state per sample, for whole global batches."""

    def __init__(
        self,
        name: str,
        num_samples: int,
        eps: float = 1e-14,
        tau: float = 0.03,
        gamma_epochs: int = 2,
    ):
        self.name, self.num_samples, self.eps, self.gamma_epochs = (
            name,
            num_samples,
            eps,
            gamma_epochs,
        )
        self.rho = RHO.get(name, 0.0)
        self.seen = 0
        self.samples = [[Sample(tau) for _ in range(num_samples)] for _ in range(2)]

    def gamma(self) -> float:
        epoch = self.seen // self.num_samples
        if self.name in ("sogclr", "isogclr"):
            return 1.0 if epoch == 0 else 0.2
        if epoch >= self.gamma_epochs:
            return 0.2
        return 0.5 * (1 + math.cos(math.pi * epoch / self.gamma_epochs)) * (1 - 0.2) + 0.2

    def step(
        self, image: Tensor, text: Tensor, ids: Tensor, tau: float
    ) -> tuple[float, Tensor, Tensor, float]:
        """Take a step. Return the loss, the gradients of the features [B, D], and the gradient of the common
        temperature.
        """
        I, T = (x.detach().double().requires_grad_() for x in (image, text))  # noqa: E741
        B, gamma, numbers = len(I), self.gamma(), ids.tolist()
        others = ~torch.eye(B, dtype=torch.bool)
        total = d_tau = 0.0
        surrogate = torch.zeros((), dtype=torch.float64)
        for side, x in enumerate((I @ T.T, T @ I.T)):
            held = [self.samples[side][number] for number in numbers]
            taus = as_tensor([sample.tau if self.name in PER_SAMPLE else tau for sample in held])
            h = (x - x.diagonal()[:, None])[others].view(B, B - 1)
            e = (h / taus[:, None]).exp()
            g = e.sum(1) / (B - 1)
            u = as_tensor(
                [
                    now if sample.u is None else (1 - gamma) * sample.u + gamma * now
                    for sample, now in zip(held, g.tolist(), strict=True)
                ]
            )
            weigh = torch.ones_like(taus) if self.name == "fastclip_v0" else taus
            surrogate = surrogate + (weigh * g / (self.eps + u)).sum() / (2 * B)
            log_u = (self.eps + u).log()
            total += (weigh * log_u + self.rho * taus).sum().item() / (2 * B)
            by_tau = (e * -h / taus[:, None] ** 2).sum(1).detach() / (B - 1) / (self.eps + u)
            gradient = by_tau if self.name == "fastclip_v0" else log_u + self.rho + taus * by_tau
            d_tau += gradient.sum().item() / (2 * B)
            for number in set(numbers):
                mine = ids == number
                self._update(
                    self.samples[side][number], u[mine].mean().item(), gradient[mine].mean().item()
                )
        self.seen += B
        d_image, d_text = torch.autograd.grad(surrogate, (I, T))
        return total, d_image, d_text, d_tau

    def _update(self, sample: Sample, u: float, gradient: float) -> None:
        sample.u = u
        if self.name not in PER_SAMPLE:
            return
        gradient = min(max(gradient, -5.0), 5.0)
        sample.steps += 1
        sample.m = 0.9 * sample.m + 0.1 * gradient
        sample.v = 0.999 * sample.v + 0.001 * gradient**2
        m, v = sample.m / (1 - 0.9**sample.steps), sample.v / (1 - 0.999**sample.steps)
        sample.tau = min(max(sample.tau - 0.0133 * m / (math.sqrt(v) + 1e-8), 0.01), 1.0)


def make_loss(name: str, num_samples: int = NUM_SAMPLES, **options: Any) -> FastCLIPLoss:
    """Build a FastCLIP loss with state for `num_samples` samples, and with tiles so small that some are partial."""
    loss = build_loss(name, **{"tile": (8, 16)} | options)
    assert isinstance(loss, FastCLIPLoss)
    loss.set_num_samples(num_samples, num_samples)
    return loss
