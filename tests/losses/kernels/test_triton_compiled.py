"""Compile the Triton kernels for GPUs that this machine does not have, and check that they use the tensor cores.

On an A100 or H100, 16-bit kernels must not spill registers if rows are contiguous, as they are in the losses.

This needs no driver, because Triton includes an assembler. test_tiles.py tests the results of the kernels.
"""

import pytest

pytest.importorskip("triton")
from tools.check import compile as tool

MATRIX = {80: "mma", 86: "mma", 89: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}
WIDTHS = (512, 640, 768, 1024, 1152)


def problems(
    variant: str, precision: str, D: int, number: int, arch: int, strided: bool = False
) -> list[str]:
    """Return descriptions of the problems of one configuration of a kernel."""
    config = tool.cases(variant, precision, arch)[number]
    try:
        found = tool.compile_kernel(variant, precision, D, config, arch, strided)
    except Exception as error:
        return [f"{variant} {precision} D {D} sm_{arch} {config}: {type(error).__name__}: {error}"]
    wrong = []
    # The autotuner avoids other configurations that spill, such as large blocks on logged steps. On an A100, the sums
    # with groups spill some registers once per block.
    large = config.kwargs.get("PERSISTENT") and variant == "exp_sums+maxima"
    tolerated = strided or large or (arch, variant) == (80, "exp_sums+groups")
    half = precision in ("fp16", "bf16")
    if found.spilled_bytes and arch in (80, 90) and half and not tolerated:
        wrong.append(f"spills {found.spilled_bytes} bytes")
    # The autotuner also avoids configurations that do not fit, but the default one must fit.
    if number == 0 and not found.fits:
        wrong.append(f"needs {found.shared_bytes / 1024:.0f} KB of shared memory")
    if precision != "fp32" and not strided and found.matrix != MATRIX[arch]:
        wrong.append(f"multiplies by {found.matrix}, not {MATRIX[arch]}")
    return [f"{variant} {precision} D {D} sm_{arch} {config}: {text}" for text in wrong]


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_default_configurations_compile_without_spills_for_the_tensor_cores(arch):
    wrong = [text for variant in tool.VARIANTS for text in problems(variant, "fp16", 512, 0, arch)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("variant", ["exp_sums", "exp_sums+maxima", "exp_weights", "log_sums"])
def test_on_an_h100_two_programs_share_a_multiprocessor(variant):
    found = tool.compile_kernel(variant, "fp16", 512, tool.cases(variant, "fp16", 90)[0], 90)
    assert found.programs == 2  # so that one can multiply while the other computes exponentials


@pytest.mark.parametrize(
    ("variant", "columns"),
    [
        ("exp_sums", 256),
        pytest.param("exp_weights", 256, marks=pytest.mark.slow),
        pytest.param("sigmoid-maxima", 128, marks=pytest.mark.slow),
    ],
)
def test_on_an_h100_persistent_programs_neither_spill_nor_wait_for_each_product(variant, columns):
    found = {
        config.kwargs["BLOCK_N"]: tool.compile_kernel(variant, "fp16", 512, config, 90)
        for config in tool.cases(variant, "fp16", 90)
        if config.kwargs.get("PERSISTENT") and config.kwargs["BLOCK_N"] == columns
    }[columns]
    assert (found.matrix, found.spilled_bytes, found.fits) == ("wgmma", 0, True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", list(tool.TYPES))
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_configuration_compiles(arch, precision):
    variants = [
        name
        for name in tool.VARIANTS
        if precision == "fp16" or name not in ("exp_sums", "sigmoid-maxima")
    ]
    wrong = [
        text
        for variant in variants
        for number in range(len(tool.cases(variant, precision, arch)))
        for text in problems(variant, precision, 512, number, arch)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [86, 89, 120])
def test_default_configurations_fit_small_gpus(arch):
    wrong = [text for variant in tool.VARIANTS for text in problems(variant, "fp16", 512, 0, arch)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_default_configurations_compile_at_every_width_and_layout():
    wrong = [
        text
        for variant in tool.VARIANTS
        for D in WIDTHS
        for strided in (False, True)[: 1 + (D == 512)]
        for text in problems(variant, "fp16", D, 0, 90, strided)
    ]
    assert not wrong, "\n".join(wrong)
