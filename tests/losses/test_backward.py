"""Losses that compute their gradient in forward: gradients of 16-bit inputs, and calls of backward that are refused."""

import pytest
import torch
from torch import Tensor

from disco_ds.losses import Embeddings, build_loss
from helpers.oracle import features

LOSSES = ["disco_fused", "inf_cl", "siglip", "nt_xent"]


def gradients(
    name: str,
    rows: list[Tensor],
    dtype: torch.dtype,
    scalars: torch.dtype,
    factor: float = 1.0,
    scale: float = 0.001,
) -> list[Tensor]:
    """Return the gradients of image, text, scale and, for siglip, bias.

    Args:
        name: Name of the loss.
        rows: Image and text.
        dtype: Type of the rows in the loss.
        scalars: Type of scale and bias in the loss.
        factor: Loss scale: the loss is multiplied by it, and the gradients are divided by it in float64.
        scale: The logit scale.
    """
    values = torch.tensor([scale]), torch.tensor([-10.0])
    leaves = [
        x.detach().to(kind).requires_grad_()
        for x, kind in zip((*rows, *values), (dtype, dtype, scalars, scalars), strict=True)
    ]
    (build_loss(name)(Embeddings(*leaves)).loss * factor).backward()
    return [x.grad.double() / factor for x in leaves if x.grad is not None]


def error(got: Tensor, true: Tensor) -> float:
    return ((got - true).norm() / true.norm()).item()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_scale_saves_small_fp16_gradients(name):
    """The gradients would lose digits if they were rounded to fp16 before the loss scale is applied."""
    rows = [x.half() for x in features(512, 16, torch.float32)]
    true = gradients(name, rows, torch.float64, torch.float64)
    alone, scaled = (
        gradients(name, rows, torch.float16, torch.float32, factor) for factor in (1.0, 2.0**16)
    )
    assert error(alone[0], true[0]) > 1e-2
    assert error(scaled[0], true[0]) < 1e-3


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("scalars", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 5e-3)])
def test_a_scale_of_16_bits_loses_nothing(name, scalars, limit):
    """With 1,000 pairs, scale / batch has no exact 16-bit value. Divided by underflow_scale, it would be 0 in fp16."""
    rows = features(1000, 16, torch.float32)
    true = gradients(name, rows, torch.float64, torch.float64, scale=8.0)
    found = gradients(name, rows, torch.float32, scalars, scale=8.0)
    assert len(found) == len(true)
    for got, right in zip(found[:2], true[:2], strict=True):
        assert error(got, right) < 1e-5
    for got, right in zip(found[2:], true[2:], strict=True):
        assert error(got, right) < limit


@pytest.mark.parametrize("side", [0, 1])
def test_one_view_alone_may_need_a_gradient(side):
    rows = features(40, 16, torch.float64)
    both = gradients("nt_xent", rows, torch.float64, torch.float64, scale=5.0)
    leaves = [x.detach() for x in rows]
    leaves[side].requires_grad_()
    build_loss("nt_xent")(Embeddings(*leaves, torch.tensor([5.0]).double())).loss.backward()
    assert leaves[side].grad is not None
    assert error(leaves[side].grad, both[side]) < 1e-12


@pytest.mark.parametrize("name", LOSSES)
def test_other_backwards_are_refused(name):
    image, text = (x.requires_grad_() for x in features(8, 16, torch.float32))
    embeddings = Embeddings(image, text, torch.tensor([14.3]), torch.tensor([-10.0]))
    loss = build_loss(name)(embeddings).loss
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss, image, create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()
