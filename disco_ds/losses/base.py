"""What every loss takes, returns and promises, and how it is found: by a registered name, or `package.module:Class`.

The contract (a test runs it for every registered loss): `out.loss` is this rank's share, its mean over ranks is the
global mean loss; after backward the features carry N times the single-process full-batch gradient and the scale a
gradient whose mean over ranks is the true one. An engine that averages over ranks thus applies the true gradient.

A loss class derives from Loss and
- has a `forward(embeddings) -> LossOutput` that every rank calls once a step, with `loss` among its metrics. It may
  communicate (distributed/comm.py: `gather` has the gradient that the contract asks for); its constructor may not;
- takes its options, `loss.options` of a recipe, as keyword arguments of its constructor;
- overrides `load_state_parts`, where it has a state_dict that checkpoints have to bring back, and `cost`, where
  `disco-ds plan` is to know what it takes. Parameters of its own would not be trained.
docs/own_loss.md has an example.
"""

from __future__ import annotations

import difflib
import importlib
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


@dataclass(frozen=True)
class LossCost:
    """What a loss takes on one rank and in one step, for a plan."""

    peak: int
    """Bytes while it runs, beside the features; the features' gradients are in it."""
    state: int
    """Bytes it keeps between steps, wherever they lie."""
    state_on_host: bool
    flops: int
    precision: str
    """Of its products: fp32, tf32, fp16 or bf16."""
    received_bytes: int
    """By one rank, of features and their gradients."""


class Loss(nn.Module):
    """A contrastive loss. Subclasses implement forward(embeddings) -> LossOutput; see the top of this file."""

    accuracy: bool = True
    """Whether the next forward finds accuracies too; a trainer switches it off for steps that it does not log."""
    learns_scale: ClassVar[bool] = True
    """Whether the model's logit scale is trained by this loss."""
    initial_scale: float = 1 / 0.07
    """Where the logit scale starts."""
    initial_bias: ClassVar[float | None] = None
    """Where the logit bias starts; None: the model gets none."""

    def forward(self, embeddings: Embeddings) -> LossOutput:
        raise NotImplementedError

    def set_num_samples(self, num_samples: int, run_samples: int) -> None:
        """Told once, before the first forward: sample ids are below num_samples, and the run sees run_samples."""

    def commit(self) -> None:
        """Take over what the last forward and backward have staged, now that their step is done."""

    def cost(self, b: int, N: int, D: int, num_samples: int) -> LossCost | None:
        """What it takes on one of N GPUs, for b rows of width D each, in data of num_samples; None: nobody knows.

        The losses of this package leave it to plan/losses.py, which is measured.
        """
        return None

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
    """The loss of this name: a registered one, or `package.module:Class` for a person's own. Not collective.

    Raises: ValueError for an unknown name or option, naming the known ones; for a module that cannot be imported, or
            a class that is not there or not a Loss.

    >>> build_loss("disco_fused", tile=[1024, 1024]).initial_scale  # doctest: +ELLIPSIS
    14.28...
    >>> build_loss("disko")
    Traceback (most recent call last):
    ValueError: unknown loss 'disko'; did you mean disco? known: clip, ...
    """
    cls = _load_class(name) if ":" in name else _registered(name)
    known, open_ended = list_options(cls)
    unknown = sorted(set(options) - set(known))
    if unknown and not open_ended:
        raise ValueError(f"loss {name!r} has no option {', '.join(unknown)}; its options: {', '.join(known) or 'none'}")
    if missing := sorted(key for key, option in known.items() if option.default is option.empty and key not in options):
        raise ValueError(f"loss {name!r} needs the option {', '.join(missing)}: set loss.options.{missing[0]}")
    return cls(**options)


def list_options(cls: type[Loss]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The options of a loss by name, and whether it takes others too.

    They are the parameters of its constructor, and where that ends in `**options`, those of its base's constructor.
    """
    found: dict[str, inspect.Parameter] = {}
    open_ended = False
    for owner in cls.__mro__[: cls.__mro__.index(Loss)]:
        if "__init__" in vars(owner):
            _, *parameters = inspect.signature(vars(owner)["__init__"]).parameters.values()
            named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
            found |= {p.name: p for p in named if p.name not in found}
            open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
            if not open_ended:
                break
    return found, open_ended


def _registered(name: str) -> type[Loss]:
    if name not in _REGISTRY:
        close = difflib.get_close_matches(name, list_losses(), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"unknown loss {name!r}; {hint}known: {', '.join(list_losses())}")
    return _REGISTRY[name]


def _load_class(name: str) -> type[Loss]:
    """The class that `package.module:Class` names. Raises: ValueError."""
    module_name, _, class_name = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), class_name)):
        raise ValueError(f"loss {name!r} is not of the form package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"loss {name!r}: module {module_name} cannot be imported: {error}") from error
        remedy = "install it, or put the folder it is in on PYTHONPATH, on every host"
        raise ValueError(f"loss {name!r}: there is no module {error.name}; {remedy}") from None
    except Exception as error:
        # Whatever the module does as it is imported.
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"loss {name!r}: module {module_name} cannot be imported: {problem}") from error
    found = getattr(module, class_name, None)
    if found is None:
        classes = [
            key for key, value in vars(module).items() if _is_loss(value) and value.__module__ == module.__name__
        ]
        known = ", ".join(classes) or "none"
        raise ValueError(f"loss {name!r}: module {module_name} has no {class_name}; its losses: {known}")
    if not _is_loss(found):
        raise ValueError(
            f"loss {name!r}: {class_name} is not a Loss: derive it from disco_ds.losses.Loss and give it a "
            "forward(embeddings) -> LossOutput"
        )
    return found


def _is_loss(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Loss) and value.forward is not Loss.forward


def count_hits(largest: Tensor | None, pairs: Tensor) -> Tensor:
    """In how many rows the pair is above all others, 0-d; [0] where their maxima were not asked for."""
    return pairs.new_empty(0, dtype=torch.int64) if largest is None else (largest < pairs).sum()


def global_metrics(loss: Tensor, hits: Sequence[Tensor], num_rows: int, group: Any) -> dict[str, Tensor]:
    """Means over all ranks of the loss and of the hits (i2t, t2i; or of no elements) in `num_rows` rows of each rank.
    Collective, one all_reduce."""
    part = torch.stack([loss.detach().float(), *(x.float() / num_rows for x in hits if x.numel())])
    mean = comm.all_reduce_sum(part, group) / comm.size(group)
    return dict(zip(("loss", "i2t_accuracy", "t2i_accuracy"), mean.unbind(), strict=False))
