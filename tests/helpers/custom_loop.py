"""Models for tests of custom training loops: two towers, or one encoder for both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from disco_ds.distributed import comm

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
