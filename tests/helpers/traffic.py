"""Bytes that a rank receives in the collectives of a loss and of a training step, compared with the plan's."""

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from disco_ds.config import render_ds_config
from disco_ds.distributed import comm
from disco_ds.losses import build_loss, list_losses
from disco_ds.plan.losses import _count_work, loss_cost
from disco_ds.plan.speed import _count_engine
from disco_ds.training.engine import build_engine
from helpers.loss_errors import WIDTH_OF_ROWS, on_all_ranks
from helpers.one_step import COUNTS, SIZE
from helpers.oracle import features
from helpers.step import train_step
from helpers.towers import batches, build_towers, tiny_config
from tools.bench.loss import Received


class Traffic(Received):
    """Counts the bytes that this rank receives in large tensors, and lists all collectives.

    Args:
        smallest: Number of elements of the smallest tensor whose bytes count.
    """

    def __init__(self, smallest: int) -> None:
        super().__init__()
        self.smallest = smallest
        self.calls: list[tuple[str, int]] = []
        """Name of each collective, and its number of elements."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.bytes
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.name().startswith("c10d::") and self.bytes > before:
            size = sum(x.numel() for x in tree_leaves(args[0]) if isinstance(x, Tensor))
            self.calls.append((func.name(), size))
            if size < self.smallest:
                self.bytes = before
        return out


def loss_traffic(b: int) -> list[tuple[str, int, int, int]]:
    """Return (case, received bytes, those that follow from the algorithm, the plan's) of losses."""
    found, ranks, D = [], comm.size(), WIDTH_OF_ROWS
    tiled = [name for name in list_losses() if name not in ("clip", "disco")]
    cases: list[tuple[str, dict[str, Any]]] = [("clip", {}), ("disco", {})]
    cases += [(name, {"precision": "fp32"}) for name in tiled]
    cases += [("nt_xent", {"precision": "fp32", "ring": True}), ("inf_cl", {"precision": "bf16"})]
    for name, options in cases:
        loss = build_loss(name, **options)
        loss.set_num_samples(b * ranks, b * ranks)
        leaves = [
            *features(b * ranks, D, torch.float32),
            torch.tensor([14.3]),
            torch.tensor([-5.0]),
        ]
        with Traffic(b * D) as traffic:
            on_all_ranks(loss, leaves, index=torch.arange(b * ranks))
        work = _count_work(loss, ranks)
        assert work is not None
        ring = name in ("inf_cl", "siglip") or "ring" in options
        sent = 2 if options.get("precision") == "bf16" else 4
        features_bytes = (ranks - 1) * work[1] * b * D * sent
        # In a ring, the sums of a block also travel back to its rank.
        gradient_bytes = (ranks - 1 + ring) * work[2] * b * D * 4
        helper_bytes = 2 * (ranks - 1) * b * D * 8  # on_all_ranks gathers both gradients in float64
        planned = loss_cost(name, options, b, ranks, D, b * ranks).received_bytes
        exact = features_bytes + gradient_bytes
        assert planned == exact
        found.append((f"{name} {options}", int(traffic.bytes) - helper_bytes, exact, planned))
    return found


def step_traffic(model: str) -> list[tuple[str, int, int]]:
    """Return (case, received bytes, the plan's) of steps. At ZeRO 3, only the gradients are compared."""
    found: list[tuple[str, int, int]] = []
    ranks, device = comm.size(), comm.local_device()
    for stage, count in itertools.product(range(4), COUNTS):
        size = SIZE // ranks // count
        given = {"global_batch": SIZE, "micro_batch": size}
        config = tiny_config(model, {"zero_optimization": {"stage": stage}}, **given)
        rendered = render_ds_config(config, ranks)
        engine = build_engine(build_towers(config), config.optim, rendered)
        engine.train()
        trained = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        chunks = [{key: x.to(device) for key, x in chunk.items()} for chunk in batches(count, size)]
        with Traffic(500) as traffic:  # the features of a micro-batch are smaller
            train_step(engine, build_loss("clip").to(device), chunks, as_inputs, max_scale=1e9)
        towers: Any = SimpleNamespace(trained=trained)
        gradients, parameters = _count_engine(rendered, ranks, count, towers)
        print(f"ZeRO {stage} K={count}: {traffic.bytes:,} of {gradients:,} + {parameters:,} bytes")
        print(Counter(name for name, _ in traffic.calls))
        if stage < 3:
            found.append((f"ZeRO {stage} K={count}", int(traffic.bytes), gradients + parameters))
        else:
            scattered = [size for name, size in traffic.calls if "reduce_scatter" in name]
            found.append((f"ZeRO 3 K={count}", 4 * (ranks - 1) * sum(scattered), gradients))
        engine.destroy()
    return found


def as_inputs(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return batch["image"], batch["text"], batch["index"]
