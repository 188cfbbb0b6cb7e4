"""Two ways to compare a rank's rows with the columns of all ranks: columns gathered once, or sent around a ring.

Both give the sums over this rank's rows and over its columns, and the gradients of both sides. The losses differ in
what they do with these. Only losses, and the plan of their cost, import this file.
"""

# b local batch, B global = N b, D width, N ranks, n this rank; scales, shifts, moments [2, b]: of rows, of columns

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, TypedDict

import torch
from torch import Tensor

from disco_ds.distributed import comm, ring
from disco_ds.losses.base import Loss
from disco_ds.losses.kernels import (
    Block,
    Impl,
    Precision,
    Sums,
    Tiling,
    full_dtype,
    softmax_gradient,
    softmax_sums,
)

CommDtype = Literal["fp32", "fp16", "bf16"]
COMM_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class TiledOptions(TypedDict, total=False):
    """The options of every tiled loss, whose constructors pass them on to TiledLoss."""

    comm_dtype: CommDtype | None
    tile: Sequence[int] | None
    precision: Precision
    impl: Impl
    group: Any


class TiledLoss(Loss):
    """The base of losses that compute similarities in tiles.

    Args:   comm_dtype: dtype in which features of one side are sent to other ranks; None: as `precision` rounds them,
            which loses nothing; tile, precision, impl: see kernels.Tiling; group: of ranks, None for all.
    Raises: ValueError for an unknown comm_dtype, tile, precision or impl.
    """

    def __init__(
        self,
        comm_dtype: CommDtype | None = None,
        tile: Sequence[int] | None = None,
        precision: Precision = "auto",
        impl: Impl = "auto",
        group: Any = None,
    ):
        super().__init__()
        if comm_dtype is not None and comm_dtype not in COMM_DTYPES:
            raise ValueError(f"comm_dtype must be one of {', '.join(COMM_DTYPES)} or null, got {comm_dtype!r}")
        self.tiling = Tiling(tile, precision, impl)
        self.comm_dtype, self.group = None if comm_dtype is None else COMM_DTYPES[comm_dtype], group


