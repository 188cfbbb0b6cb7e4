"""The contract of every loss: what it takes, returns and guarantees, and how a recipe names it.

The guarantee, which a test checks for every registered loss: `out.loss` is this rank's share, whose mean over ranks is
the global mean loss. After backward, the features carry N times the single-process full-batch gradient, and the scale a
gradient whose mean over ranks is the true one. An engine that averages over ranks thus applies the true gradient.

A loss class derives from Loss and
- has a `forward(embeddings) -> LossOutput` that every rank calls once a step, with `loss` among its metrics. It may
  communicate (`gather` in distributed/comm.py has the gradient that the contract needs); its constructor may not;
- takes its options, `loss.options` of a recipe, as keyword arguments of its constructor;
- overrides `load_state_parts` if it has state to be restored from checkpoints, and `cost` if `disco-ds plan` is to
  know its memory and time. Parameters of its own would not be trained.
docs/own_loss.md has an example.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from disco_ds.distributed import comm


@dataclass(frozen=True)
class Embeddings:
    """The features of this rank, of all its micro-batches; b is the same on every rank."""

    image: Tensor
    """[b, D], unit rows."""
    text: Tensor
    """[b, D], unit rows; row i belongs to image row i."""
    scale: Tensor
    """[1], exp(logit_scale) = 1 / temperature."""
    bias: Tensor | None = None
    """[1], the logit bias of the sigmoid loss."""
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
    """The cost of a loss on one rank in one step, for `disco-ds plan`."""

    peak: int
    """Bytes at its highest, beside the features; the features' gradients are included."""
    state: int
    """Bytes that it keeps between steps, on the device or the host."""
    state_on_host: bool
    flops: int
    precision: str
    """Precision of its products: fp32, tf32, fp16 or bf16."""
    received_bytes: int
    """Bytes of features and their gradients that one rank receives."""
    while_computing: bool = False
    """True if they are received while the loss computes, as around a ring."""


class LossContractError(ValueError):
    """A loss returned what the contract does not allow."""


def _find_problem(out: Any, embeddings: Embeddings) -> str | None:
    """What breaks the contract in the output of a loss; None: nothing."""
    if not isinstance(out, LossOutput):
        return f"must return a LossOutput, and returned a {type(out).__name__}"
    named = {"the loss": out.loss, **{f"the metric {name!r}": value for name, value in out.metrics.items()}}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dim():
            got = list(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            return f"must return 0-d tensors, and {name} is {got}"
    if "loss" not in out.metrics:
        return f"must return the metric 'loss', the mean over ranks, and returned {sorted(out.metrics)}"
    needed = torch.is_grad_enabled() and (embeddings.image.requires_grad or embeddings.text.requires_grad)
    if needed and not out.loss.requires_grad:
        return "returned a loss without a gradient: it must depend on the features, undetached"
    return None


class Loss(nn.Module):
    """A contrastive loss. Subclasses implement forward(embeddings) -> LossOutput; see the top of this file."""

    accuracy: bool = True
    """Compute accuracies in the next forward; the trainer switches this off for steps that it does not log."""
    learns_scale: ClassVar[bool] = True
    """True if this loss trains the model's logit scale."""
    initial_scale: float = 1 / 0.07
    """Initial value of the logit scale."""
    initial_bias: ClassVar[float | None] = None
    """Initial value of the logit bias; None: the model gets none."""

    def forward(self, embeddings: Embeddings) -> LossOutput:
        raise NotImplementedError

    def __call__(self, embeddings: Embeddings) -> LossOutput:
        """forward and the hooks. Raises: LossContractError for an output that breaks the contract."""
        out = super().__call__(embeddings)
        if problem := _find_problem(out, embeddings):
            raise LossContractError(f"{type(self).__module__}:{type(self).__qualname__}.forward {problem}")
        return out

    def set_num_samples(self, num_samples: int, run_samples: int) -> None:
        """Called once before the first forward: ids are below num_samples, and the run sees run_samples in all."""

    def commit(self) -> None:
        """Apply the state that the last forward and backward have staged. Called once their step is done."""

    def cost(self, b: int, N: int, D: int, num_samples: int) -> LossCost | None:
        """The cost on one of N GPUs with b rows of width D each, and num_samples in the data; None: unknown.

        The costs of this package's own losses are in plan/losses.py.
        """
        return None

    def load_state_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        """Restore from the state_dict() of every rank, at any number of ranks. A loss that keeps state overrides this.

        A part is read from the disk when it is asked for; of hundreds of ranks, each should ask for what it needs.

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
    """Build the loss of this name: a registered one, or `package.module:Class` for a user's own. Not collective.

    Raises: ValueError for an unknown name or option, naming the known ones; for a module that cannot be imported; for a
            class that does not exist or is not a Loss.

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
    try:
        return cls(**options)
    except Exception as error:
        if ":" not in name or isinstance(error, ValueError):
            raise
        *_, last = traceback.extract_tb(error.__traceback__)
        where = f"{Path(last.filename).name}, line {last.lineno}"
        raise ValueError(f"loss {name!r} cannot be constructed: {type(error).__name__}: {error} ({where})") from error


def list_options(cls: type[Loss]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The options of a loss by name, and whether it takes others too.

    They are the parameters of its constructor, and where that ends in `**options`, those of its base's constructor.
    """
    found: dict[str, inspect.Parameter] = {}
    open_ended = False
    # From the class down to its bases, as long as each constructor passes on what it does not know.
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
        # Not config's did_you_mean: losses must work without the settings.
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
        # The module may be there, and miss another one that it imports itself.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"loss {name!r}: module {module_name} cannot be imported: {error}") from error
        remedy = "install it, or put the folder it is in on PYTHONPATH, on every host"
        raise ValueError(f"loss {name!r}: there is no module {error.name}; {remedy}") from None
    except Exception as error:
        # A user's module may raise anything while it is imported.
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
    """Number of rows whose pair is above all others, 0-d; an empty tensor where the maxima were not computed."""
    return pairs.new_empty(0, dtype=torch.int64) if largest is None else (largest < pairs).sum()


def global_metrics(loss: Tensor, hits: Sequence[Tensor], num_rows: int, group: Any) -> dict[str, Tensor]:
    """Means over all ranks of the loss, and of the accuracies where they were computed. Collective, one all_reduce.

    Args: hits: count_hits of i2t and t2i on this rank, in `num_rows` rows each.
    """
    part = torch.stack([loss.detach().float(), *(x.float() / num_rows for x in hits if x.numel())])
    mean = comm.all_reduce_sum(part, group) / comm.size(group)
    return dict(zip(("loss", "i2t_accuracy", "t2i_accuracy"), mean.unbind(), strict=False))
