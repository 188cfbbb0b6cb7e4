"""Tiles of similarities, computed by torch and by Triton's interpreter, compared with float64.

Triton decides at its first import whether to interpret kernels, so the interpreter runs in new processes.
"""

import logging
import math
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, build_loss
from disco_ds.losses.kernels.similarity import (
    Block,
    find_problem,
    lacks_fence,
    sigmoid_block,
    softmax_gradient,
    softmax_sums,
    uses_triton,
)
from disco_ds.losses.kernels.tiles import (
    PLANNED_MULTIPROCESSORS,
    TILE_BYTES,
    Tile,
    Tiling,
    written_shape,
)
from helpers.all_losses import accuracy_of_copies
from helpers.dist import run_ranks
from helpers.oracle import features
from tools.check import kernels
from tools.check import tiles as tool

EVERY_OFFSET = [(5, 6, 3, pairs) for pairs in (None, *range(-5, 7))]
EDGES = [(64, 128, 64, 64), (70, 130, 20, -3), (33, 40, 70, None), (1, 1, 1, 0), (20, 65, 33, 64)]
WIDTHS = (64, 96, 128, 160, 192)
LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("disco_fused", {}),
    ("disco_fused", {"precision": "bf16"}),
    ("inf_cl", {}),
    ("siglip", {}),
    ("disco_fused", {"same_group": "positives"}),
    ("inf_cl", {"same_group": "ignored"}),
    ("siglip", {"same_group": "positives"}),
]


def interpreted(every: int) -> list[str]:
    """Check tiles on two ranks, which divide the work. Return descriptions of the failures.

    Args:
        every: Take each `every`-th of the shapes and configurations.
    """
    # In deterministic mode, torch.empty fills its memory with NaN, which reveals reads of memory that was not written.
    torch.use_deterministic_algorithms(True)
    n, failures = comm.rank(), []
    cases = [(shape, "fp32") for shape in EVERY_OFFSET[::every] + EDGES]
    cases.append(((33, 40, 70, 2), "tf32"))
    for number, ((rows, columns, D, pairs), precision) in enumerate(cases):
        if number % 2 == n:
            r, c = tool.features(rows, D, "cpu", 1), tool.features(columns, D, "cpu", 2)
            for check in tool.check_tiles(r, c, pairs, Tiling(None, precision, "triton")):
                if not check.passes:
                    failures.append(
                        f"{rows} x {columns} x {D}, pairs {pairs}, {precision}: {check}"
                    )
    if n == 0 or every == 1:
        r, c = tool.features(150, 64, "cpu", 1), tool.features(260, 64, "cpu", 2)
        with_groups = partial(tool.on_tile, grouped=True)
        tiling = Tiling(None, "fp32", "triton")
        for check in tool.check_tiles(r, c, (7, None)[n], tiling, with_groups):
            if not check.passes:
                failures.append(f"groups: {check}")
    r, c = tool.features(70, 20, "cpu", 3), tool.features(100, 20, "cpu", 4)
    for check in tool.check_blocks(
        r, c, (None, 7)[n], Tiling((64, 64), ("fp32", "fp16")[n], "triton")
    ):
        if not check.passes:
            failures.append(f"block: {check}")
    if n == 0:
        failures += half_factors() + far_rows()
    return failures + configurations(n, every) + losses()


def configurations(n: int, every: int) -> list[str]:
    """Check each `every`-th configuration that a GPU may choose, on partial blocks of several layouts and widths."""
    from disco_ds.losses.kernels import triton_kernels

    failures = []
    for number, config in enumerate(triton_kernels.CONFIGS[:-1:every]):
        if number % 2 == n:
            triton_kernels.force(config)
            D, strided = WIDTHS[number % len(WIDTHS)], number % 4 < 2
            r, c = (tool.features(k, D, "cpu", k) for k in (150, 312))
            r, c = (r, c) if strided else (r.contiguous(), c.contiguous())
            for check in tool.check_tiles(r, c, -3, Tiling(None, "fp32", "triton")):
                if not check.passes:
                    failures.append(f"{config}, D {D}, strided {strided}: {check}")
    return failures + persistent_programs(n)


