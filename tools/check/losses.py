"""Compare the registered losses and their gradients with float64 results.

Each loss is called as a trainer calls it. kernels.py runs these checks.
"""

# B batch, D width, s logit scale

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.losses import Embeddings, build_loss
from tools.bench import slices
from tools.bench.slices import Record
from tools.check.tiles import Check, device, keep

LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "disco_fused": ("disco_fused", {}),
    "disco_fused, comm_dtype bf16": ("disco_fused", {"comm_dtype": "bf16"}),
    "disco_fused, without accuracies": ("disco_fused", {"accuracy": False}),
    "inf_cl": ("inf_cl", {}),
    "siglip": ("siglip", {}),
    "siglip, without accuracies": ("siglip", {"accuracy": False}),
    "nt_xent": ("nt_xent", {}),
    "nt_xent, ring": ("nt_xent", {"ring": True}),
    "fastclip_v3": ("fastclip_v3", {}),
    "fastclip_v2": ("fastclip_v2", {}),
    "isogclr": ("isogclr", {}),
}
TRUE = {"disco_fused": "clip", "inf_cl": "clip"}
"""Name of a loss -> name of a plain loss with the same exact value, whose float64 result is the reference.

A loss that is not listed here is compared with its own float64 result.
"""
KEEPS_STATE = ("fastclip_v2", "fastclip_v3", "isogclr")
OWN_TAU = ("fastclip_v2", "isogclr")
CASES = (
    ("typical", 14.3),
    ("typical", 100.0),
    ("random", 100.0),
    ("aligned", 100.0),
    ("outlier", 100.0),
)
LIMITS = {"fp32": 1e-4, "tf32": 2e-2, "fp16": 2e-2, "bf16": 1e-1}
"""Precision -> limit of Triton's error, even if torch's error is larger.

A limit is several times the rounding error on a CPU. It reveals mistakes that Triton and torch share.
"""
SCALARS = ("loss", "d scale", "d bias")


def check(precision: str, batch: int, D: int, record: Record) -> None:
    """Check every loss in every case.

    Three things are checked: the errors of the loss and its gradients; that two runs give the same bits; and that the
    loss uses one shift for all rows if and only if one shift suffices. A shift is subtracted from logits before exp.
    """
    limit = LIMITS.get(precision, LIMITS["fp16"] if device() == "cuda" else LIMITS["fp32"])
    for kind, s in CASES:
        leaves = make_leaves(kind, s, batch, D)
        double = [x.double() for x in leaves]
        truths: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {}
        for label, (name, options) in LOSSES.items():
            where = f"{label}, {kind} pairs, s {s:.0f}"
            with slices.case(record, case=where):
                if name not in truths:
                    truths[name] = reference(name, double, s)
                true, state = truths[name]
                settings = options | {"precision": precision}
                mine, again, theirs = (
                    answer(name, leaves, s, state, **settings, impl=impl)
                    for impl in ("triton", "triton", "torch")
                )
                record(case=where, what="the same bits twice", ok=same(mine, again))
                if "shift" in mine:
                    expected = kind != "outlier" and name not in OWN_TAU
                    record(
                        case=where,
                        what="one shift for all rows, or not",
                        ok=bool(mine["shift"]) == expected,
                    )
                loose = LIMITS["bf16"] if "comm_dtype" in options else limit
                for key, value in true.items():
                    found = [distance(key, x[key], value, s / batch) for x in (mine, theirs)]
                    # Triton's error is compared with torch's. In a single number, torch's rounding errors may cancel by
                    # chance, so count its error as at least loose / 200.
                    found[1] = max(found[1], loose / 200)
                    keep(record, where, Check(key, *found), loose)


def check_reference(batch: int, D: int, record: Record) -> None:
    """Compare the float64 results on this device with the float64 results on the CPU.

    The package's tests compare the CPU's results with formulas.
    """
    for kind, s in CASES:
        leaves = [x.double() for x in make_leaves(kind, s, min(batch, 500), D)]
        for name in dict.fromkeys(name for name, _ in LOSSES.values()):
            with slices.case(record, case=f"{name}, {kind} pairs, s {s:.0f}"):
                here, state = reference(name, leaves, s)
                there = answer(TRUE.get(name, name), [x.cpu() for x in leaves], s, state)
                for key, value in there.items():
                    if key != "shift":
                        wrong = distance(key, here[key].cpu(), value, s / len(leaves[0]))
                        keep(
                            record,
                            f"{name}, {kind} pairs, s {s:.0f}",
                            Check(key, wrong, 0.0),
                            1e-10,
                        )


