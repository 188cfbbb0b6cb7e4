"""The replacements for open_clip's losses give full-batch gradients in other training loops, and report mistakes.

If a mistake were not reported, a rank would hang, or treat its part of the batch as the whole batch.
"""

import doctest
import os

import open_clip.loss as open_clip_loss
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from disco_ds.losses.drop_in import ClipLoss, SigLipLoss
from helpers.dist import run_ranks

B, WIDTH, D = 16, 12, 8
DROP_INS = [
    (ClipLoss, False, {}),
    (ClipLoss, False, {"loss": "disco", "local_loss": True, "gather_with_grad": True}),
    (ClipLoss, False, {"loss": "inf_cl"}),
    (ClipLoss, False, {"loss": "clip", "check": False}),
    (ClipLoss, True, {}),
    (ClipLoss, True, {"local_loss": True, "gather_with_grad": True}),
    (SigLipLoss, True, {}),
    (SigLipLoss, True, {"dist_impl": "gather"}),
    (SigLipLoss, False, {}),
]
"""Class, whether the model has a logit bias, and options."""


class Towers(nn.Module):
    """A model with open_clip's interface: two linear towers, the learned scale, and optionally the bias."""

    def __init__(self, bias: bool, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.image, self.text = nn.Linear(WIDTH, D), nn.Linear(WIDTH, D)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = nn.Parameter(torch.tensor(-3.0)) if bias else None
        self.to(dtype)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor | None]:
        return {
            "image_features": F.normalize(self.image(image), dim=-1),
            "text_features": F.normalize(self.text(text), dim=-1),
            "logit_scale": self.logit_scale.exp(),
            "logit_bias": self.logit_bias,
        }


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(B, WIDTH, generator=generator), torch.randn(B, WIDTH, generator=generator)