def persistent_programs(n: int) -> list[str]:
    """Check the persistent kernels: more blocks than programs, an odd width, and rows that they cannot read.

    They cannot read strided or unaligned rows, so another kernel must be chosen for these. Rank n of 2 runs every
    second case.
    """
    from disco_ds.losses.kernels import triton_kernels

    failures = []
    config = triton_kernels.HEAVY[2]
    triton_kernels.force(config)
    for D, layout, runs in (
        (20, "contiguous", True),
        (18, "contiguous", False),
        (20, "strided", False),
    )[n::2]:
        r, c = (tool.features(k, D, "cpu", k, layout) for k in (300, 264))
        found = list(tool.check_tiles(r, c, 50, Tiling(None, "tf32", "triton")))
        failures += [f"persistent, D {D}, {layout}: {x}" for x in found if not x.passes]
        for kernel in (triton_kernels.exp_sums_kernel, triton_kernels.sigmoid_weights_kernel):
            if (kernel.best_config is config) != runs:
                failures.append(f"D {D}, {layout}: {kernel.best_config}")
    triton_kernels.force(None)
    return failures


def half_factors() -> list[str]:
    """Check factors in fp16, as on a GPU: the weights are written in fp16 into memory for fp32."""
    tiling = Tiling(None, "fp16", "triton")
    r, c = tool.features(40, 24, "cpu", 1).half(), tool.features(70, 24, "cpu", 2).half()
    from disco_ds.losses.kernels import torch_tiles, triton_tiles

    r, c = (x.clone() for x in (r, c))
    with mock.patch.object(Tiling, "operand_dtype", lambda self, x: x.dtype):  # as on a GPU
        mine = tool.on_tile(triton_tiles, r, c, 3, tiling)
    theirs, true = (
        tool.on_tile(torch_tiles, r.to(x), c.to(x), 3, tiling)
        for x in (torch.float32, torch.float64)
    )
    found = [
        tool.Check(k, tool.error(mine[k], true[k]), tool.error(theirs[k], true[k])) for k in true
    ]
    assert mine["weights"].dtype == mine["sigmoid weights"].dtype == torch.float16
    return [f"half factors: {check}" for check in found if not check.passes]


def far_rows() -> list[str]:
    """Check rows that lie more than 2^31 elements after the start of their tensor. Other elements are not accessed."""
    from disco_ds.losses.kernels import triton_tiles

    torch.use_deterministic_algorithms(False)
    r = torch.empty((1 << 31) + 64, dtype=torch.float16).as_strided((3, 16), (1 << 30, 1))
    torch.use_deterministic_algorithms(True)
    r.copy_(tool.features(3, 16, "cpu", 5))
    scale, tiling = torch.tensor([14.3]), Tiling(None, "fp16", "triton")
    found = []
    for a, b, which in ((r, r.clone(), 0), (r.clone(), r, 1)):
        shift = torch.zeros(1, dtype=torch.float64)
        sums = triton_tiles.exp_sums(Tile(a, b, None, tiling, None), scale, shift, False)[which]
        wrong = tool.error(sums, (a.double() @ b.double().T * 14.3).exp().sum(1 - which))
        if not wrong <= 1e-5:
            found.append(f"far rows as {('rows', 'columns')[which]}: {wrong}")
    return found


def losses() -> list[str]:
    """Check that Triton and torch give the same losses and gradients, on two ranks and on one."""
    from deepspeed import comm as dist

    failures = []
    alone = [dist.new_group([rank]) for rank in range(comm.size())][comm.rank()]
    for group, b in ((None, 40), (alone, 70)):
        N, n = comm.size(group), comm.rank(group)
        image, text = (x[n * b : (n + 1) * b] for x in features(N * b, 20, torch.float32))
        for name, options in LOSSES:
            mine, theirs = (
                gradients(
                    name, {**options, "impl": impl, "tile": (64, 64), "group": group}, image, text
                )
                for impl in ("triton", "torch")
            )
            wrong = [tool.error(x, y) for x, y in zip(mine, theirs, strict=True)]
            # On a CPU, torch rounds the weights to bf16, and Triton keeps them in the fp32 of the factors.
            if not max(wrong) <= (2**-8 if "precision" in options else 3e-6):
                failures.append(f"{name} {options} on {N}: {wrong}")
    names = ("disco_fused", "inf_cl", "siglip", "nt_xent", "fastclip_v2")
    copies = [name for name in names if accuracy_of_copies(name, impl="triton", tile=(64, 64))]
    return failures + [f"{name}: a copy of a pair does not tie with it" for name in copies]


def gradients(name: str, options: dict[str, Any], image: Tensor, text: Tensor) -> list[Tensor]:
    """Return the loss, its accuracies, and its gradients for image, text, scale and, for siglip, bias."""
    leaves = [
        x.clone().requires_grad_()
        for x in (image, text, torch.tensor([14.3]), torch.tensor([-10.0]))
    ]
    group_id = torch.arange(len(image)) // 3
    out = build_loss(name, **options)(Embeddings(*leaves, group_id=group_id))
    out.loss.backward()
    return [
        out.loss.detach(),
        *out.metrics.values(),
        *(x.grad for x in leaves if x.grad is not None),
    ]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_triton_under_the_interpreter_equals_torch_and_float64(monkeypatch, every):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for failures in run_ranks(interpreted, 2, every, method="spawn"):
        assert not failures, "\n".join(failures)


