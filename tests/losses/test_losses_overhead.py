"""Host overhead of losses: how many torch operations they need outside of tiles, and how many exchanges of ranks."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, blocks, build_loss
from disco_ds.losses.kernels import torch_tiles
from helpers.dist import run_ranks
from helpers.oracle import features

D = 512
TILES = ("exp_sums", "exp_weights", "log_sums", "log_weights", "sigmoid_weights")
LAUNCHES_NOTHING = {
    *(
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "empty",
        "empty_like",
        "expand",
        "permute",
        "promote_types",
    ),
    *(
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
    ),
}


class Calls(TorchDispatchMode):
    """Counts the operations that would launch a kernel on a GPU, except operations inside tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.in_tile = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        self.count += not self.in_tile and name not in LAUNCHES_NOTHING
        return func(*args, **(kwargs or {}))

    def leave_out(self, tile: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.in_tile = True
            try:
                return tile(*args, **kwargs)
            finally:
                self.in_tile = False

        return wrapped


@pytest.mark.parametrize("name", ["disco_fused", "inf_cl", "siglip"])
def test_a_pass_takes_few_calls_beside_its_tile(name, monkeypatch):
    """The chunks are as large as on a GPU: up to 32,768 rows of width 512 are one chunk, as in this small batch."""
    assert blocks.chunk_rows(D, torch.device("cuda")) == 32_768
    monkeypatch.setattr(blocks, "chunk_rows", lambda width, device: 32_768)
    calls = Calls()
    for tile in TILES:
        monkeypatch.setattr(torch_tiles, tile, calls.leave_out(getattr(torch_tiles, tile)))
    image, text = (x.requires_grad_() for x in features(64, D, torch.float32))
    scale, bias = (
        torch.tensor([14.3], requires_grad=True),
        torch.tensor([-10.0], requires_grad=True),
    )
    loss = build_loss(name)
    loss.accuracy = False  # as in steps that are not logged
    with calls:
        loss(Embeddings(image, text, scale, bias)).loss.backward()
    # On a GPU, two more operations round both sides to 16 bits.
    assert 20 < calls.count <= 110


@pytest.mark.parametrize("name", ["disco_fused", "inf_cl", "siglip", "nt_xent"])
def test_accuracies_are_left_out_where_nobody_asks(name):
    embeddings = Embeddings(
        *features(40, 16, torch.float32), torch.tensor([14.3]), torch.tensor([-10.0])
    )
    loss = build_loss(name, tile=(16, 16))
    whole = loss(embeddings)
    loss.accuracy = False
    without = loss(embeddings)
    assert set(whole.metrics) - set(without.metrics) == {"i2t_accuracy", "t2i_accuracy"}
    assert torch.equal(whole.loss, without.loss)


def exchanges() -> dict[str, tuple[int, int]]:
    """Return for each loss the number of ring exchanges without a gradient, and with forward and backward."""
    found = {}
    image, text = (x.requires_grad_() for x in features(8, 16, torch.float32))
    for name in ("inf_cl", "siglip"):
        bias = torch.tensor([-10.0], requires_grad=True)
        embeddings = Embeddings(image, text, torch.tensor([14.3]), bias)
        with mock.patch.object(comm, "_exchange", wraps=comm._exchange) as exchange:
            with torch.no_grad():
                build_loss(name)(embeddings)
            without = exchange.call_count
            build_loss(name)(embeddings).loss.backward()
        found[name] = without, exchange.call_count - without
    return found


def test_the_ring_makes_one_exchange_a_hop():
    for found in run_ranks(exchanges, 3):
        # Three hops, and one more that returns accumulated results to their rank. With a gradient, inf_cl goes around
        # the ring twice.
        assert found["inf_cl"] == (4, 8)
        assert found["siglip"][1] == 4
