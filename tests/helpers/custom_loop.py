"""Models for tests of custom training loops: two towers, or one encoder for both sides."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.training.custom_loop import contrastive_step
from helpers.one_step import LR
from helpers.towers import distance, masters, write_down

PER_RANK, WIDTH, D = 8, 12, 16
Batch = dict[str, Any]


class Drop(nn.Module):
    """Dropout that draws the same mask in every precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, device=x.device) > 0.3) / 0.7 if self.training else x


class Checkpointed(nn.Sequential):
    """A sequence of layers with activation checkpointing. Backward recomputes them, including their dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def encoder() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 24), nn.GELU(), Drop(), nn.LayerNorm(24), nn.Linear(24, D)
    )


class TwoTowers(nn.Module):
    """An image tower, a text tower, and the learned scale, which is part of the model because ZeRO 3 needs that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = encoder(), encoder()
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, other = (
            F.normalize(tower(x).float(), dim=-1)
            for tower, x in ((self.first, first), (self.second, second))
        )
        return one, other, self.log_scale.float().exp()


class BiEncoder(nn.Module):
    """One encoder for both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = encoder()

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.tower(x).float(), dim=-1)


MODELS: dict[str, type[nn.Module]] = {"image-text": TwoTowers, "text-text": BiEncoder}
SCALE = 9.0


def forward_of(
    kind: str, model: nn.Module, dtype: torch.dtype, autocast: bool = False
) -> Callable[[Batch], Any]:
    def forward(batch: Batch) -> tuple[Tensor, ...]:
        sides = batch["first"].to(dtype), batch["nested"][0].to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(*sides) if kind == "image-text" else tuple(model(side) for side in sides)

    return forward


def make(kind: str, variant: str = "") -> nn.Module:
    torch.manual_seed(7)
    model = MODELS[kind]()
    towers = ("tower",) if kind == "text-text" else ("first", "second")
    if variant == "checkpointing":
        for name in towers:
            setattr(model, name, Checkpointed(*getattr(model, name)))
    elif variant == "lora":
        from peft import LoraConfig, get_peft_model  # slow to import

        lora = LoraConfig(r=2, target_modules=["0", "4"], lora_dropout=0.2, init_lora_weights=False)
        for name in towers:
            setattr(model, name, get_peft_model(getattr(model, name), lora))
    return model


def my_batch() -> Batch:
    generator = torch.Generator().manual_seed(40 + comm.rank())
    first, second = (torch.randn(PER_RANK, WIDTH, generator=generator) for _ in range(2))
    return {"first": first, "nested": [second]}


def ds_config(stage: int, precision: str, K: int, **changes: Any) -> dict[str, Any]:
    N = comm.size()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} | changes
    return {
        "train_batch_size": PER_RANK * N,
        "train_micro_batch_size_per_gpu": PER_RANK // K,
        "gradient_accumulation_steps": K,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": precision == "bf16"},
        "zero_allow_untested_optimizer": True,
    }


def _forward(model: nn.Module, sides: list[Tensor]) -> Any:
    return model(*sides)


def contrastive_errors() -> dict[str, float]:
    """Return the error of the gradient of contrastive_step for each engine, compared with one process on the CPU."""
    device, rank, found = comm.local_device(), comm.rank(), {}
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(PER_RANK * comm.size(), WIDTH, generator=generator) for _ in range(2)]
    mine = [x[rank * PER_RANK : (rank + 1) * PER_RANK].to(device) for x in whole]
    alone = make("image-text").eval()  # without dropout
    first, second, scale = alone(*whole)
    write_down("disco", first, second, scale, None).backward()
    true: Any = {name: p.grad for name, p in alone.named_parameters()}
    for engine, K in itertools.product(("ddp", "fsdp2", "zero1", "zero3"), (1, 4)):
        model: Any = make("image-text").eval().to(device)
        wrapped, before = model, {}
        if engine == "ddp":
            wrapped = DistributedDataParallel(model)
        elif engine == "fsdp2":
            for part in (model.first, model.second, model):
                fully_shard(part)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            config = ds_config(int(engine[4]), "fp32", K)
            wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            wrapped.eval()
            before = masters(wrapped)
        loss = build_loss("disco_fused", precision="fp32", tile=(8, 8))
        forward = partial(_forward, wrapped)
        contrastive_step(wrapped, loss, mine, forward, micro_batches=K)
        if before:
            after = masters(wrapped)
            got = {name: (before[name] - after[name]) / LR for name in before}
            wrapped.destroy()
        else:
            grads = {name: p.grad for name, p in model.named_parameters()}
            got = {k: g.full_tensor() if engine == "fsdp2" else g for k, g in grads.items()}
        found[f"{engine} K={K}"] = distance({name: x.cpu() for name, x in got.items()}, true)
    return found
