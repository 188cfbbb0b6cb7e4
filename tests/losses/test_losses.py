"""Loss and gradients of every InfoNCE loss equal those of a float64 reference, at any number of ranks."""

import os
import time
from typing import Any

import pytest
import torch

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, build_loss, list_losses, register_loss
from disco_ds.losses.base import Loss
from helpers.all_losses import LOSSES, TILED, accuracy_of_copies, evaluate
from helpers.dist import run_ranks
from helpers.fastclip_oracle import PRESETS
from helpers.oracle import Answer, errors, features, infonce, naive

SHAPES = [(33, 192), (100, 640), (256, 512)]
SCALES = [1.0, 14.3, 100.0]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def all_cases(shapes: list[tuple[int, int]]) -> list[str]:
    """Compare all losses with the float64 reference. Return descriptions of the failures. Collective."""
    failures = []
    for (b, D), scale, dtype in [
        (shape, s, t) for shape in shapes for s in SCALES for t in TOLERANCE
    ]:
        for kind in ("random", "repeated", "aligned"):
            image, text = features(b * comm.size(), D, dtype, kind)
            true = infonce(image, text, scale)
            converged = kind == "aligned" and scale == 100
            limit = max(
                2 * max(errors(naive(image, text, scale), true, scale).values()), TOLERANCE[dtype]
            )
            for name, options in LOSSES:
                allowed = limit if converged and (name, options) not in TILED else TOLERANCE[dtype]
                for upstream in (1.0, -3.7) if kind == "random" else (1.0,):
                    got = evaluate(name, options, image, text, scale, upstream)
                    wrong = errors(got, true, scale)
                    if not max(wrong.values()) <= allowed:
                        failures.append(
                            f"{name} {options} {(b, D)} s {scale} {dtype} {kind} x{upstream}: {wrong}"
                        )
                    # Near convergence, cancellation makes the naive gradient lose digits. The tiled losses keep them.
                    if (
                        converged
                        and (name, options) in TILED
                        and not (purely := relative(got, true)) <= 5e-5
                    ):
                        failures.append(
                            f"{name} {options} {(b, D)} {dtype} aligned, purely relative: {purely}"
                        )
    return failures


def relative(got: Answer, true: Answer) -> float:
    """Return the largest norm of a row of the difference, divided by that of the true gradient, even if it is tiny."""
    return max(
        ((mine.double() - truth).norm(dim=1).max() / truth.norm(dim=1).max()).item()
        for mine, truth in ((got.dI, true.dI), (got.dT, true.dT))
    )


@pytest.mark.parametrize(("size", "shapes"), [(1, SHAPES[:1]), (2, SHAPES[:2])])
def test_loss_and_gradients_equal_the_oracle(size, shapes):
    for failures in run_ranks(all_cases, size, shapes):
        assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_loss_and_gradients_equal_the_oracle_at_every_shape(size):
    for failures in run_ranks(all_cases, size, SHAPES):
        assert not failures, "\n".join(failures)


def half_products() -> list[str]:
    """Check losses in 16-bit precision, with and without a 16-bit comm_dtype.

    The allowed error is twice that of the naive loss on rounded features.
    """
    failures = []
    for kind, scale in [(kind, s) for kind in ("random", "repeated", "aligned") for s in SCALES]:
        image, text = features(50 * comm.size(), 96, torch.float32, kind)
        true = infonce(image, text, scale)
        for half, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            rounded = naive(image.to(dtype).float(), text.to(dtype).float(), scale)
            limit = 2 * max(errors(rounded, true, scale).values()) + 1e-6
            for name, options in TILED:
                for changes in ({"precision": half}, {"precision": half, "comm_dtype": half}):
                    wrong = errors(
                        evaluate(name, options | changes, image, text, scale), true, scale
                    )
                    if not max(wrong.values()) <= limit:
                        failures.append(
                            f"{name} {changes} s {scale} {kind}: {wrong}, limit {limit}"
                        )
    return failures


