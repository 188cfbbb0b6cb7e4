"""Pass each rank's block of tensors around a ring of ranks, so that no rank needs memory for the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.distributed.comm import Group

Visit = Callable[[int, list[Tensor], list[Tensor] | None], list[Tensor]]
"""Type of the argument `visit` of `circulate`."""


def circulate(
    block: Sequence[Tensor],
    visit: Visit,
    join: Callable[[list[Tensor], list[Tensor]], None],
    group: Group = None,
) -> list[Tensor]:
    """Send every rank's block around the ring, and sum what the ranks compute for each block.

    Each rank calls `visit` on its own block first. Every block has running sums, to which each rank
    adds its result; the sums travel around the ring one hop behind the block. In each hop, a
    rank sends and receives while `visit` runs. In addition to its own block, a rank needs memory for two
    blocks and three sets of sums. Collective: every rank must call this.

    Args:
        block: This rank's tensors. Their shapes are the same on every rank, and they must not change
            during the call.
        visit: visit(owner, block, spare) returns the tensors that this rank adds to the sums of the
            block of rank `owner`. Their shapes are the same in every call, or the list is always
            empty. `spare` is a list of tensors from an earlier call that are no longer needed, or
            None; `visit` may overwrite and return it.
        join: join(mine, theirs) adds each tensor of `theirs` to the tensor of `mine` at the same
            position, in place.
        group: The process group; None means all ranks.

    Returns:
        The sums for this rank's block, over the results of all ranks.
    """
    N, n = comm.size(group), comm.rank(group)
    current = [x.contiguous() for x in block]
    # Two buffers take turns: `visit` reads the block in one buffer, which is also being sent, while the
    # other buffer receives the next block.
    buffers = [[torch.empty_like(x) for x in current] for _ in range(min(N - 1, 2))]
    sums: list[Tensor] = []
    free: list[list[Tensor]] = []
    for hop in range(N):
        following = buffers[hop % 2] if hop < N - 1 else []
        arriving = _allocate_like(sums, free)
        # `sums` are for the block of the previous hop, which the next rank has now.
        outgoing = [*current, *sums] if following else sums
        requests = comm.ring_exchange(outgoing, [*following, *arriving], group)
        mine = visit((n - hop) % N, current, free.pop() if free else None)
        for request in requests:
            request.wait()
        if arriving:  # sums that the earlier ranks have computed for the current block
            join(mine, arriving)
            free += [arriving, sums]
        sums = mine
        current = following
    if N == 1 or not sums:
        return sums
    # The last block that a rank visits belongs to the next rank, so one more hop brings the sums of
    # every block back to the owner of the block.
    result = _allocate_like(sums, free)
    for request in comm.ring_exchange(sums, result, group):
        request.wait()
    return result


def _allocate_like(tensors: list[Tensor], free: list[list[Tensor]]) -> list[Tensor]:
    """Return uninitialized tensors with the shapes of `tensors`. If `free` has an entry, remove and return it."""
    if tensors and free:
        return free.pop()
    return [torch.empty_like(x) for x in tensors]