def test_triton_where_it_cannot_run_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows = torch.eye(4)
    with pytest.raises(ValueError, match="impl=triton needs the triton package and a GPU"):
        softmax_sums(block(rows, rows, 0, Tiling(None, "fp32", "triton")))
    softmax_sums(block(rows, rows, 0, Tiling(None, "fp32")))


def block(rows: Tensor, columns: Tensor, first: int | None, tiling: Tiling) -> Block:
    """Return a block in which all scales are 1 and the shift is 0."""
    ones = torch.ones(1)
    shift = torch.zeros(1, dtype=torch.float64)
    return Block(
        rows, columns, ones.expand(len(rows)), ones.expand(len(columns)), first, shift, tiling
    )


def plain_softmax(
    rows: Tensor, columns: Tensor, row_scale: Tensor, column_scale: Tensor, first: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute a block's results from the whole matrix of weights W, in float64.

    Returns:
        The log-sums of the rows [n] and of the columns [m], W columns [n, D], and W^T rows [m, D].
    """
    rows, columns, row_scale, column_scale = (
        x.double() for x in (rows, columns, row_scale, column_scale)
    )
    cosine = rows @ columns.T
    cosine.diagonal(first).fill_(-torch.inf)
    x, y = cosine * row_scale[:, None], cosine * column_scale
    W = (x - x.logsumexp(1, keepdim=True)).exp() + (y - y.logsumexp(0)).exp()
    return x.logsumexp(1), y.logsumexp(0), W @ columns, W.T @ rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("first", [41, -37, 0, 5, -4])
def test_every_row_and_column_may_have_a_scale_of_its_own(dtype, first):
    n, m, D = 37, 41, 12
    rows, columns = features(m, D, dtype)
    rows = rows[:n]
    # Exponents reach 900, so no single shift would suffice.
    row_scale, column_scale = (
        torch.linspace(1, 900, n, dtype=dtype),
        torch.linspace(700, 2, m, dtype=dtype),
    )
    tiling, limit = Tiling((16, 9), "fp32", "torch"), 1e-12 if dtype == torch.float64 else 2e-4
    true = plain_softmax(rows, columns, row_scale, column_scale, first)
    at_hand = Block(rows, columns, row_scale, column_scale, first, None, tiling)
    sums = softmax_sums(at_hand)
    d_rows, d_columns = torch.zeros_like(rows), torch.zeros_like(columns)
    softmax_gradient(at_hand, sums.rows, sums.columns, d_rows, d_columns)
    for mine, right in zip(
        (
            sums.rows,
            sums.columns,
            d_rows / tiling.underflow_scale(),
            d_columns / tiling.underflow_scale(),
        ),
        true,
        strict=True,
    ):
        assert tool.error(mine, right) <= limit


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_rounded_factors_are_all_that_a_lower_precision_changes(precision):
    tiling = Tiling((16, 32), precision, "torch")
    rows, columns = tool.features(50, 24, "cpu", 1), tool.features(90, 24, "cpu", 2)
    for first in (None, 11):
        mine = tool.on_block(rows, columns, first, tiling)
        true = tool.on_block(
            tiling.quantize_tile(rows).double(),
            tiling.quantize_tile(columns).double(),
            first,
            tiling,
        )
        for name, value in true.items():
            # For gradients, the weights are rounded as well.
            rounding = {"fp32": 0.0, "tf32": 2**-11, "fp16": 2**-11, "bf16": 2**-8}[precision]
            assert tool.error(mine[name], value) <= 2e-6 + rounding * ("gradient" in name), name


def test_sigmoid_of_large_exponents_is_exact():
    rows, columns = features(30, 12, torch.float64)
    for scale in (30.0, 300.0):
        z = scale * rows @ columns.T - 1.0
        scales = torch.tensor([scale]).double().expand(30)
        at_hand = Block(rows, columns, scales, scales, 30, None, Tiling((16, 16), "fp32"))
        found = sigmoid_block(at_hand, torch.tensor([-1.0]).double(), None, None)
        assert tool.error(found.loss, torch.logaddexp(z, torch.zeros_like(z)).sum()) <= 1e-14
        assert tool.error(found.maxima[0], z.amax(1)) <= 1e-14


def test_tool_says_when_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main() == 1
    assert "no GPU here" in capsys.readouterr().err


def test_where_triton_fails_its_reason_is_logged_once_and_torch_takes_over(caplog):
    """Here, Triton fails because it finds no driver. Without a C compiler, it fails in the same way."""
    find_problem.cache_clear()
    device = torch.device("cpu")
    with caplog.at_level(logging.WARNING):
        first, again = find_problem(device, "fp32"), find_problem(device, "fp32")
    assert first == again is not None
    (record,) = caplog.records
    assert f"do not run on cpu ({first})" in record.message
    on_gpu = mock.Mock(is_cuda=True, dtype=torch.float32, device=device)
    assert not uses_triton(Tiling(None, "fp32"), on_gpu)
    with pytest.raises(ValueError, match="impl=triton cannot run on cpu: "):
        uses_triton(Tiling(None, "fp32", "triton"), on_gpu)


def test_a_configuration_that_does_not_compile_is_passed_over_by_the_tuner():
    from disco_ds.losses.kernels import triton_kernels

    def fails() -> None:
        raise RuntimeError("PassManager::run failed")

    assert triton_kernels._milliseconds(fails, (0.5, 0.2, 0.8)) == [math.inf] * 3


def test_configurations_are_chosen_without_timing_where_the_same_bits_are_wanted(monkeypatch):
    from disco_ds.losses.kernels import triton_kernels, triton_tiles

    sizes = {(16384, 16384, 512), (3072, 16384, 512), (16384, 16384, 768)}
    assert len({triton_tiles._size_class(*size) for size in sizes}) == 3
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert {triton_tiles._size_class(*size) for size in sizes} == {0}
    half = {"r": torch.empty(0, dtype=torch.float16), "tuned": 0}
    chosen = triton_kernels.worth_timing(triton_kernels.CONFIGS, half, PRECISION="ieee")
    assert chosen == [triton_kernels.LIGHT[0]]
    assert all(config.kwargs["WIDTH_BYTES"] >= 4 * 16 for config in triton_kernels.PLAIN_CORES)


@pytest.mark.parametrize(
    ("dtype", "persistent", "flags", "blocks"),
    [
        (torch.float16, 1, {}, ["128x128", "128x256 persistent"]),
        (torch.float16, 0, {}, ["128x128", "128x256"]),
        (torch.float16, 1, {"SIGMOID": True}, ["128x128", "128x128 persistent"]),
        (torch.float16, 0, {"TWO_WEIGHTS": True}, ["128x128", "64x128"]),
        (torch.float32, 1, {}, ["64x64", "64x128"]),
    ],
)
def test_two_configurations_are_timed(dtype, persistent, flags, blocks):
    from disco_ds.losses.kernels import triton_kernels

    args = {"r": torch.empty(0, dtype=dtype), "tuned": 2 * 7 + persistent}
    found = triton_kernels.worth_timing([], args, PRECISION="ieee", **flags)
    sizes = [config.kwargs for config in found]
    assert blocks == [
        f"{x['BLOCK_M']}x{x['BLOCK_N']}" + " persistent" * x.get("PERSISTENT", False) for x in sizes
    ]


@pytest.mark.parametrize(
    ("n", "D", "multiprocessors", "shape"),
    [
        (32768, 512, 132, (8448, 8448)),
        (3072, 512, 132, (3072, 16896)),
        (65536, 768, 132, (5632, 11264)),
        (32768, 512, 108, (6912, 6912)),
        (32768, 512, 148, (8448, 8448)),
        (32768, 16, 132, (8448, 8448)),
        (32768, 2048, 14, (8448, 8704)),
        (1, 512, 132, (1, 75493376 // 8448 * 8448)),
    ],
)
def test_written_tiles_fill_whole_waves_of_a_gpu(n, D, multiprocessors, shape):
    assert written_shape(n, D, TILE_BYTES // 2, multiprocessors) == shape


def test_tiles_of_a_gpu_fit_their_memory():
    assert PLANNED_MULTIPROCESSORS == 132
    device = torch.device("cuda")
    for precision, itemsize in (("fp16", 2), ("tf32", 4)):
        tiling = Tiling(None, precision)
        for n, m, D in ((32768, 32768, 512), (3072, 196608, 512), (100, 300, 64)):
            rows, columns = tiling.size(n, m, D, device)
            assert rows * columns * itemsize <= TILE_BYTES


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [
        ((9, 0), "3.6.0", False),
        ((10, 0), "3.6.0", True),
        ((12, 0), "3.7.0+git1a2b3c", True),
        ((10, 0), "3.7.1", False),
        ((10, 3), "3.10.0", False),
    ],
)
def test_old_triton_is_not_used_on_newer_gpus(
    capability: tuple[int, int], version: str, expected: bool
) -> None:
    assert lacks_fence(capability, version) == expected
