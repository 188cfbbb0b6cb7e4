"""open_clip's ClipLoss and SigLipLoss by signature and return, with this package's losses inside.

For a training loop that is not ours: under DistributedDataParallel, DeepSpeed or FSDP, all of which average gradients
over ranks, the parameters get the gradient of the global batch. docs/own_loop.md shows how they are put in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from disco_ds.distributed import comm
from disco_ds.losses.alike import check_alike, warn_of_unusual
from disco_ds.losses.base import Embeddings, build_loss


class _DropIn(nn.Module):
    """A loss by name behind open_clip's signature.

    Args:   rank, world_size: of the process group, with which they are only compared; None: not given.
    Options, beside those of the loss (docs/losses.md):
            loss: its name, as build_loss takes it;
            group: of torch.distributed, or of one dimension of a DeviceMesh; None: all ranks;
            check: compare the shapes of all ranks before each loss, at the cost of one small collective and a wait.
    """

    def __init__(self, rank: int | None, world_size: int | None, options: dict[str, Any]):
        super().__init__()
        self.given, self.calls = (rank, world_size), 0
        self.check, self.group = options.pop("check", True), options.get("group")
        self.loss = build_loss(options.pop("loss"), **options)
        self.loss.accuracy = False

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of the global batch. Collective, in forward and in backward.

        Args:    image_features, text_features [b, D] unit rows, the same b on every rank; logit_scale: exp of the
                 learned parameter, 0-d or [1]; logit_bias: 0-d or [1]; output_dict: return a dict, as open_clip asks.
        Returns: 0-d: this rank's share, whose mean over ranks is the global mean loss and whose gradients, averaged
                 over ranks, are those of the global batch; or {"contrastive_loss": that}.
        Raises:  ValueError on every rank alike for features that do not fit together.
        """
        scale = torch.as_tensor(logit_scale, device=image_features.device).reshape(1)
        if self.calls == 0:
            self._check_group()
            warn_of_unusual(image_features, text_features, scale, self.group)
        if self.check:
            check_alike(image_features, text_features, self.group)
        self.calls += 1
        bias = None if logit_bias is None else logit_bias.reshape(1)
        value = self.loss(Embeddings(image_features, text_features, scale, bias)).loss
        return {"contrastive_loss": value} if output_dict else value

    def _check_group(self) -> None:
        rank, world_size = self.given
        found = (comm.rank(self.group), comm.size(self.group))
        if (found[0] if rank is None else rank, found[1] if world_size is None else world_size) != found:
            raise ValueError(
                f"{type(self).__name__} was given rank {rank} of world_size {world_size}, and the process group has "
                f"rank {found[0]} of {found[1]}: initialise torch.distributed first, or leave both out"
            )


class ClipLoss(_DropIn):
    """open_clip's ClipLoss: InfoNCE over the global batch. Options: see _DropIn.

    local_loss, gather_with_grad and cache_labels choose in open_clip how it is computed, and with that whether its
    gradient is exact. They are accepted; here the gradient is that of the global batch at any setting.

    >>> features = torch.eye(4, 8)
    >>> loss = ClipLoss()(features, features, torch.tensor(5.0), output_dict=True)
    >>> round(loss["contrastive_loss"].item(), 4)
    0.02
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        use_horovod: bool = False,
        **options: Any,
    ):
        if use_horovod:
            raise ValueError("use_horovod=True: Horovod is not supported; start with torchrun or deepspeed")
        super().__init__(rank, world_size, {"loss": "disco_fused"} | options)


class SigLipLoss(_DropIn):
    """open_clip's SigLipLoss: the sigmoid loss over the global batch. Options: see _DropIn.

    cache_labels and dist_impl choose in open_clip how texts travel. They are accepted; here they go round a ring.
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        dist_impl: str | None = None,
        **options: Any,
    ):
        super().__init__(rank, world_size, {"loss": "siglip"} | options)
