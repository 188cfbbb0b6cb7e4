"""Losses with teachers: value, gradients and metrics equal a float64 reference at any number of ranks."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds import ClipLoss, contrastive_step
from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, LossOutput, Teacher, build_loss
from disco_ds.losses.kernels.tiles import Tiling
from helpers.all_losses import TILE
from helpers.dist import run_ranks

LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("clip", {}),
    ("disco", {}),
    ("disco_fused", TILE),
    ("inf_cl", TILE),
    ("siglip", TILE),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
PARTS = ("pair_loss", "teacher_loss", "teacher_kl")


def unit_rows(B: int, D: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(B, D, generator=generator, dtype=torch.float64)
    return F.normalize(rows, dim=1).to(dtype)


def make_teachers(B: int, widths: tuple[int, ...], dtype: torch.dtype) -> list[Teacher]:
    """Make teachers whose image and text features are similar, as those of a trained model."""
    found = []
    for k, D in enumerate(widths):
        image = unit_rows(B, D, 10 + k, torch.float64)
        text = F.normalize(image + 0.8 * unit_rows(B, D, 20 + k, torch.float64), dim=1)
        scale, bias = (torch.tensor([x], dtype=dtype) for x in (20.0 + 7 * k, -3.0 - k))
        found.append(Teacher(image.to(dtype), text.to(dtype), scale, bias))
    return found


def oracle(
    name: str, image: Tensor, text: Tensor, scale: float, teachers: list[Teacher], weight: float
) -> dict[str, Any]:
    """Compute the loss, its gradients and its metrics by their formulas, on the whole batch in one process."""
    I, T = (x.double().clone().requires_grad_() for x in (image, text))  # noqa: E741
    s, bias = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (scale, -5.0))
    x = s * I @ T.T
    logits = [t.scale.double() * t.image.double() @ t.text.double().T for t in teachers]
    own = torch.eye(len(x), dtype=torch.float64)
    if name == "siglip":
        z = x + bias
        probabilities = [
            (y + t.bias.double()).sigmoid()
            for y, t in zip(logits, teachers, strict=True)
            if t.bias is not None
        ]
        target = sum(probabilities) / len(teachers)

        def cross(labels: Any) -> Tensor:
            return F.binary_cross_entropy_with_logits(z, labels, reduction="sum") / len(z)

        pairs, taught = cross(own), cross(target)
        entropy = sum(F.binary_cross_entropy(p, p, reduction="sum") for p in probabilities)
        kl = taught - entropy / len(teachers) / len(z)
    else:
        targets = [[y.softmax(1) for y in logits], [y.T.softmax(1) for y in logits]]
        sides = [x.log_softmax(1), x.T.log_softmax(1)]
        pairs = -sum(side.diagonal().mean() for side in sides) / 2
        taught = (
            -sum(
                (sum(p) / len(p) * side).sum(1).mean()
                for p, side in zip(targets, sides, strict=True)
            )
            / 2
        )
        entropy = -sum(torch.special.xlogy(q, q).sum(1).mean() for p in targets for q in p)
        kl = taught - entropy / (2 * len(teachers))
    loss = (1 - weight) * pairs + weight * taught
    loss.backward()
    values = {"loss": loss, "pair_loss": pairs, "teacher_loss": taught, "teacher_kl": kl}
    found: dict[str, Any] = {key: value.item() for key, value in values.items()}
    return found | {"dI": I.grad, "dT": T.grad, "ds": s.grad, "dbias": bias.grad}


def evaluate(
    name: str,
    options: dict[str, Any],
    image: Tensor,
    text: Tensor,
    scale: float,
    teachers: list[Teacher],
    locked: str = "",
) -> dict[str, Any]:
    """Compute the loss on this rank's rows, and average over ranks as an engine would. Collective."""
    N, n = comm.size(), comm.rank()
    mine = slice(n * len(image) // N, (n + 1) * len(image) // N)
    leaves = {"image": image[mine].clone(), "text": text[mine].clone()}
    I, T = (x.requires_grad_(side != locked) for side, x in leaves.items())  # noqa: E741
    s, bias = (torch.tensor([x], dtype=image.dtype, requires_grad=True) for x in (scale, -5.0))
    parts = [Teacher(t.image[mine], t.text[mine], t.scale, t.bias) for t in teachers]
    out: LossOutput = build_loss(name, **options)(Embeddings(I, T, s, bias, teacher=parts))
    out.loss.backward()
    found: dict[str, Any] = {key: value.item() for key, value in out.metrics.items()}
    for key, leaf in (("dI", I), ("dT", T)):
        found[key] = None if leaf.grad is None else comm.gather(leaf.grad) / N
    for key, leaf in (("ds", s), ("dbias", bias)):
        found[key] = None if leaf.grad is None else comm.all_reduce_sum(leaf.grad) / N
    exact = comm.all_reduce_sum(out.loss.detach().double()).item() / N
    return found | {"loss": exact}


def compare(got: dict[str, Any], true: dict[str, Any], limit: float) -> list[str]:
    wrong = []
    for key, value in true.items():
        mine = got.get(key)
        if isinstance(value, float):
            allowed = limit if key == "loss" else max(limit, 3e-6)  # metrics are fp32
            if not abs(mine - value) <= allowed * max(abs(value), 1):
                wrong.append(f"{key}: {mine} instead of {value}")
        elif mine is not None and not (mine.double() - value).norm() <= limit * value.norm():
            wrong.append(f"{key}: error {(mine.double() - value).norm() / value.norm():.1e}")
    return wrong


def all_cases(B: int) -> list[str]:
    failures = odd_cases()
    for dtype, widths, (name, options) in product(TOLERANCE, [(48,), (48, 24)], LOSSES):
        image, text = (unit_rows(B, 32, seed, dtype) for seed in (1, 2))
        teachers = make_teachers(B, widths, dtype)
        for scale, weight in ((14.3, 0.3), (14.3, 1.0), (100.0, 0.3)):
            true = oracle(name, image, text, scale, teachers, weight)
            got = evaluate(name, options | {"teacher_weight": weight}, image, text, scale, teachers)
            for line in compare(got, true, TOLERANCE[dtype]):
                failures.append(f"{name} {dtype} {widths} scale {scale} weight {weight}: {line}")
    return failures


def odd_cases() -> list[str]:
    """Check very large and negative logit scales, locked towers, and small tiles. Return the failures."""
    failures = []
    image, text = (unit_rows(64, 32, seed, torch.float64) for seed in (1, 2))
    for name, scale, teacher_scale, locked, tile in [
        ("disco_fused", 900.0, 20.0, "", 64),
        ("disco_fused", -8.0, 20.0, "", 17),
        ("inf_cl", 14.3, 900.0, "", 17),
        ("inf_cl", 14.3, -5.0, "", 64),
        ("disco_fused", 14.3, 20.0, "image", 5),
        ("inf_cl", 14.3, 20.0, "text", 5),
        ("siglip", 14.3, 20.0, "image", 5),
        ("siglip", 14.3, -20.0, "", 17),
    ]:
        (teacher,) = make_teachers(64, (16,), torch.float64)
        teacher = Teacher(
            teacher.image, teacher.text, torch.tensor([teacher_scale]).double(), teacher.bias
        )
        true = oracle(name, image, text, scale, [teacher], 0.6)
        options = {"teacher_weight": 0.6, "tile": (tile, tile)}
        got = evaluate(name, options, image, text, scale, [teacher], locked)
        failures += [
            f"{name} {scale} {teacher_scale} {locked}: {x}" for x in compare(got, true, 1e-11)
        ]
    return failures


@pytest.mark.parametrize(
    ("size", "B"), [(1, 96), (2, 192), pytest.param(4, 240, marks=pytest.mark.slow)]
)
def test_loss_gradients_and_metrics_equal_the_oracle(size: int, B: int) -> None:
    for failures in run_ranks(all_cases, size, B):
        assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ["disco_fused", "inf_cl", "siglip"])
