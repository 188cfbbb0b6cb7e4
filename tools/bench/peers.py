"""Published losses of other authors, with one common signature. Each loss is called as its authors call it.

Every loss is built for a constant logit scale, because memeff needs a constant temperature. The features are unit rows
in fp32. Some losses are called with the features converted to another dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.distributed import comm

Method = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Maps image, text, scale and bias to this rank's share of the loss."""


@dataclass(frozen=True)
class Peer:
    build: Callable[[float], Method]
    """Builds the loss for this logit scale; raises ImportError if the package is not installed."""
    units: int
    """Number of b x B x D matrix products in forward and backward on one rank.

    b is the local batch, B the global batch and D the width of the features.
    """
    units_of_share: int | None
    """Like `units`, for each rank if there are several ranks. None: the loss supports only one rank."""


def open_clip(
    local: bool, autocast: bool = True, compiled: bool = False
) -> Callable[[float], Method]:
    """Return a builder of open_clip's loss.

    Args:
        local: Whether to enable open_clip's options local_loss and gather_with_grad.
        autocast: Whether to run the loss as open_clip's trainer does with --precision amp_bf16.
        compiled: Whether to use torch.compile.
    """

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
    """Build Inf-CL's loss.

    It uses Inf-CL's ring if there are several ranks. If there is one rank, it uses Inf-CL's kernel for one GPU, because
    the ring needs a process group.
    """
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
    """Return a builder of memeff's loss for features that are converted to `dtype`. memeff multiplies fp32 as tf32."""

    def build(scale: float) -> Method:
        from memeff import DistributedMemoryEfficientCLIPLoss, MemoryEfficientCLIPLoss

        kind = DistributedMemoryEfficientCLIPLoss if comm.size() > 1 else MemoryEfficientCLIPLoss
        loss = kind(temperature=1 / scale, normalized_inputs=True, stable=False)
        # The global mean is the sum of memeff's losses over the ranks, but it is the mean of our losses over the ranks.
        # So multiply by the number of ranks.
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
