"""Ring of ranks: every rank's block visits every rank, so that no rank needs memory for the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.distributed.comm import Group

Visit = Callable[[int, list[Tensor], list[Tensor] | None], list[Tensor]]


def circulate(
    block: Sequence[Tensor],
    visit: Visit,
    join: Callable[[list[Tensor], list[Tensor]], None],
    group: Group = None,
) -> list[Tensor]:
    """Send every rank's block around the ring and collect what each rank adds to it.

    A rank visits its own block first. The sums that the ranks have added to a block follow it one
    hop behind. There is one exchange per hop, and it overlaps with `visit`. A rank needs memory for
    two blocks besides its own, and for three sets of sums. Collective: every rank must call this.

    Args:
        block: Tensors of the same shapes on every rank. They must not change during the call.
        visit: visit(owner, block, spare) returns what this rank adds to the block of rank `owner`:
            tensors of the same shapes in every call, or an empty list. It may overwrite and return
            `spare`, earlier tensors that are not needed anymore (None if there are none).
        join: join(mine, theirs) adds the second list of tensors to the first in place.
        group: The ranks that take part.

    Returns:
        The sum of what all ranks have added to this rank's block.
    """
    N, n = comm.size(group), comm.rank(group)
    current = [x.contiguous() for x in block]
    # Two buffers take turns: one is visited and sent, while the other receives the next block.
    buffers = [[torch.empty_like(x) for x in current] for _ in range(min(N - 1, 2))]
    sums: list[Tensor] = []
    free: list[list[Tensor]] = []
    for hop in range(N):
        following = buffers[hop % 2] if hop < N - 1 else []
        arriving = _allocate_like(sums, free)
        # The sums of the last hop belong to a block that has moved on to the next rank.
        outgoing = [*current, *sums] if following else sums
        requests = comm.ring_exchange(outgoing, [*following, *arriving], group)
        mine = visit((n - hop) % N, current, free.pop() if free else None)
        for request in requests:
            request.wait()
        if arriving:  # what the previous ranks have added to the current block
            join(mine, arriving)
            free += [arriving, sums]
        sums = mine
        current = following
    if N == 1 or not sums:
        return sums
    # The last visited block belongs to the next rank: one more exchange returns every block's sums.
    result = _allocate_like(sums, free)
    for request in comm.ring_exchange(sums, result, group):
        request.wait()
    return result


def _allocate_like(tensors: list[Tensor], free: list[list[Tensor]]) -> list[Tensor]:
    """Return memory for tensors of these shapes, preferably a free set."""
    if tensors and free:
        return free.pop()
    return [torch.empty_like(x) for x in tensors]