def test_tiles_are_those_of_the_student(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, tile sizes depend on the width. They must be chosen for the student's width, not the teacher's."""
    monkeypatch.setattr(
        Tiling, "size", lambda self, n, m, D, *others: (min(n, 1280 // D), min(m, 40))
    )
    image, text = (unit_rows(96, 32, seed, torch.float64) for seed in (1, 2))
    teachers = make_teachers(96, (48, 16), torch.float64)
    true = oracle(name, image, text, 14.3, teachers, 0.4)
    got = evaluate(name, {"teacher_weight": 0.4}, image, text, 14.3, teachers)
    assert not compare(got, true, 1e-12)


def differing_teachers() -> None:
    """Pass no teacher, one, a wider one, or swapped ones on rank 1 only."""
    rows = unit_rows(8, 16, comm.rank(), torch.float32)
    teachers = make_teachers(8, (16, 24), torch.float32)
    wide = make_teachers(8, (16, 32), torch.float32)
    for others in ([], teachers[:1], wide, teachers[::-1]):
        mine = others if comm.rank() else teachers
        with pytest.raises(ValueError, match="teachers or group_id differ between ranks") as caught:
            ClipLoss(teacher_weight=0.5)(rows, rows, torch.tensor(14.3), teacher=mine)
        assert f"rank {comm.rank()} has images [8, 16]" in str(caught.value)


def test_teachers_that_differ_between_ranks_are_refused_on_all_of_them() -> None:
    run_ranks(differing_teachers, 2)


@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_teacher_of_weight_0_changes_no_bit(name: str, options: dict[str, Any]) -> None:
    image, text = (unit_rows(64, 32, seed, torch.float32) for seed in (1, 2))
    plain = evaluate(name, options, image, text, 14.3, [])
    taught = evaluate(
        name,
        options | {"teacher_weight": 0.0},
        image,
        text,
        14.3,
        make_teachers(64, (16,), torch.float32),
    )
    assert plain.keys() == taught.keys()
    for key, value in plain.items():
        if value is not None:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(taught[key])), key


def test_sum_of_open_clips_two_terms_is_twice_the_loss_at_one_half() -> None:
    from open_clip.loss import DistillClipLoss

    image, text = (unit_rows(64, 32, seed, torch.float32) for seed in (1, 2))
    (teacher,) = make_teachers(64, (16,), torch.float32)
    scale = torch.tensor(14.3)
    theirs = DistillClipLoss()(image, text, scale, teacher.image, teacher.text, teacher.scale)
    mine = evaluate("disco_fused", {"teacher_weight": 0.5}, image, text, 14.3, [teacher])
    assert 2 * mine["loss"] == pytest.approx(float(sum(theirs)), rel=1e-6)
    assert mine["teacher_agreement"] == pytest.approx(
        (image @ text.T)
        .argmax(1)
        .eq((teacher.image @ teacher.text.T).argmax(1))
        .float()
        .mean()
        .item()
    )


@pytest.mark.parametrize("num", [1, 3])
def test_custom_loop_and_drop_in_learn_from_the_same_teacher(num: int) -> None:
    image, text = (unit_rows(48, 32, seed, torch.float64) for seed in (1, 2))
    teachers = make_teachers(48, (16,), torch.float64)
    model = torch.nn.Linear(32, 24, bias=False).double()

    def encode(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        features = (F.normalize(model(side), dim=1) for side in batch)
        return (*features, torch.full((1,), 14.3, dtype=torch.float64))

    gradients = []
    for step in ("custom loop", "drop-in"):
        model.zero_grad()
        if step == "custom loop":
            loss = build_loss("inf_cl", teacher_weight=0.7)
            contrastive_step(
                model, loss, (image, text), encode, micro_batches=num, teacher=teachers
            )
        else:
            I, T, scale = encode((image, text))  # noqa: E741
            ClipLoss(teacher_weight=0.7)(I, T, scale, teacher=teachers).backward()
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.clone())
    I, T, scale = encode((image, text))  # noqa: E741
    true = oracle("inf_cl", I.detach(), T.detach(), 14.3, teachers, 0.7)
    expected = torch.autograd.grad([I, T], model.weight, [true["dI"], true["dT"]])[0]
    for gradient in gradients:
        assert (gradient - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("name", "options", "has_teacher", "words"),
    [
        ("disco_fused", {"teacher_weight": 0.5}, False, "Embeddings have no teacher"),
        ("disco_fused", {}, True, "set the option teacher_weight"),
        ("nt_xent", {}, True, "NTXentLoss does not use it"),
        ("fastclip_v1", {}, True, "does not use it"),
    ],
)
def test_teacher_and_loss_that_do_not_fit_are_refused(
    name: str, options: dict[str, Any], has_teacher: bool, words: str
) -> None:
    rows = unit_rows(8, 16, 1, torch.float32)
    teachers = make_teachers(8, (16,), torch.float32) if has_teacher else []
    index = torch.arange(8)
    with pytest.raises(ValueError, match=words):
        build_loss(name, **options)(
            Embeddings(rows, rows, torch.ones(1), index=index, teacher=teachers)
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"teacher_weight": 1.5}, "teacher_weight=1.5: .*less than or equal to 1"),
        ({"teacher_weight": 0.5, "same_group": "positives"}, "same_group=positives does not work"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_loss("disco_fused", **options)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"bias": torch.tensor(-10.0)}, r"bias must have shape \[1\], got \[\]"),
        ({"text": torch.ones(4, 8, dtype=torch.float64)}, r"float32 and \(4, 8\) torch.float64"),
        ({"image": torch.ones(4, 8).int(), "text": torch.ones(4, 8).int()}, "floating dtype"),
        ({"scale": torch.tensor(10.0)}, r"scale must have shape \[1\], got \[\]"),
    ],
)
def test_malformed_teachers_are_refused(changed: dict[str, Tensor], words: str) -> None:
    rows = torch.ones(4, 8)
    with pytest.raises(ValueError, match=words):
        Teacher(**({"image": rows, "text": rows, "scale": torch.ones(1)} | changed))
