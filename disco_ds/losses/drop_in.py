"""Replacements for open_clip's ClipLoss and SigLipLoss, with the same arguments and return values.

They are for training loops outside this package. DistributedDataParallel, DeepSpeed and FSDP average gradients over
ranks; with these losses, that average is the gradient of the global batch. docs/custom_loop.md shows how to use them.
check_alike and warn_of_unusual, which find mistakes of such loops, also serve contrastive_step
(training/custom_loop.py).
"""

# b local batch, B global = N b, D width, N ranks

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from disco_ds.distributed import comm
from disco_ds.losses.base import Embeddings, Teacher, build_loss

NORM_TOLERANCE = 0.02
"""A feature's norm may deviate from 1 by this much without a warning; rounding to bf16 causes up to 0.004."""
LARGEST_LOG = math.log(100.0) + 1e-3
"""Logarithm of CLIP's largest logit scale, 100, plus a small margin.

If a logit scale is not above this value, the caller has probably passed its logarithm by mistake.
"""


class _DropIn(nn.Module):
    """A loss of this package with the arguments of open_clip's losses.

    Args:
        rank: The expected rank in the process group. An error is raised if the actual rank differs. None: no check.
        world_size: The expected size of the process group, checked in the same way. None: no check.
        options: Options of the loss (docs/losses.md), and these:
            loss: name of the loss, as for build_loss;
            group: process group of torch.distributed, or of one dimension of a DeviceMesh, such as
                mesh.get_group("data"); None: all ranks;
            check: before computing the loss, check that all ranks pass features of the same shape, and the same
                scale and bias. This costs one small collective, for which the host waits.

    FastCLIP's losses cannot be used here, because forward takes no sample ids. Use build_loss and Embeddings instead.
    """

    global_mean = False
    """Whether forward returns the global mean loss instead of this rank's share. The gradient does not differ."""

    def __init__(self, rank: int | None, world_size: int | None, options: dict[str, Any]):
        super().__init__()
        self.expected = rank, world_size
        self.is_first_call = True
        self.check = options.pop("check", True)
        self.group = options.get("group")
        self.loss = build_loss(options.pop("loss"), **options)
        self.loss.accuracy = False

    @torch.compiler.disable  # torch 2.14 may compile it into a loss with twice the gradient
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        group_id: Tensor | None = None,
        teacher: Sequence[Teacher] = (),
    ) -> Tensor | dict[str, Tensor]:
        """Compute the loss of the global batch. Collective, and so is backward. Call backward once per loss.

        Args:
            image_features: [b, D], unit rows, with the same b on every rank.
            text_features: [b, D], unit rows.
            logit_scale: exp of the learned parameter, 0-d, [1] or a number.
            logit_bias: 0-d, [1] or a number; None for a bias of zero.
            output_dict: Return a dict, as open_clip does.
            group_id: [b] int64, the group of each image-text pair, for the option `same_group`.
            teacher: Features of teachers for the same samples, for the option `teacher_weight`.

        Returns:
            A 0-d loss, or {"contrastive_loss": loss} with output_dict. The mean of the loss over ranks is the
            global mean loss. The gradients, averaged over ranks, are those of the global batch.

        Raises:
            ValueError: If the features have no rows.
            ValueError: If `rank` or `world_size` differs from the actual value.
            ValueError: With `check`, on every rank: if the ranks pass features of different shapes, different scales,
                different biases or different numbers of teachers, or if only some ranks pass group_id.
        """
        device = image_features.device
        scale = torch.as_tensor(logit_scale, device=device).reshape(1)
        if self.is_first_call:
            self._check_group()
            warn_of_unusual(image_features, text_features, scale, self.group)
            self.is_first_call = False
        bias = torch.zeros_like(scale)
        if logit_bias is not None:
            bias = torch.as_tensor(logit_bias, device=device).reshape(1)
        if self.check:
            check_alike(image_features, text_features, scale, bias, group_id, self.group, teacher)
        out = self.loss(
            Embeddings(image_features, text_features, scale, bias, None, group_id, teacher)
        )
        # InfoNCE does not depend on the bias, but DistributedDataParallel waits for a gradient of
        # every parameter.
        value = out.loss + 0 * bias.sum()
        if self.global_mean:
            value = out.metrics["loss"].to(value.dtype) + (value - value.detach())
        return {"contrastive_loss": value} if output_dict else value

    def _check_group(self) -> None:
        actual = comm.rank(self.group), comm.size(self.group)
        if any(x not in (None, y) for x, y in zip(self.expected, actual, strict=True)):
            raise ValueError(
                f"{type(self).__name__} was given (rank, world_size) {self.expected}, but the "
                f"process group has {actual}; initialize torch.distributed first, or omit both arguments"
            )