def oracle(cls: type, bias: bool) -> tuple[float, dict[str, Tensor]]:
    """Compute open_clip's loss and its gradients for the whole batch in float64."""
    model = Towers(bias, torch.float64)
    image, text = (x.double() for x in batch())
    value = getattr(open_clip_loss, cls.__name__)()(**model(image, text))
    value.backward()
    return value.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def join_torch() -> tuple[int, int]:
    """Create a process group with torch.distributed only, as other loops do. Return (rank, number of ranks)."""
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def train_all(through_ddp: bool) -> None:
    n, N = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = slice(n * B // N, (n + 1) * B // N)
    image, text = (x[rows] for x in batch())
    for cls, bias, options in DROP_INS:
        model = Towers(bias)
        wrapped = DistributedDataParallel(model) if through_ddp else model
        loss = cls(rank=n, world_size=N, **options)
        for _ in range(2):  # the second call checks only shapes
            model.zero_grad()
            value = loss(**wrapped(image, text), output_dict=True)["contrastive_loss"]
            value.backward()
        expected, grads = oracle(cls, bias)
        mean = value.detach().clone()
        torch.distributed.all_reduce(mean)
        assert value.shape == ()
        assert mean.item() / N == pytest.approx(expected, rel=1e-5), (cls, options)
        # Without local_loss, the value of open_clip's ClipLoss is the global mean on every rank.
        if cls is ClipLoss and not options.get("local_loss"):
            assert value.item() == mean.item() / N, (cls, options)
            assert value.item() == pytest.approx(expected, rel=1e-5), (cls, options)
        for name, parameter in model.named_parameters():
            if not through_ddp:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= N
            torch.testing.assert_close(
                parameter.grad, grads[name].float(), rtol=2e-5, atol=2e-6, msg=f"{cls} {name}"
            )


def in_a_loop_of_torch() -> list[str]:
    """Train with and without DDP on any number of ranks. On two, return the messages for wrong use."""
    _, N = join_torch()
    train_all(through_ddp=False)
    said = []
    if N == 2:
        train_all(through_ddp=True)
        said = mistakes()
    torch.distributed.destroy_process_group()
    return said


@pytest.mark.parametrize("size", [1, 2])
def test_gradient_is_of_the_full_batch_and_wrong_use_is_refused(size: int) -> None:
    for n, said in enumerate(run_ranks(in_a_loop_of_torch, size, joined=False)):
        shapes = (f"rank {n} has images [{16 - n}, 8]", f"rank {n} has images [16, {8 - n}]")
        expected = ("world_size", *shapes, "(15, 8)") if size == 2 else ()
        for text, words in zip(said, expected, strict=True):
            assert words in text


def test_pairs_of_the_same_group_are_ignored() -> None:
    model = Towers(True, torch.float64)
    image, text = (x.double() for x in batch())
    image[8:], text[8:] = image[:8], text[:8]
    group_id = torch.arange(B) % 8
    for cls in (ClipLoss, SigLipLoss):
        whole = cls(same_group="ignored")(**model(image, text), group_id=group_id)
        with pytest.raises(ValueError, match="same_group=ignored needs the groups"):
            cls(same_group="ignored")(**model(image, text))
        logits = model(image, text)["image_features"] @ model(image, text)["text_features"].T
        logits = logits * model.logit_scale.exp() + (cls is SigLipLoss) * model.logit_bias
        own = torch.eye(B, dtype=torch.bool)
        left_out = (group_id[:, None] == group_id) & ~own
        if cls is ClipLoss:
            logits = logits.masked_fill(left_out, -torch.inf)
            labels = torch.arange(B)
            expected = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        else:
            terms = F.softplus(torch.where(own, -logits, logits))
            expected = terms.masked_fill(left_out, 0).sum() / B
        torch.testing.assert_close(whole, expected)
        got, true = (
            torch.autograd.grad(x, model.image.weight, retain_graph=True) for x in (whole, expected)
        )
        torch.testing.assert_close(got, true)


def in_half_the_ranks() -> None:
    """Check two groups of a mesh that each have a separate batch, as in hybrid data-parallel runs."""
    from torch.distributed.device_mesh import init_device_mesh

    n, _ = join_torch()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))
    model, (image, text) = Towers(False), batch()
    rows = slice(n % 2 * B // 2, (n % 2 + 1) * B // 2)
    group = mesh.get_group("data")
    if n >= 2:  # the second group gets a different batch
        image = image.flip(1)
    value = ClipLoss(group=group)(**model(image[rows], text[rows]))
    value.backward()
    torch.distributed.all_reduce(model.image.weight.grad, group=group)
    whole = Towers(False, torch.float64)
    open_clip_loss.ClipLoss()(**whole(image.double(), text.double())).backward()
    expected = whole.image.weight.grad.float()
    torch.testing.assert_close(model.image.weight.grad / 2, expected, rtol=2e-5, atol=2e-6)
    torch.distributed.destroy_process_group()


def test_group_of_a_mesh_is_a_batch_of_its_own() -> None:
    run_ranks(in_half_the_ranks, 4, joined=False)


def test_one_process_needs_no_group() -> None:
    for cls, bias, _ in DROP_INS:
        value = cls()(**Towers(bias)(*batch()))
        assert value.item() == pytest.approx(oracle(cls, bias)[0], rel=1e-5)


def mistakes() -> list[str]:
    n = torch.distributed.get_rank()
    model, (image, text) = Towers(False), batch()
    said: list[str] = []

    def refuse(
        loss: ClipLoss,
        *,
        image: Tensor = image,
        text: Tensor = text,
        scale: Tensor = model.logit_scale,
    ) -> None:
        with pytest.raises(ValueError) as caught:
            loss(F.normalize(image[:, :D], dim=-1), F.normalize(text[:, :D], dim=-1), scale)
        said.append(str(caught.value))

    # With open_clip's defaults, each rank would compute the loss of its own rows.
    refuse(ClipLoss(rank=0, world_size=1))
    refuse(ClipLoss(), image=image[: B - n], text=text[: B - n])
    refuse(ClipLoss(), image=image[:, : D - n], text=text[:, : D - n])
    refuse(ClipLoss(), image=image[: B - 1])
    return said


def test_features_that_are_not_unit_rows_are_warned_of_once() -> None:
    model, (image, text) = Towers(False), batch()
    features = model(image, text) | {"text_features": 3 * model(image, text)["text_features"]}
    loss = ClipLoss()
    with pytest.warns(UserWarning, match=r"text features are not normalized.* 2\.00 away"):
        loss(**features)
    loss(**features)  # warnings are errors in tests


def test_scale_that_is_still_a_logarithm_is_warned_of() -> None:
    model, (image, text) = Towers(False), batch()
    with pytest.warns(
        UserWarning,
        match=r"the logit scale is 2\.00, which looks like a logarithm; pass .*exp\(\)",
    ):
        ClipLoss()(**model(image, text) | {"logit_scale": model.logit_scale})


def test_scale_and_bias_may_be_numbers() -> None:
    image, text = (F.normalize(torch.randn(4, 8), dim=1) for _ in range(2))
    for loss in (ClipLoss(), SigLipLoss()):
        expected = loss(image, text, torch.tensor(14.3), torch.tensor(-3.0))
        assert loss(image, text, 14.3, -3.0) == expected
        with pytest.raises(ValueError, match="have no rows"):
            loss(image[:0], text[:0], torch.tensor(14.3))


def test_unknown_option_is_named() -> None:
    with pytest.raises(ValueError, match="has no option locl_loss"):
        ClipLoss(locl_loss=True)
    with pytest.raises(ValueError, match="Horovod"):
        ClipLoss(use_horovod=True)


def test_signatures_are_those_of_open_clip() -> None:
    """Arguments that open_clip's loss accepts, by position or by name, are accepted."""
    import inspect

    for ours, theirs in (
        (ClipLoss, open_clip_loss.ClipLoss),
        (SigLipLoss, open_clip_loss.SigLipLoss),
    ):
        for method in ("__init__", "forward"):
            wanted = list(inspect.signature(getattr(theirs, method)).parameters)
            assert (
                list(inspect.signature(getattr(ours, method)).parameters)[: len(wanted)] == wanted
            )
    assert "RANK" not in os.environ


def test_example_of_the_docstring_holds() -> None:
    (found,) = doctest.DocTestFinder(recurse=False).find(
        ClipLoss, globs={"ClipLoss": ClipLoss, "torch": torch}
    )
    assert doctest.DocTestRunner().run(found) == (0, 3)


@pytest.mark.slow
def test_compiled_loss_has_the_same_gradient() -> None:
    gradients = []
    for loss in (ClipLoss(), torch.compile(ClipLoss())):
        image = F.normalize(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), dim=1)
        image.requires_grad_()
        loss(image, image.detach().flip(0), torch.tensor(10.0)).backward()
        gradients.append(image.grad)
    assert torch.allclose(*gradients, rtol=1e-5)  # type: ignore[arg-type]