def layouts() -> list[str]:
    """Check transposed storage, strided rows, an expanded row, and losses of which only one side is trained."""
    failures = []
    N, n = comm.size(), comm.rank()
    b, D, scale = 12, 40, 14.3
    image, text = features(b * N, D, torch.float64)
    text = text.clone()
    text[n * b : (n + 1) * b] = text[n * b]
    text = comm.gather(text[n * b : (n + 1) * b])
    true = infonce(image, text, scale)
    own = slice(n * b, (n + 1) * b)
    variants = {
        "transposed": (image[own].T.contiguous().T, text[own]),
        "strided": (image[own].repeat_interleave(2, 0)[::2], text[own]),
        "expanded": (image[own], text[n * b].expand(b, D)),
    }
    for name, options in LOSSES:
        for label, (mine, other) in variants.items():
            leaves = [x.detach().requires_grad_() for x in (mine, other)]
            s = torch.tensor([scale], dtype=torch.float64, requires_grad=True)
            build_loss(name, **options)(Embeddings(leaves[0] * 1, leaves[1] * 1, s)).loss.backward()
            for leaf, truth in zip(leaves, (true.dI, true.dT), strict=True):
                if not torch.allclose(leaf.grad / N, truth[own], atol=1e-14, rtol=1e-10):
                    failures.append(f"{name} {options} {label}")
        for trains in ("image", "text"):
            parts = {"image": image[own].clone(), "text": text[own].clone()}
            parts[trains].requires_grad_()
            build_loss(name, **options)(
                Embeddings(**parts, scale=torch.tensor([scale]))
            ).loss.backward()
            truth = {"image": true.dI, "text": true.dT}[trains]
            # The scale is in fp32, whose 14.3 differs from the reference's by a relative 2e-8.
            if not torch.allclose(parts[trains].grad / N, truth[own], atol=1e-8):
                failures.append(f"{name} {options} only {trains} trains")
    return failures


def primitives() -> None:
    """Check gather and reduce_scatter_in_place: values, gradients (sums over ranks), and a group of some ranks.

    Backward must not modify the gradient that it gets.
    """
    from deepspeed import comm as dist

    N, n = comm.size(), comm.rank()
    x = torch.arange(6.0).view(2, 3).add(10 * n).requires_grad_()
    rows = comm.gather(x)
    assert rows.shape == (2 * N, 3)
    assert torch.equal(rows[2 * n : 2 * n + 2], x)
    weight = torch.ones_like(rows) * (n + 1)
    before = weight.clone()
    (grad,) = torch.autograd.grad(rows, x, weight)
    assert torch.equal(grad, torch.full_like(x, sum(range(1, N + 1))))
    assert torch.equal(weight, before)
    y = torch.arange(2.0 * N).view(2 * N, 1)
    assert torch.equal(comm.reduce_scatter_in_place(y.clone()), N * y[2 * n : 2 * n + 2])
    pair = dist.new_group([0, 1])
    if n < 2:
        assert torch.equal(comm.gather(torch.tensor([[n]]), group=pair), torch.tensor([[0], [1]]))
        image, text = features(8, 16, torch.float64)
        own = slice(4 * n, 4 * n + 4)
        for name, options in LOSSES:
            leaf = image[own].clone().requires_grad_()
            s = torch.tensor([5.0], dtype=torch.float64)
            build_loss(name, group=pair, **options)(Embeddings(leaf, text[own], s)).loss.backward()
            assert torch.allclose(leaf.grad / 2, infonce(image, text, 5.0).dI[own], atol=1e-14)
    with pytest.raises(ValueError, match=r"checking \(rank 1\): not here"):
        fail_on_rank_1()


def fail_on_rank_1() -> None:
    with comm.all_or_none("checking"):
        if comm.rank() == 1:
            raise ValueError("not here")


def test_collectives_sum_in_backward_and_take_a_group():
    run_ranks(primitives, 3)


def raise_on_rank_1() -> None:
    if comm.rank() == 1:
        raise LookupError("only here")
    comm.gather(torch.ones(1, 1))


def test_rank_that_raises_leaves_at_once_and_is_heard():
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 failed(.|\n)*only here"):
        run_ranks(raise_on_rank_1, 2)
    assert time.monotonic() - start < 60  # the group's timeout is 120 s


def test_loss_without_a_process_group_is_the_same():
    image, text = features(20, 30, torch.float64)
    for name, options in LOSSES:
        wrong = errors(evaluate(name, options, image, text, 14.3), infonce(image, text, 14.3), 14.3)
        assert max(wrong.values()) < 1e-12