def make_leaves(kind: str, s: float, batch: int, D: int) -> list[Tensor]:
    """Return the inputs of a loss: image and text [B, D], which are unit rows, and scale and bias [1].

    If `kind` is "outlier", one image is far from all texts, including its own. If the same shift is subtracted from all
    logits before exp, either the sum of this image or the sums of the other images then leave the range of fp32.
    """
    generator = torch.Generator().manual_seed(1)
    image, noise = (torch.randn(batch, D, generator=generator) for _ in "ab")
    text = {"random": noise, "aligned": image + noise / 20}.get(kind, image + 2 * noise)
    if kind == "outlier":
        center = torch.randn(D, generator=generator)
        image, text = (center + x / 4 for x in (image, text / 2))
        image[batch // 2] = -center
    rows = [F.normalize(x, dim=1) for x in (image, text)]
    return [x.to(device()) for x in (*rows, torch.tensor([s]), torch.tensor([-10.0]))]


def reference(
    name: str, leaves: list[Tensor], s: float
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Compute the true results of a loss.

    Returns:
        The true results by name, and the state from which they were computed: for a loss that keeps state, its state
        after one step; for other losses, {}.
    """
    state: dict[str, Any] = {}
    if name in KEEPS_STATE:
        loss = build(name, s, len(leaves[0]))
        run(loss, leaves)
        loss.commit()
        state = loss.state_dict()
    true = answer(TRUE.get(name, name), leaves, s, state, impl=None)
    true.pop("shift", None)
    return true, state


def build(name: str, s: float, batch: int, accuracy: bool = True, **options: Any) -> Any:
    if name in OWN_TAU:
        options["tau"] = 1 / s
    loss = build_loss(name, **options)
    loss.set_num_samples(batch, 4 * batch)
    loss.accuracy = accuracy
    return loss


def answer(
    name: str,
    leaves: list[Tensor],
    s: float,
    state: dict[str, Any],
    impl: str | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Compute a loss and its gradients.

    Args:
        name: Name of the loss.
        leaves: Its inputs, as make_leaves returns them.
        s: The logit scale, from which losses with a temperature per sample compute their initial temperature.
        state: State to load into the loss; {} for none.
        impl: Implementation. None: the loss chooses it.
        options: Options of the loss, and `accuracy`.

    Returns:
        The loss and the gradients by name. For softmax losses that compute tiles, also `shift`: whether the same shift
        was subtracted from all logits before exp.
    """
    if impl is not None:
        options["impl"] = impl
    loss = build(name, s, len(leaves[0]), **options)
    if state:
        loss.load_state_parts([state])
    return run(loss, leaves)


def run(loss: Any, values: list[Tensor]) -> dict[str, Tensor]:
    leaves = [x.clone().requires_grad_() for x in values]
    image, text, scale, bias = leaves
    index = torch.arange(len(image), device=image.device)
    out = loss(Embeddings(image, text, scale, bias, index)).loss
    found = {"loss": out.detach()}
    # The autograd functions of tiled softmax losses store their shift. It is None if a separate maximum was subtracted
    # in each sum.
    if hasattr(out.grad_fn, "shift"):
        found["shift"] = torch.tensor(out.grad_fn.shift is not None)
    out.backward()
    names = ("d image", "d text", "d scale", "d bias")
    return found | {
        name: x.grad for name, x in zip(names, leaves, strict=True) if x.grad is not None
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


def distance(key: str, got: Tensor, true: Tensor, floor: float) -> float:
    """Return a relative error; NaN if any value is NaN.

    For gradients of features, it is the largest norm of a row of `got` - `true`, divided by the largest norm of a row
    of `true`. The divisor is at least `floor`. For scalars, it is the difference divided by the true value. The divisor
    is at least 1.
    """
    difference = got.double() - true
    if key in SCALARS:
        return (difference.abs() / true.abs().clamp(min=1)).max().item()
    return (difference.norm(dim=1).max() / true.norm(dim=1).max().clamp(min=floor)).item()