class ClipLoss(_DropIn):
    """open_clip's ClipLoss: InfoNCE over the global batch. _DropIn describes the further options.

    In open_clip, local_loss, gather_with_grad and cache_labels select how the loss is computed, which also decides
    whether its gradient is exact. Here the gradient is always the exact gradient of the global batch. As in
    open_clip, every rank returns the global mean loss or, with local_loss=True, the mean over its own pairs. A
    logit_bias has no effect, because it cancels in both softmaxes.

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
            raise ValueError(
                "use_horovod=True: Horovod is not supported; start the ranks with torchrun or deepspeed"
            )
        super().__init__(rank, world_size, {"loss": "disco_fused"} | options)
        self.global_mean = not local_loss


class SigLipLoss(_DropIn):
    """open_clip's SigLipLoss: the sigmoid loss over the global batch. _DropIn describes the further options.

    cache_labels and dist_impl are accepted for compatibility and ignored. Texts are always sent around a ring.
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


def check_alike(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    group_id: Tensor | None,
    group: Any = None,
    teacher: Sequence[Any] = (),
) -> None:
    """Check that all ranks pass the same kind of inputs. Collective: one small all_reduce.

    Without this check, ranks with different inputs would hang in a collective or compute a wrong loss.

    Args:
        image: Image features.
        text: Text features.
        scale: 0-d or [1], the logit scale.
        bias: 0-d or [1], the logit bias. None counts as 0.
        group_id: Group ids. Their values are not compared, only whether all ranks or none pass them.
        group: The process group; None: all ranks.
        teacher: The teachers' features, objects of base.Teacher.

    Raises:
        ValueError: On every rank, if the inputs of the ranks differ.
    """
    if comm.size(group) == 1:
        return
    features = [image, text, *(x for each in teacher for x in (each.image, each.text))]
    form = hash((*(x.shape for x in features), group_id is None)) % 2**31
    learned = [scale, torch.zeros(1) if bias is None else bias]
    values = torch.cat(
        [x.detach().double().reshape(1).to(image.device) for x in (torch.tensor(form), *learned)]
    )
    most, least = comm.all_reduce_max(torch.stack([values, -values]), group).tolist()
    if most[0] != -least[0]:
        raise ValueError(
            f"features, teachers or group_id differ between ranks: rank {comm.rank(group)} has images "
            f"{list(image.shape)}, texts {list(text.shape)}, {len(teacher)} teachers and "
            f"{'no' if group_id is None else 'a'} group_id; pass the same number of rows, teachers of the same widths, "
            "and group_id on every rank or on none, and drop the last uneven batch (drop_last=True)"
        )
    for name, largest, negative in zip(("scale", "bias"), most[1:], least[1:], strict=True):
        smallest = -negative
        # Different GPUs may round exp(log_scale) differently.
        if largest - smallest > 1e-5 * max(abs(smallest), abs(largest)):
            raise ValueError(
                f"the logit {name} differs between ranks, from {smallest:.7g} to {largest:.7g}, because its "
                f"gradient is not averaged over ranks; make the {name} a parameter of the wrapped module, and return "
                "it from the module's forward"
            )


def warn_of_unusual(image: Tensor, text: Tensor, scale: Tensor, group: Any = None) -> None:
    """Warn on rank 0 about features that are not unit rows, and about a logit scale that looks like a logarithm."""
    if comm.rank(group) > 0:
        return
    unit = True
    for name, rows in (("image", image), ("text", text)):
        worst = (rows.detach().float().norm(dim=-1) - 1).abs().max().item() if len(rows) else 0.0
        if worst > NORM_TOLERANCE:
            unit = False
            warnings.warn(
                f"{name} features are not normalized, and the loss depends on their norms: the norm of a row is "
                f"{worst:.2f} away from 1; normalize them with F.normalize(features, dim=-1)",
                stacklevel=2,
            )
    if unit and scale.item() <= LARGEST_LOG:
        warnings.warn(
            f"the logit scale is {scale.item():.2f}, which looks like a logarithm; pass "
            "logit_scale.exp(), which starts at 14.3 in CLIP and 10 in SigLIP",
            stacklevel=2,
        )
