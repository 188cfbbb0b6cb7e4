"""What every loss takes, returns and promises, and the registry that finds it by name.

The contract (a test runs it for every registered loss): `out.loss` is this rank's share, its mean over ranks is the
global mean loss; after backward the features carry N times the single-process full-batch gradient and the scale a
gradient whose mean over ranks is the true one. An engine that averages over ranks thus applies the true gradient.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from disco_ds.distributed import comm


@dataclass(frozen=True)
class Embeddings:
    """The features of this rank, all its micro-batches together; b is the same on every rank."""

    image: Tensor
    """[b, D], unit rows."""
    text: Tensor
    """[b, D], unit rows; row i is the pair of image row i."""
    scale: Tensor
    """[1], exp(logit_scale) = 1 / temperature."""
    bias: Tensor | None = None
    """[1], of the sigmoid loss."""
    index: Tensor | None = None
    """[b] int64 sample ids, for losses that keep state per sample."""

    def __post_init__(self) -> None:
        if self.image.dim() != 2 or self.image.shape != self.text.shape:
            raise ValueError(
                f"image and text must be [b, D] of one shape, got {tuple(self.image.shape)}, {tuple(self.text.shape)}"
            )
        if self.image.dtype != self.text.dtype or not self.image.is_floating_point():
            raise ValueError(
                f"image and text must share a floating dtype, got {self.image.dtype} and {self.text.dtype}"
            )
        for name in ("scale", "bias"):
            value = getattr(self, name)
            if value is not None and value.shape != (1,):
                raise ValueError(f"{name} must have shape [1], got {tuple(value.shape)}")
        if self.index is not None and self.index.shape != self.image.shape[:1]:
            raise ValueError(f"index must be [b] = [{self.image.shape[0]}], got {tuple(self.index.shape)}")


@dataclass(frozen=True)
class LossOutput:
    loss: Tensor
    """0-d: this rank's share; its mean over ranks is the global mean loss."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """0-d each, the same on every rank: `loss`, and `i2t_accuracy`, `t2i_accuracy` unless Loss.accuracy is off."""


class Loss(nn.Module):
    """A contrastive loss. Subclasses register themselves and implement forward(embeddings) -> LossOutput."""

    accuracy: bool = True
    """Whether the next forward finds accuracies too; a trainer switches it off for steps that it does not log."""
    learns_scale: ClassVar[bool] = True
    initial_scale: float = 1 / 0.07
    initial_bias: ClassVar[float | None] = None

    def forward(self, embeddings: Embeddings) -> LossOutput:
        raise NotImplementedError

    def set_num_samples(self, num_samples: int, run_samples: int) -> None:
        """Told once, before the first forward: sample ids are below num_samples, and the run sees run_samples."""

    def commit(self) -> None:
        """Take over what the last forward and backward have staged, now that their step is done."""

    def load_state_parts(self, parts: list[dict[str, Any]]) -> None:
        """Restore from every rank's state_dict(), at any number of ranks. A loss that keeps state overrides this.

        Raises: ValueError for state that this loss does not keep.
        """
        if any(parts):
            raise ValueError(f"the checkpoint has state that {type(self).__name__} does not keep")


_REGISTRY: dict[str, type[Loss]] = {}
AnyLoss = TypeVar("AnyLoss", bound=type[Loss])


def register_loss(name: str) -> Callable[[AnyLoss], AnyLoss]:
    """Class decorator. Raises: ValueError if the name is taken."""

    def register(cls: AnyLoss) -> AnyLoss:
        if name in _REGISTRY:
            raise ValueError(
                f"loss {name!r} is registered twice: {_REGISTRY[name].__qualname__} and {cls.__qualname__}"
            )
        _REGISTRY[name] = cls
        return cls

    return register


def list_losses() -> list[str]:
    return sorted(_REGISTRY)


def build_loss(name: str, **options: Any) -> Loss:
    """The registered loss of this name.

    Raises: ValueError for an unknown name or option, naming the known ones.
    """
    if name not in _REGISTRY:
        close = difflib.get_close_matches(name, list_losses(), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"unknown loss {name!r}; {hint}known: {', '.join(list_losses())}")
    known = [key for key in inspect.signature(_REGISTRY[name].__init__).parameters if key != "self"]
    unknown = sorted(set(options) - set(known))
    if unknown and "kwargs" not in known:
        raise ValueError(f"loss {name!r} has no option {', '.join(unknown)}; its options: {', '.join(known) or 'none'}")
    return _REGISTRY[name](**options)


def count_hits(largest: Tensor | None, pairs: Tensor) -> Tensor:
    """In how many rows the pair is above all others, 0-d; [0] where their maxima were not asked for."""
    return pairs.new_empty(0, dtype=torch.int64) if largest is None else (largest < pairs).sum()


def global_metrics(loss: Tensor, hits: Sequence[Tensor], num_rows: int, group: Any) -> dict[str, Tensor]:
    """Means over all ranks of the loss and of the hits (i2t, t2i; or of no elements) in `num_rows` rows of each rank.
    Collective, one all_reduce."""
    part = torch.stack([loss.detach().float(), *(x.float() / num_rows for x in hits if x.numel())])
    mean = comm.all_reduce_sum(part, group) / comm.size(group)
    return dict(zip(("loss", "i2t_accuracy", "t2i_accuracy"), mean.unbind(), strict=False))
