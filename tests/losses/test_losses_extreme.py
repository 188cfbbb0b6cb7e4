"""Losses that compute tiles: results at extreme logits, and memory that must not grow with the square of the batch."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, blocks, build_loss
from disco_ds.plan.towers import Allocations
from helpers.all_losses import TILED, evaluate
from helpers.dist import run_ranks
from helpers.oracle import errors, features, grouped, infonce, naive
from tools.bench.loss import Peak

LIMIT = {torch.float64: 1e-12, torch.float32: 5e-5}


def extremes(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return sets of 48 pairs of unit rows whose logits overflow, underflow or tie at a scale of 100."""
    image, text = features(48, 24, torch.float64)
    opposed = (
        image * -0.9
        + torch.nn.functional.normalize(text - (text * image).sum(1, keepdim=True) * image)
        * 0.19**0.5
    )
    one_bad = text.clone()
    one_bad[5] = opposed[5]  # smallest positive cosine -0.9
    outlier = image.clone()
    outlier[7] = -image.mean(0) / image.mean(0).norm()
    equal = image[:1].expand(48, 24).contiguous()
    cases = {
        "every pair opposed": (image, opposed),
        "one pair opposed": (image, one_bad),
        "all rows equal": (equal, equal),
        "all images equal": (equal, text),
        "one outlier": (outlier, text),
        "one image opposed to all": (torch.cat([equal[:-1], -equal[:1]]), equal),
        "exact copies": (image, image),
        "copies opposed": (image, -image),
    }
    return {name: (i.to(dtype), t.to(dtype)) for name, (i, t) in cases.items()}


def extreme_cases() -> list[str]:
    failures = []
    for dtype, limit in LIMIT.items():
        for label, (image, text) in extremes(dtype).items():
            true = infonce(image, text, 100.0)
            for name, options in TILED:
                wrong = errors(
                    evaluate(name, options | {"tile": (16, 16)}, image, text, 100.0), true, 100.0
                )
                if not max(wrong.values()) <= limit:
                    failures.append(f"{name} {label} {dtype}: {wrong}")
    return failures


