"""Published losses by other authors, called as their authors call them, but with one common signature.

Each is built for a constant scale, because memeff needs a constant temperature. Each gets unit rows in fp32, which some
cast to another dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.distributed import comm

Method = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""image, text, scale, bias -> this rank's share of the loss."""


@dataclass(frozen=True)
class Peer:
    build: Callable[[float], Method]
    """Builds the loss for a scale; raises ImportError if the package is not installed."""
    units: int
    """Number of b x B x D products in forward and backward, if there is only one rank."""
    units_of_share: int | None
    """The same number on one of several ranks; None if the loss supports only one rank."""


def open_clip(
    local: bool, autocast: bool = True, compiled: bool = False
) -> Callable[[float], Method]:
    """Build open_clip's loss; with `autocast` it runs as in open_clip's trainer with --precision amp_bf16."""

    def build(_: float) -> Method:
        from open_clip.loss import ClipLoss

        loss = ClipLoss(
            local_loss=local, gather_with_grad=local, rank=comm.rank(), world_size=comm.size()
        )
        call = torch.compile(loss) if compiled else loss

        def run(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            with torch.autocast(image.device.type, torch.bfloat16, enabled=autocast):
                return call(image, text, scale)

        return run

    return build


def inf_cl(_: float) -> Method:
    """Build Inf-CL's ring, or its kernel for one GPU if there is one rank, because the ring needs a process group."""
    from inf_cl import cal_flash_loss, cal_inf_loss

    def one_way(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return (
            cal_inf_loss(a, b, scale=scale)
            if comm.size() > 1
            else cal_flash_loss(a, b, scale=scale).mean()
        )

    return lambda image, text, scale, bias: (
        (one_way(image, text, scale) + one_way(text, image, scale)) / 2
    )


def memeff(dtype: torch.dtype) -> Callable[[float], Method]:
    """Build memeff with correctly scaled gradients; fp32 features are multiplied in tf32."""

    def build(scale: float) -> Method:
        from memeff import DistributedMemoryEfficientCLIPLoss, MemoryEfficientCLIPLoss

        kind = DistributedMemoryEfficientCLIPLoss if comm.size() > 1 else MemoryEfficientCLIPLoss
        loss = kind(temperature=1 / scale, normalized_inputs=True, stable=False)
        # Over ranks, memeff's losses sum to the global mean, but ours average to it. The factor makes them comparable.
        return lambda image, text, scale, bias: comm.size() * loss(image.to(dtype), text.to(dtype))

    return build


def siglip_kernel(_: float) -> Method:
    from siglip_kernel import fused_siglip_loss

    return lambda image, text, scale, bias: fused_siglip_loss(
        image.bfloat16(), text.bfloat16(), scale.log()[0], bias[0]
    )


SOFTMAX = {
    "open_clip amp_bf16": Peer(open_clip(local=True), 6, 6),
    "open_clip amp_bf16 compiled": Peer(open_clip(local=True, compiled=True), 6, 6),
    "Inf-CL 1.2.1": Peer(inf_cl, 10, 10),
    "memeff 0.3.1 fp16": Peer(memeff(torch.float16), 5, 4),
    "memeff 0.3.1 tf32": Peer(memeff(torch.float32), 5, 4),
}
SIGMOID = {"siglip-kernel 0.1.2 bf16": Peer(siglip_kernel, 3, None)}
