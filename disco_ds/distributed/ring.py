"""A ring of ranks: every rank's block visits every rank, so that nothing of the size of the global batch is held.

The one exchange it is made of is comm.py's. Any room may import this file.
"""

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
    """Let every rank's block pass by, this rank's own first; what the ranks add to it follows one hop behind it.

    There is one exchange per hop, which runs while `visit` does. Two blocks are held besides this rank's own, and three
    sets of what was added. Collective: every rank must call.

    Args:    block: tensors of the same shapes on every rank, which nobody may change meanwhile;
             visit(owner, block, spare): returns what this rank adds to the block of rank `owner`, tensors of the same
             shapes at each call, or nothing; spare: a set of such tensors that may be overwritten, if there is one;
             join(mine, theirs): adds the second set to the first, in place.
    Returns: what all ranks have added to this rank's own block.
    """
    N, n = comm.size(group), comm.rank(group)
    at_hand = [x.contiguous() for x in block]
    # Two buffers take turns: one is visited, and sent on, while the other receives the next block.
    buffers = [[torch.empty_like(x) for x in at_hand] for _ in range(min(N - 1, 2))]
    parts: list[Tensor] = []
    free: list[list[Tensor]] = []
    for hop in range(N):
        following = buffers[hop % 2] if hop < N - 1 else []
        arriving = _like(parts, free)
        # The parts of the last hop belong to a block that has moved on to the next rank: they follow it there.
        requests = comm.ring_exchange([*(at_hand if following else []), *parts], [*following, *arriving], group)
        mine = visit((n - hop) % N, at_hand, free.pop() if free else None)
        for request in requests:
            request.wait()
        if arriving:  # what the ranks before this one have added to the block at hand
            join(mine, arriving)
            free += [arriving, parts]
        parts, at_hand = mine, following
    if N == 1 or not parts:
        return parts
    # The last block visited was the next rank's own: one more exchange brings every rank what is its own.
    home = _like(parts, free)
    for request in comm.ring_exchange(parts, home, group):
        request.wait()
    return home


def _like(parts: list[Tensor], free: list[list[Tensor]]) -> list[Tensor]:
    """Memory of the shapes of `parts`, used again where a set is free."""
    return free.pop() if parts and free else [torch.empty_like(x) for x in parts]
