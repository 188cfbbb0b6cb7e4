"""Errors of every loss on all ranks and on any device, compared with float64 references in one process."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, Teacher, build_loss
from helpers.fastclip_oracle import PRESETS, Oracle
from helpers.oracle import features
from helpers.towers import write_down

WIDTH_OF_ROWS = 40
TILES = {"tile": (16, 24)}
"""Tiles that divide neither the rows of a rank nor those of all ranks."""
LIMIT = {"fp32": 1e-5, "bf16": 2**-5}
GROUPED = ("disco_fused", "inf_cl", "siglip")
TAUGHT = ("clip", "disco", *GROUPED)


def loss_cases() -> list[tuple[str, dict[str, Any], bool]]:
    """Return (name, options, whether there is a teacher)."""
    cases: list[tuple[str, dict[str, Any], bool]] = [("clip", {}, False), ("disco", {}, False)]
    for name, precision in itertools.product((*GROUPED, "nt_xent"), LIMIT):
        cases.append((name, TILES | {"precision": precision}, False))
    cases += [("nt_xent", TILES | {"precision": p, "ring": True}, False) for p in LIMIT]
    for name, same_group in itertools.product(GROUPED, ("ignored", "positives")):
        cases.append((name, TILES | {"precision": "fp32", "same_group": same_group}, False))
    cases += [(name, {"teacher_weight": 0.3}, True) for name in TAUGHT]
    return cases


def oracle(
    name: str, leaves: list[Tensor], ids: Tensor, options: dict[str, Any], teacher: Teacher | None
) -> list[Tensor]:
    """Compute a loss and its gradients for image, text, scale and bias in float64, with whole matrices."""
    image, text, scale, bias = leaves = [x.detach().double().requires_grad_() for x in leaves]
    same = ids[:, None] == ids
    same_group = options.get("same_group", "negatives")
    loss = write_down(name, image, text, scale, bias, same, same_group)
    if teacher:
        z = scale * image @ text.T
        y = (teacher.scale * teacher.image @ teacher.text.T).double()
        if name == "siglip":
            assert teacher.bias is not None
            target = (y + teacher.bias).sigmoid()
            taught = F.binary_cross_entropy_with_logits(z + bias, target, reduction="sum") / len(z)
        else:
            one_way = F.cross_entropy(z, y.softmax(1))
            taught = (one_way + F.cross_entropy(z.T, y.T.softmax(1))) / 2
        loss = 0.7 * loss + 0.3 * taught
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [loss.detach(), *(torch.zeros(1) if x is None else x for x in grads)]


def on_all_ranks(
    loss: Any, leaves: list[Tensor], teacher: Teacher | None = None, **ids: Tensor
) -> list[Tensor]:
    """Compute a loss on this rank's rows, and average over ranks as an engine would. Collective.

    Args:
        loss: The loss.
        leaves: Image and text of all ranks [B, D], scale, and bias if there is one.
        teacher: A teacher's features of all ranks.
        ids: `index` or `group_id` of all ranks, [B].

    Returns:
        The loss and its gradient for each leaf, for the whole batch, on the CPU.
    """
    device, ranks, b = comm.local_device(), comm.size(), len(leaves[0]) // comm.size()

    def own(x: Tensor) -> Tensor:
        part = x[comm.rank() * b : (comm.rank() + 1) * b] if len(x) > 1 else x
        return part.detach().to(device, copy=True)

    mine: list[Any] = [own(x).requires_grad_() for x in leaves]
    teachers = []
    if teacher:
        assert teacher.bias is not None
        sides = own(teacher.image), own(teacher.text)
        teachers = [Teacher(*sides, own(teacher.scale), own(teacher.bias))]
    given: Any = {"teacher": teachers} | {key: own(x) for key, x in ids.items()}
    out = loss.to(device)(Embeddings(*mine, **given))
    out.loss.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in mine]
    sums = [comm.all_reduce_sum(x.double()) for x in (out.loss, *grads[2:])]
    rows = [comm.gather(x.double()) for x in grads[:2]]
    return [x.cpu() / ranks for x in (sums[0].detach(), *rows, *sums[1:])]


def compare(got: list[Tensor], true: list[Tensor]) -> float:
    """Return the largest relative error of the loss and of its gradients."""
    pairs = zip(got, true, strict=True)
    return max(((x - y).norm() / y.norm().clamp(min=0.3)).item() for x, y in pairs)


def loss_errors() -> dict[str, tuple[float, float]]:
    """Return for each case its error and the allowed error."""
    found, B = {}, 25 * comm.size()
    ids = torch.arange(B) % 7
    scalars = [torch.tensor([x]) for x in (14.3, -5.0)]
    image, text = features(B, WIDTH_OF_ROWS, torch.float32)
    wide = features(B, 24, torch.float32, "aligned", seed=9)
    teacher = Teacher(*wide, torch.tensor([20.0]), torch.tensor([-3.0]))
    for (name, options, taught), dtype in itertools.product(
        loss_cases(), (torch.float32, torch.bfloat16)
    ):
        if dtype == torch.bfloat16 and options.get("precision") == "fp32":
            continue  # without the option, the losses multiply bf16 features in fp32
        leaves = [image.to(dtype), text.to(dtype), *scalars]
        given = teacher if taught else None
        true = oracle(name, leaves, ids, options, given)
        got = on_all_ranks(build_loss(name, **options), leaves, given, group_id=ids)
        half = dtype == torch.bfloat16 or options.get("precision") == "bf16"
        found[f"{name} {options} {dtype}"] = compare(got, true), LIMIT["bf16" if half else "fp32"]
    for name, precision in itertools.product(PRESETS, LIMIT):
        gamma: dict[str, Any] = {"gamma_min": 0.2, "gamma_epochs": 2}  # those of the reference
        loss: Any = build_loss(name, precision=precision, **gamma, **TILES)
        loss.set_num_samples(B, B)
        reference = Oracle(name, B)
        for step in range(2):
            image, text = features(B, WIDTH_OF_ROWS, torch.float32, seed=step)
            index = torch.randperm(B, generator=torch.Generator().manual_seed(step))
            got = on_all_ranks(loss, [image, text, scalars[0]], index=index)
            loss.commit()
            value, *true, _ = reference.step(image, text, index, 1 / 14.3)
            wrong = compare(got[:3], [torch.tensor(value).double(), *true])
            found[f"{name} {precision} step {step}"] = wrong, LIMIT[precision]
    return found