def unusual_scales() -> list[str]:
    failures = []
    group_id = torch.arange(48) // 3
    for dtype, limit in LIMIT.items():
        image, text = features(48, 24, dtype)
        for scale in (0.0, -1e-20, -0.01, -14.3, -300.0):
            true = naive(image.double(), text.double(), scale)
            for name, options in TILED:
                wrong = errors(
                    evaluate(name, options, image, text, scale), true, max(abs(scale), 1.0)
                )
                if not max(wrong.values()) <= limit:
                    failures.append(f"{name} {options} scale {scale} {dtype}: {wrong}")
    own = slice(comm.rank() * 48 // comm.size(), (comm.rank() + 1) * 48 // comm.size())
    image, text = features(48, 24, torch.float64)
    for same_group in ("positives", "ignored"):
        groups = grouped(image, text, -14.3, group_id, same_group)
        for name, options in TILED:
            I, T = (x[own].clone().requires_grad_() for x in (image, text))  # noqa: E741
            loss = build_loss(name, same_group=same_group, **options)
            s = torch.tensor([-14.3], dtype=torch.float64)
            loss(Embeddings(I, T, s, group_id=group_id[own])).loss.backward()
            for found, right in ((I.grad, groups.dI), (T.grad, groups.dT)):
                error = (found / comm.size() - right[own]).norm() / right.norm()
                if not error <= 1e-9:
                    failures.append(f"{name} {same_group}: {error}")
    return failures


@pytest.mark.parametrize("opposed", [False, True])
@pytest.mark.parametrize(("name", "options"), TILED)
def test_a_single_pair_has_no_loss_and_no_gradient(name, options, opposed):
    """There are no negatives, so the logs of the sums over negatives are -inf.

    If image and text are opposed, the losses must also use a separate maximum for each sum.
    """
    image, text = features(1, 8, torch.float32)
    image, text = (x.clone().requires_grad_() for x in (image, -image if opposed else text))
    scale = torch.tensor([100.0], requires_grad=True)
    out = build_loss(name, **options)(Embeddings(image, text, scale))
    out.loss.backward()
    assert out.loss == 0
    for leaf in (image, text, scale):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def wrong_ways(case: str, is_slow: bool) -> list[str]:
    """Check whether each loss sums without a common shift on every rank, and that loss and gradient are finite."""
    image, text = extremes(torch.float32)[case]
    own = slice(24 * comm.rank(), 24 * (comm.rank() + 1))
    failures = []
    for name, options in TILED:
        leaf = image[own].clone().requires_grad_()
        with mock.patch.object(blocks, "softmax_sums", wraps=blocks.softmax_sums) as sums:
            out = build_loss(name, **options)(Embeddings(leaf, text[own], torch.tensor([100.0])))
        out.loss.backward()
        without = any(call.args[0].shift is None for call in sums.call_args_list)
        finite = bool(out.loss.isfinite() and leaf.grad.isfinite().all())
        if (without, finite) != (is_slow, True):
            failures.append(f"{name} {options} {case}: slow {without}, finite {finite}")
    return failures


def hidden_nans() -> list[str]:
    """Check that a NaN on rank 1 reaches the loss of every rank, and that no rank hangs."""
    image, text = features(16, 24, torch.float32)
    if comm.rank() == 1:
        image[3, 3] = float("nan")
    losses = {
        f"{name} {options}": build_loss(name, **options)(
            Embeddings(image, text, torch.tensor([14.3]))
        )
        for name, options in TILED
    }
    return [f"{name}: no NaN" for name, out in losses.items() if not out.metrics["loss"].isnan()]


def check_extremes() -> list[str]:
    failures = unusual_scales()
    if comm.size() > 1:
        failures += extreme_cases()
    if comm.size() == 2:
        # Only rank 1 has the row that needs the slower sums. Rank 0 must use them too, so that collectives match.
        failures += wrong_ways("one image opposed to all", is_slow=True)
        failures += wrong_ways("one pair opposed", is_slow=False)
        failures += hidden_nans()
    return failures


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_extreme_logits_and_any_finite_scale_give_the_right_loss_and_gradient(size):
    for failures in run_ranks(check_extremes, size):
        assert not failures, "\n".join(failures)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def memory(b: int, D: int, names: tuple[str, ...]) -> dict[str, tuple[int, int, int]]:
    """Measure the memory of losses on this rank.

    Returns:
        Name of a loss -> number of elements of its largest tensor, peak bytes of its tensors, and peak bytes of the
        process. Features and their gradients are subtracted from the bytes.
    """
    result = {}
    generator = torch.Generator().manual_seed(comm.rank())
    index = torch.arange(b * comm.rank(), b * (comm.rank() + 1))
    for name in names:
        image, text = (
            torch.nn.functional.normalize(
                torch.randn(b, D, generator=generator), dim=1
            ).requires_grad_()
            for _ in "ab"
        )
        scale = torch.tensor([14.3], requires_grad=True)
        loss = build_loss(name)
        loss.set_num_samples(b * comm.size(), b * comm.size())
        with Largest() as largest, Allocations([image, text, scale, index]) as tensors:
            loss(Embeddings(image, text, scale, index=index)).loss.backward()
        image.grad = text.grad = None
        with Peak() as peak:
            loss(Embeddings(image, text, scale, index=index)).loss.backward()
        result[name] = (largest.elements, *(x - 2 * b * D * 4 for x in (tensors.peak, peak.bytes)))
    return result


def check_memory(
    B: int, size: int, D: int, names: tuple[str, ...] = ("disco_fused", "inf_cl")
) -> None:
    """Check the memory of losses against bounds for tensors, and for the process, whose allocator may take more.

    For example, disco_fused at B 65,536 and D 256 on two ranks has 195 MiB of tensors: gathered texts (64), their
    gradient (64), a copy of it in which gloo's reduce_scatter sums (64; NCCL makes none), and vectors (3). The process
    takes 158 to 224 MiB more than before. That depends on how much freed memory malloc had kept.
    """
    b = B // size
    tile = 2048 * 2048 * 4
    vectors = 16 * B * 8
    # The process also has several tiles of scratch, buffers of libraries, and pages that its allocator keeps.
    slack = 48 * 2**20
    bounds = {
        name: (4 * b * D * 4, tile) if name == "inf_cl" else (2 * B * D * 4, max(tile, B * D * 4))
        for name in names
    }
    for result in run_ranks(memory, size, b, D, names, timeout_s=1700):
        for name, (elements, tensors, process) in result.items():
            features, scratch = bounds[name]
            assert elements <= max(B * D, tile // 4), f"{name} made a tensor of {elements} elements"
            assert elements < b * B, f"{name} made a matrix of similarities"
            for kind, found, more in (("tensors", tensors, vectors), ("process", process, slack)):
                limit = features + scratch + more
                assert found <= limit, (
                    f"{name}, {kind}: {found / 2**20:.0f} MiB over {limit / 2**20:.0f}"
                )


def test_memory_is_bounded_by_features_not_by_the_matrix():
    check_memory(4096, 2, 1024)


@pytest.mark.slow
def test_memory_of_fastclip_is_bounded_by_features():
    check_memory(8192, 2, 256, ("fastclip_v3", "fastclip_v2"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_stays_bounded_at_larger_batches():
    check_memory(16384, 2, 256)
