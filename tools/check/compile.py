"""Compile the Triton kernels for GPUs that this machine does not have, and list the resources that they use.

    python -m tools.check.compile                                          all kernels for all GPUs
    python -m tools.check.compile --arch 90 --kernels exp_sums --precisions fp16 --widths 512 768

The tool needs neither a GPU nor a driver, because Triton includes NVIDIA's assembler. The exit code is 1 if a kernel
does not compile.

A block is the part of a tile that one program of a kernel computes at a time. The columns are:
  block     rows x columns of a block, number of warps (w) and of pipeline stages (s); p marks persistent programs, each
            of which computes several blocks
  regs      registers per thread
  spilled   bytes of spilled registers per thread
  shared    shared memory of a program
  fit       number of programs that fit on a multiprocessor; "no" if a program needs more shared memory than it may take
  matrix    name of the matrix instruction
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from disco_ds.losses.kernels import triton_kernels as kernels

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KB of shared memory that one program may take, by architecture: A100, RTX 3090, L40S, H100, B200 and RTX 5090."""
TYPES = {"fp32": "fp32", "tf32": "fp32", "fp16": "fp16", "bf16": "bf16"}
VARIANTS: dict[str, tuple[str, dict[str, bool]]] = {
    "exp_sums": ("exp_sums_kernel", {"MAXIMA": False}),
    "exp_sums+maxima": ("exp_sums_kernel", {"MAXIMA": True}),
    "exp_weights": ("exp_weights_kernel", {}),
    "log_sums": ("log_sums_kernel", {"MAXIMA": True}),
    "log_weights": ("log_weights_kernel", {"TWO_WEIGHTS": True, "MOMENTS": True}),
    "sigmoid": ("sigmoid_weights_kernel", {"SIGMOID": True, "MAXIMA": True}),
    "sigmoid-maxima": ("sigmoid_weights_kernel", {"SIGMOID": True, "MAXIMA": False}),
    "exp_sums+groups": ("exp_sums_kernel", {"MAXIMA": False}),
    "exp_weights+groups": ("exp_weights_kernel", {}),
    "sigmoid+groups": ("sigmoid_weights_kernel", {"SIGMOID": True, "MAXIMA": False}),
}
"""The kernels that the losses launch: label -> (name of the kernel, flags)."""
SCALARS = {"n", "m", "pairs", "r_row", "c_row", "tuned", "out_row"}
UNALIGNED = {"n", "pairs", "tuned"}
"""Kernel arguments that Triton does not specialize for multiples of 16 (see _jit in triton_kernels.py)."""