def test_accuracy_counts_both_directions():
    image = torch.eye(4)
    text = torch.eye(4)[[0, 1, 3, 2]]
    for name, options in LOSSES:
        metrics = build_loss(name, **options)(Embeddings(image, text, torch.tensor([10.0]))).metrics
        assert metrics["i2t_accuracy"].item() == metrics["t2i_accuracy"].item() == 0.5


def accuracies_of_copies() -> list[str]:
    cases: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in list_losses()]
    cases += [(name, {"precision": half}) for name, _ in TILED for half in ("fp16", "bf16")]
    cases += [(name, options) for name, options in TILED] + [("nt_xent", {"ring": True})]
    wrong = [(name, options) for name, options in cases if accuracy_of_copies(name, **options)]
    return [f"{name} {options}: a copy does not count as wrong" for name, options in wrong]


def other_cases() -> list[str]:
    return half_products() + layouts() + accuracies_of_copies()


def test_16_bit_products_layouts_and_ties_are_right():
    for failures in run_ranks(other_cases, 2):
        assert not failures, "\n".join(failures)


def test_every_registered_loss_is_in_the_contract_test():
    elsewhere = {"siglip", "nt_xent", *PRESETS}  # tested in other files
    assert set(list_losses()) == {name for name, _ in LOSSES} | elsewhere


def part_of_batch() -> Embeddings:
    """Return this rank's four rows."""
    image, text = features(4 * int(os.environ["WORLD_SIZE"]), 16, torch.float32, "random")
    own = slice(4 * int(os.environ["RANK"]), 4 * int(os.environ["RANK"]) + 4)
    index = torch.arange(own.start, own.stop)
    return Embeddings(image[own], text[own], torch.tensor([10.0]), bias=torch.zeros(1), index=index)


def value(name: str) -> float:
    loss = build_loss(name)
    loss.set_num_samples(8, 800)
    return loss(part_of_batch()).metrics["loss"].item()


def all_values() -> dict[str, float]:
    return {name: value(name) for name in list_losses()}


def under_plain_torch_distributed() -> dict[str, float]:
    torch.distributed.init_process_group("gloo")
    first = comm.gather(torch.tensor([float(os.environ["RANK"])])).tolist()
    assert (comm.size(), first, comm.gather_objects("x")) == (2, [0.0, 1.0], ["x", "x"])
    found = all_values()
    comm.barrier()
    torch.distributed.destroy_process_group()
    assert comm.size() == 1, "comm must not use a group that was destroyed"
    return found


def alone_under_torch_distributed() -> bool:
    before = [value(name) for name in list_losses()]
    torch.distributed.init_process_group("gloo")
    assert before == [value(name) for name in list_losses()]
    assert (comm.size(), comm.rank(), comm.gather_objects(1)) == (1, 0, [1])
    torch.distributed.destroy_process_group()
    return True


def test_group_of_torch_distributed_alone_is_adopted_by_every_loss_and_collective() -> None:
    """Otherwise, each rank would silently compute the loss of its own rows only."""
    assert run_ranks(under_plain_torch_distributed, 2, joined=False) == run_ranks(all_values, 2)
    assert run_ranks(alone_under_torch_distributed, 1, joined=False) == [True]


def test_unknown_loss_names_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown loss 'disko'; did you mean disco\?; known: clip, disco, "
    ):
        build_loss("disko")


def test_unknown_option_names_the_known_ones():
    with pytest.raises(ValueError, match="has no option tile; its options: group"):
        build_loss("disco", tile=64)


def test_duplicate_registration_is_refused():
    with pytest.raises(ValueError, match="registered twice"):
        register_loss("clip")(type("Other", (Loss,), {}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": torch.ones(3, 5)}, "of the same shape"),
        ({"text": torch.ones(4, 5, dtype=torch.float64)}, "floating dtype"),
        ({"scale": torch.tensor(1.0)}, r"scale must have shape \[1\]"),
        ({"image": torch.ones(0, 5), "text": torch.ones(0, 5)}, "image and text have no rows"),
        ({"index": torch.zeros(3, dtype=torch.int64)}, "index must be"),
    ],
)
def test_malformed_embeddings_are_refused(change, message):
    good = {"image": torch.ones(4, 5), "text": torch.ones(4, 5), "scale": torch.ones(1)}
    with pytest.raises(ValueError, match=message):
        Embeddings(**(good | change))
