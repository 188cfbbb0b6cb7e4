"""examples/reference_loss.py and examples/two_captions.py, compared with their formulas in float64."""

from functools import partial
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, Teacher
from disco_ds.models.fast.replace import replace_parts
from disco_ds.training.custom_loop import contrastive_step
from examples.reference_loss import ReferenceLoss
from examples.two_captions import CaptionsLoss, encode
from helpers.dist import run_ranks

B = 12
GAMMA, EPS, RHO, TAU = 0.4, 1e-14, 6.5, 0.07


def unit(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def leaves(step: int) -> list[Tensor]:
    image = unit(B, 5, seed=step)
    text = F.normalize(image + unit(B, 5, seed=100 + step), dim=-1)
    scale = torch.tensor([1 / TAU], dtype=torch.float64)
    return [x.clone().requires_grad_() for x in (image, text, scale)]


def reference(scale: float) -> Teacher:
    image = unit(B, 7, seed=50)
    text = F.normalize(1.5 * image + unit(B, 7, seed=51), dim=-1)
    return Teacher(image, text, torch.tensor([scale], dtype=torch.float64))


def shifted_logits(image: Tensor, text: Tensor, scale: Any, teacher: Teacher, other: Any) -> Tensor:
    """[2, B, B]: the logits of image anchors and of text anchors; 0 for the pairs."""
    x = scale * image @ text.T - other * teacher.image @ teacher.text.T
    return torch.stack([x - x.diag()[:, None], x.T - x.diag()[:, None]])


def objective(
    name: str, z: Tensor, scale: Tensor, u: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return a function with the gradient of the loss `name`, and FastCLIP's state after the step."""
    if not name.startswith("fastclip"):
        return z.logsumexp(2).mean(), None
    g = (z.exp() * ~torch.eye(B, dtype=torch.bool)).sum(2) / (B - 1)
    u = g.detach() if u is None else (1 - GAMMA) * u + GAMMA * g.detach()
    tau = 1 / scale
    if name == "fastclip_v0":
        return (g / (EPS + u)).mean(), u
    loss = (tau.detach() * g / (EPS + u)).mean()
    if name == "fastclip_v3":
        loss = loss + (tau * (torch.log(EPS + u) + RHO)).mean()
    return loss, u


def check_reference(name: str, own_scale: bool) -> float:
    """Three steps on this process's ranks against the whole batch; return the largest relative error."""
    teacher = reference(30.0)
    options = {"gamma": "constant", "gamma_min": GAMMA, "tau": TAU}
    loss = ReferenceLoss(name, own_scale=own_scale, **(options if "fast" in name else {}))
    loss.set_num_samples(B, 10 * B)
    rows = slice(B * comm.rank() // comm.size(), B * (comm.rank() + 1) // comm.size())
    part = Teacher(teacher.image[rows], teacher.text[rows], teacher.scale)
    worst, u = 0.0, None
    for step in range(3):
        inputs = leaves(step)
        z = shifted_logits(*inputs, teacher, teacher.scale if own_scale else inputs[2])
        whole, u = objective(name, z, inputs[2], u)
        # fastclip_v1's temperature is constant.
        count = 2 if name == "fastclip_v1" else 3
        true = torch.autograd.grad(whole, inputs[:count])
        image, text, scale = (x.detach().clone() for x in inputs)
        mine = [x.requires_grad_() for x in (image[rows], text[rows], scale)]
        out = loss(Embeddings(*mine, index=torch.arange(B)[rows], teacher=[part]))
        got = list(torch.autograd.grad(out.loss, mine[:count]))
        loss.commit()
        if u is None:
            assert out.metrics["loss"].item() == pytest.approx(whole.item(), rel=1e-6)
        expected = [comm.size() * true[0][rows], comm.size() * true[1][rows], *true[2:]]
        got[2:] = [comm.all_reduce_sum(x) / comm.size() for x in got[2:]]
        errors = [(a - b).norm() / b.norm() for a, b in zip(got, expected, strict=True)]
        worst = max(worst, *(error.item() for error in errors))
    return worst


NAMES = ("clip", "disco", "disco_fused", "inf_cl", "fastclip_v0", "fastclip_v1", "fastclip_v3")


def check_all_references() -> dict[str, float]:
    cases = [(name, False) for name in NAMES] + [("disco_fused", True), ("inf_cl", True)]
    return {f"{name} {own_scale}": check_reference(name, own_scale) for name, own_scale in cases}


@pytest.mark.parametrize("size", [1, 2])
def test_reference_loss_is_the_loss_of_shifted_logits(size: int) -> None:
    for errors in run_ranks(check_all_references, size):
        assert max(errors.values()) < 1e-12, errors


MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1},
}


def test_two_captions_are_the_mean_of_two_losses() -> None:
    torch.manual_seed(0)
    model = open_clip.CLIP(**MODEL, nonscalar_logit_scale=True).double()
    generator = torch.Generator().manual_seed(1)
    batch = {
        "image": torch.randn(B, 3, 16, 16, generator=generator).double(),
        "text": torch.randint(1, 63, (B, 2, 8), generator=generator),
    }
    parts = [model(batch["image"], batch["text"][:, k])[:3] for k in range(2)]
    labels = torch.arange(B)
    logits = [scale * image @ text.T for image, text, scale in parts]
    whole = sum((F.cross_entropy(x, labels) + F.cross_entropy(x.T, labels)) / 4 for x in logits)
    assert isinstance(whole, Tensor)
    true = torch.autograd.grad(whole, list(model.parameters()))
    model.two_views = False
    replace_parts(model)
    out = contrastive_step(model, CaptionsLoss(2), batch, partial(encode, model), micro_batches=3)
    assert out.metrics["loss"].item() == pytest.approx(whole.item(), rel=1e-6)
    for (name, parameter), gradient in zip(model.named_parameters(), true, strict=True):
        # contrastive_step passes the scale to the loss in fp32.
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-8, msg=name)