class Blocks(Protocol):
    """The columns of all ranks, seen from one rank. Its methods are collective: every rank must call, in one order."""

    own: Tensor
    """This rank's columns as all ranks see them, rounded to the dtype in which they are sent, [b, D]."""

    def sums(self, rows: Tensor, scales: Tensor, shift: Tensor | None, maxima: bool) -> Sums:
        """Sums over all columns for this rank's rows, and over all rows for its columns, without the pairs. All [b].

        Args: scales [2, b]: of rows, of columns; shift, maxima: see kernels.Block and kernels.softmax_sums.
        """

    def gradient(
        self, rows: Tensor, scales: Tensor, shifts: Tensor, shift: Tensor | None, of_rows: bool, of_columns: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """softmax_gradient of this rank's rows over all columns, and of its columns over all ranks' rows, [b, D] each.

        Args: scales, shifts [2, b]: of rows, of columns; of_rows, of_columns: which of the two to compute.
        """


class Gathered:
    """Columns of all ranks in one tensor: the fastest way where B x D fits in memory, twice if they have a gradient.

    Args: columns [b, D], held (Tiling.hold); comm_dtype: dtype they are gathered in, None for their own; keep: `sums`
          keeps the exponentials, b x B in bf16, so that `gradient` need not compute them again.
    """

    def __init__(self, columns: Tensor, tiling: Tiling, comm_dtype: torch.dtype | None, group: Any, keep: bool = False):
        self.tiling, self.group, self.comm_dtype, self.keep = tiling, group, comm_dtype, keep
        self.columns = self._gather(columns)
        self.first = comm.rank(group) * len(columns)  # column of this rank's first pair
        self.mine = slice(self.first, self.first + len(columns))
        self.own = self.columns[self.mine]
        self.kept: Tensor | None = None

    def _gather(self, side: Tensor) -> Tensor:
        sent = as_sent(side, self.comm_dtype)
        return comm.gather(sent, group=self.group) if comm.size(self.group) > 1 else sent

    def _of_all(self, own: Tensor) -> Tensor:
        """One number per column, from all ranks; without communication where it is one number for all."""
        if own.stride(0) == 0:  # one number, expanded
            return own[:1].expand(len(self.columns))
        return comm.gather(own, group=self.group)

    def _block(self, rows: Tensor, scales: Tensor, shift: Tensor | None) -> Block:
        return Block(rows, self.columns, scales[0], self._of_all(scales[1]), self.first, shift, self.tiling)

    def sums(self, rows: Tensor, scales: Tensor, shift: Tensor | None, maxima: bool) -> Sums:
        self.kept = None
        if self.keep and shift is not None:
            self.kept = torch.empty(len(rows), len(self.columns), dtype=torch.bfloat16, device=rows.device)
        part = softmax_sums(self._block(rows, scales, shift), maxima, self.kept)
        if comm.size(self.group) == 1:
            return part
        # A rank has the columns' sums over its own rows only. They are logarithms: to add them over ranks, take exp
        # against a base, which is the common shift, or else the largest of any rank.
        base = comm.all_reduce_max(part.columns, self.group) if shift is None else shift.expand_as(part.columns)
        base = base.clamp(min=-1e300)  # a sum of nothing is -inf, and -inf - -inf is not a number
        total = comm.all_reduce_sum((part.columns - base).exp_().to(full_dtype(rows)), self.group)
        columns = total.double().log_().add_(base)[self.mine]
        if part.columns_max is None:
            return Sums(part.rows, columns, None, None)
        return Sums(part.rows, columns, part.rows_max, comm.all_reduce_max(part.columns_max, self.group)[self.mine])

    def gradient(
        self,
        rows: Tensor,
        scales: Tensor,
        shifts: Tensor,
        shift: Tensor | None,
        of_rows: bool,
        of_columns: bool,
        moments: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See Blocks. Args: moments [2, b] float64: receives softmax_gradient's, of this rank's rows and columns."""
        d_rows = zeros(rows) if of_rows else None
        # Every rank computes what its rows add to all columns; a reduce_scatter then sums and divides that.
        d_columns = zeros(self.columns) if of_columns else None
        parts = None if moments is None else (moments[0], moments.new_zeros(len(self.columns)))
        block, kept = self._block(rows, scales, shift), None if shift is None else self.kept
        softmax_gradient(block, shifts[0], self._of_all(shifts[1]), d_rows, d_columns, kept, parts)
        if moments is not None and parts is not None:
            moments[1] = comm.all_reduce_sum(parts[1], self.group)[self.mine]
        return d_rows, None if d_columns is None else comm.reduce_scatter_in_place(d_columns, self.group)


class GatheredBoth(Gathered):
    """Gathers the rows too, so that each rank computes the whole gradient of its own columns.

    No gradients of features are sent, at the cost of one more product.
    """

    def gradient(
        self,
        rows: Tensor,
        scales: Tensor,
        shifts: Tensor,
        shift: Tensor | None,
        of_rows: bool,
        of_columns: bool,
        moments: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        found: list[Tensor | None] = []
        # First this rank's rows against all columns, then its columns against all rows.
        for side, (anchors, wanted) in enumerate(((rows, of_rows), (self.own, of_columns))):
            into = zeros(anchors) if wanted else None
            if wanted or moments is not None:
                others = self._gather(rows) if side else self.columns
                parts = None if moments is None else (moments[side], moments.new_zeros(len(others)))
                other_scale, other_shift = (self._of_all(x[1 - side]) for x in (scales, shifts))
                block = Block(anchors, others, scales[side], other_scale, self.first, shift, self.tiling)
                softmax_gradient(block, shifts[side], other_shift, into, None, None, parts)
            found.append(into)
        return found[0], found[1]


class Ring:
    """The columns of one rank at a time: nothing of size B is held, whatever the global batch. All scales are equal.

    Args: columns [b, D], held (Tiling.hold); comm_dtype: dtype they are sent in, None for their own.
    """

    def __init__(self, columns: Tensor, tiling: Tiling, comm_dtype: torch.dtype | None, group: Any):
        self.tiling, self.group = tiling, group
        self.own = as_sent(columns, comm_dtype)

    def sums(self, rows: Tensor, scales: Tensor, shift: Tensor | None, maxima: bool) -> Sums:
        nothing: dict[str, Any] = {
            "size": (len(rows),),
            "fill_value": -math.inf,
            "dtype": torch.float64,
            "device": rows.device,
        }
        total, largest = torch.full(**nothing), torch.full(**nothing) if maxima else None

        def visit(owner: int, block: list[Tensor], spare: list[Tensor] | None) -> list[Tensor]:
            part = softmax_sums(self._block(rows, block[0], scales, owner, shift), maxima)
            # Sums of this rank's rows stay here; those of the owner's columns travel on with them.
            torch.logaddexp(total, part.rows, out=total)
            if largest is None or part.rows_max is None or part.columns_max is None:
                return [part.columns]
            torch.maximum(largest, part.rows_max, out=largest)
            return [part.columns, part.columns_max]

        columns = ring.circulate([self.own], visit, _join_sums, self.group)
        return Sums(total, columns[0], largest, columns[1] if maxima else None)

    def gradient(
        self, rows: Tensor, scales: Tensor, shifts: Tensor, shift: Tensor | None, of_rows: bool, of_columns: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        d_rows = zeros(rows) if of_rows else None

        def visit(owner: int, block: list[Tensor], spare: list[Tensor] | None) -> list[Tensor]:
            columns, shift_of_columns = block
            d_columns = None
            if of_columns:
                d_columns = zeros(columns) if spare is None else spare[0].zero_()
            # The owner's shifts come with its columns: a weight needs the sum of its whole column.
            at_hand = self._block(rows, columns, scales, owner, shift)
            softmax_gradient(at_hand, shifts[0], shift_of_columns, d_rows, d_columns)
            return [] if d_columns is None else [d_columns]

        found = ring.circulate([self.own, shifts[1]], visit, add_parts, self.group)
        return d_rows, found[0] if found else None

    def _block(self, rows: Tensor, columns: Tensor, scales: Tensor, owner: int, shift: Tensor | None) -> Block:
        """The block of this rank's rows and the columns of rank `owner`. Only this rank's own block has pairs."""
        first = 0 if owner == comm.rank(self.group) else None
        return Block(rows, columns, scales[0], scales[0], first, shift, self.tiling)


def as_sent(held: Tensor, comm_dtype: torch.dtype | None) -> Tensor:
    """Features as they are sent; float64 ones, which are for tests of exactness, are never rounded."""
    return held if comm_dtype is None or held.dtype == torch.float64 else held.to(comm_dtype)


def chunks(*sides: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut into the rows that are worked on at a time where a temporary copy of them is made.

    On a GPU, where each call has a cost, that is 64 MiB in fp32; on a CPU it is few enough for the cache.
    """
    size = chunk_rows(sides[0].shape[-1], sides[0].device)
    return zip(*(side.split(size) for side in sides), strict=True)


def chunk_rows(D: int, device: torch.device) -> int:
    return 1024 if device.type == "cpu" else max(2**24 // D, 1)


def positives(rows: Tensor, columns: Tensor, tiling: Tiling) -> Tensor:
    """Cosine of every pair, [b] float64, in chunks, because a float copy of the features would not be small.

    It is computed from the factors that the tiles multiply, so that a duplicate of a sample has the same similarity.
    """
    full = full_dtype(rows)
    pairs = (
        (tiling.factor(r).to(full) * tiling.factor(c)).sum(1, dtype=torch.float64) for r, c in chunks(rows, columns)
    )
    return _join(list(pairs))


def _join(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def largest_shift(rows: Tensor, columns: Tensor, scale: Tensor, group: Any) -> Tensor:
    """The smallest c >= 0 for which no sum of exp(x - c) overflows fp32, the same on every rank, [1] float64.

    It may be so large that the sums of some row underflow; `holds` finds that from the sums. Collective, one
    all_reduce, for which the host does not wait.
    """
    # Cauchy-Schwarz bounds the exponents: x <= |row| |column| s, and a sum has at most B terms; exp(88) is within fp32.
    dtype = full_dtype(rows)
    norms = [
        torch.linalg.vector_norm(x, dim=1, dtype=dtype).amax() for side in (rows, columns) for (x,) in chunks(side)
    ]
    mine = torch.stack([torch.stack(norms).amax(), scale.detach()[0].to(dtype)])
    norm, s = comm.all_reduce_max(mine, group).double().split(1)
    return (norm * norm * s + (math.log(len(rows) * comm.size(group)) - 88)).clamp_(min=0)


def holds(shift: Tensor, *sums: Tensor, group: Any) -> bool:
    """Return True if the shift suits the sums of every rank: no sum underflows fp32. Collective, one all_reduce.

    The limit is exp(-58) below the shift, where the reciprocal of a sum, times Tiling.gain, is still within fp32. The
    host waits for the answer.
    """
    lowest = torch.stack([x.min() for x in sums]).min()
    # A NaN compares False, on every rank alike.
    return bool(-comm.all_reduce_max(-lowest, group) >= shift[0] - 58)


def finish(gradient: Tensor | None, others: Tensor, weight: Tensor, factor: Tensor, tiling: Tiling) -> Tensor | None:
    """Add the pairs' part to the gradient from the tiles, in place: factor x (gradient / gain + weight_i others_i).

    Args: gradient, others [b, D]; weight [b]; factor 0-d or [1]; gain is Tiling.gain.
    """
    if gradient is None:
        return None
    lifted = (weight * tiling.gain()).to(gradient.dtype)[:, None]
    factor = (factor / tiling.gain()).to(gradient.dtype)
    for part, other, w in chunks(gradient, others, lifted):
        part.addcmul_(tiling.factor(other).to(part.dtype), w).mul_(factor)
    return gradient


def inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> over all rows, 0-d float64."""
    parts = [(x.to(y.dtype) * y).sum(dtype=torch.float64) for x, y in chunks(a, b)]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def add_parts(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for x, y in zip(mine, theirs, strict=True):
        x.add_(y)


def _join_sums(mine: list[Tensor], theirs: list[Tensor]) -> None:
    torch.logaddexp(mine[0], theirs[0], out=mine[0])
    for x, y in zip(mine[1:], theirs[1:], strict=True):
        torch.maximum(x, y, out=x)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=full_dtype(x), device=x.device)