@dataclass(frozen=True)
class Compiled:
    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix: str
    """Name of the matrix instruction; FFMA if the kernel uses none."""
    warps: int
    arch: int

    @property
    def programs(self) -> int:
        """Return how many programs fit on a multiprocessor at the same time."""
        by_memory = (SHARED[self.arch] + 1) * 1024 // (self.shared_bytes + 1024)
        return min(by_memory, 65536 // (self.registers * self.warps * 32))

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= SHARED[self.arch] * 1024


def compile_kernel(
    variant: str, precision: str, D: int, config: triton.Config, arch: int, strided: bool = False
) -> Compiled:
    """Compile a kernel with the types, alignment and flags with which triton_tiles.py launches it for a large tile.

    Args:
        variant: A key of VARIANTS.
        precision: Precision of the matrix products.
        D: Width of the rows.
        config: Block sizes, numbers of warps and stages, and flags.
        arch: Architecture of the GPU, such as 90.
        strided: Whether the rows are neither contiguous nor aligned.

    Raises:
        Exception: If the kernel does not compile. It may be any error of Triton.
    """
    name, flags = VARIANTS[variant]
    function = getattr(kernels, name).fn
    constants: dict[str, Any] = {**config.kwargs, **flags, "D": D}
    constants["PRECISION"] = "tf32" if precision == "tf32" else "ieee"
    persistent = config.kwargs.get("PERSISTENT", False)
    if "PERSISTENT" in function.arg_names:
        constants["PERSISTENT"] = persistent
    constants |= {} if strided else {"r_width": 1, "c_width": 1}
    groups = {"row_groups", "column_groups"}
    if not variant.endswith("+groups"):
        constants |= dict.fromkeys(groups)
    # Pointers to the factors (r and c), to groups and to `out` have other types. All remaining pointers are to fp32.
    of_factors = {"r", "c"}
    signature, attributes = {}, {}
    for position, argument in enumerate(function.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        if argument in SCALARS or argument in ("r_width", "c_width"):
            signature[argument] = "i32"
        elif argument == "gain":
            signature[argument] = "fp32"
        elif argument in groups:
            signature[argument] = "*i32"
        elif argument == "out":
            signature[argument] = f"*{TYPES[precision]}"
        else:
            signature[argument] = f"*{TYPES[precision]}" if argument in of_factors else "*fp32"
        odd = (
            argument in UNALIGNED
            or argument == "gain"
            or (strided and argument in (*of_factors, *SCALARS))
        )
        if not odd and argument not in ("r_width", "c_width"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        function, signature, {(k,): v for k, v in _by_position(function, constants)}, attributes
    )
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage, code = _disassemble(found.asm["cubin"])
    spilled = int(usage.get("STACK", 0))
    ptx = found.asm["ptx"]
    matrix = next(
        (
            word
            for word in ("tcgen05", "wgmma", "mma")
            if f"{word}.mma" in ptx or f"{word}.sync" in ptx
        ),
        "FFMA",
    )
    # If the compiler cannot keep the accumulators of asynchronous matrix instructions apart from other work, the
    # program waits after every such instruction. In that case, all of them are marked gsb0 in the machine code.
    products = re.findall(r"HGMMA[^;]*;", code)
    if matrix == "wgmma" and all("gsb0" in rest for rest in products):
        matrix = "wgmma, serial"
    return Compiled(
        int(usage["REG"]), spilled, found.metadata.shared, matrix, config.num_warps, arch
    )


def _by_position(function: Any, constants: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    return ((function.arg_names.index(name), value) for name, value in constants.items())


def _disassemble(cubin: bytes) -> tuple[dict[str, str], str]:
    """Return the resource usage (REG and STACK) and the listing of the machine code."""
    tool = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(
                [tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return dict(re.findall(r"\b(REG|STACK):(\d+)", usage)), code


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch", type=int, nargs="+", default=list(SHARED), choices=list(SHARED), metavar="NN"
    )
    parser.add_argument(
        "--kernels", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME"
    )
    parser.add_argument(
        "--precisions", nargs="+", default=list(TYPES), choices=list(TYPES), metavar="P"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[512], metavar="D")
    return parser.parse_args()


def cases(variant: str, precision: str, arch: int) -> list[triton.Config]:
    """Return the configurations that the autotuner may time for a large tile with contiguous, aligned rows."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    persistent = arch >= 90 and not variant.startswith("log") and not variant.endswith("+groups")
    args = {"r": torch.empty(0, dtype=dtype), "tuned": 2 + persistent}
    name = "tf32" if precision == "tf32" else "ieee"
    return kernels.list_candidates(args, PRECISION=name, **VARIANTS[variant][1])


def main() -> int:
    args = parse_args()
    print(f"Triton {triton.__version__}, torch {torch.__version__}")
    print(
        f"{'sm':<5}{'kernel':<19}{'':<6}{'D':<6}{'block':<17}{'regs':>5}{'spilled':>8}{'shared':>8}{'fit':>4} "
        "matrix"
    )
    failed = 0
    for arch, variant, precision in product(args.arch, args.kernels, args.precisions):
        for D, config in product(args.widths, cases(variant, precision, arch)):
            failed += not show(variant, precision, D, config, arch)
    return int(failed > 0)


def show(variant: str, precision: str, D: int, config: triton.Config, arch: int) -> bool:
    """Compile a kernel, print its line of the table, and return whether it compiled."""
    sizes = config.kwargs
    block = f"{sizes['BLOCK_M']}x{sizes['BLOCK_N']} w{config.num_warps} s{config.num_stages}"
    block += " p" * sizes.get("PERSISTENT", False)
    head = f"{arch:<5}{variant:<19}{precision:<6}{D:<6}{block:<17}"
    try:
        x = compile_kernel(variant, precision, D, config, arch)
    except Exception as error:  # a user's first training step would raise the same error
        lines = str(error).strip().splitlines() or [""]
        print(f"{head}{type(error).__name__}: {lines[-1][:150]}", flush=True)
        return False
    fits = str(x.programs) if x.fits else "no"
    print(
        f"{head}{x.registers:>5}{x.spilled_bytes:>8}{x.shared_bytes / 1024:>7.0f}K{fits:>4} "
        f"{x.matrix}",
        flush=True,
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
