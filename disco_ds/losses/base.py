"""The contract that every loss fulfills: inputs, outputs, guarantees, and selection by name in a recipe.

A test checks the following guarantee for every registered loss. `out.loss` is this rank's share of the loss: the mean
of the shares over all N ranks is the global mean loss. After backward, each feature's gradient is N times the gradient
that a single process would compute on the full batch. The gradient of the scale, averaged over ranks, equals the
full-batch gradient. An engine that averages parameter gradients over ranks therefore applies the exact gradient.

A loss class derives from Loss. It
- has a method `forward(embeddings) -> LossOutput`, which every rank calls once per step. LossOutput.metrics must
  include `loss`. The method may communicate: the backward of `gather` in distributed/comm.py computes the gradient
  that this contract requires. The constructor must not communicate;
- takes the recipe's `loss.options` as keyword arguments of its constructor;
- overrides `load_state_parts` if it has state to restore from checkpoints, and `cost` if `disco-ds plan` should
  know its memory and time.
Parameters of the loss itself are not trained. docs/extending.md has an example.
"""

# b local batch, B global = N b, D width, N ranks

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from disco_ds.distributed import comm
from disco_ds.names import did_you_mean, load_custom

TeacherWeight = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Teacher:
    """A teacher's features of the same samples. They are constants: no gradient flows into them."""

    image: Tensor
    """[b, D'], unit rows. D' may differ from the width of the student's features."""
    text: Tensor
    """[b, D'], unit rows."""
    scale: Tensor
    """[1], the teacher's logit scale, 1 / temperature."""
    bias: Tensor | None = None
    """[1], the teacher's logit bias, which only the sigmoid loss uses. None: 0."""

    def __post_init__(self) -> None:
        _check_features(self, "a teacher's ")


@dataclass(frozen=True)
class Embeddings:
    """This rank's features of one step, from all of its micro-batches. Every rank has the same number of rows, b."""

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
    group_id: Tensor | None = None
    """[b] int64, the group of each image-text pair. For example, pairs with the same caption form a group
    (docs/losses.md section 8)."""
    teacher: Sequence[Teacher] = ()
    """The features of the teachers, for a loss with the option teacher_weight (docs/losses.md section 9)."""

    def __post_init__(self) -> None:
        _check_features(self)
        image = self.image
        if not len(image):
            raise ValueError("image and text have no rows; pass at least one pair")
        for name in ("index", "group_id"):
            ids = getattr(self, name)
            if ids is not None and (ids.shape != image.shape[:1] or ids.dtype != torch.int64):
                raise ValueError(
                    f"{name} must be [b] = [{len(image)}] int64, got {tuple(ids.shape)} {ids.dtype}"
                )
        for teacher in self.teacher:
            if (teacher.image.dtype == torch.float64) != (image.dtype == torch.float64):
                raise ValueError(
                    f"the teacher's features are {teacher.image.dtype}, the student's {image.dtype}: use float64 for "
                    "both or for neither"
                )
            if len(teacher.image) != len(image):
                raise ValueError(
                    f"the teacher has {len(teacher.image)} rows, but image and text have {len(image)}; pass the "
                    "teacher's features of the same samples"
                )


def _check_features(features: Embeddings | Teacher, owner: str = "") -> None:
    """Check the features, the scale and the bias. Error messages begin with `owner`.

    Raises:
        ValueError: If one of them has an unexpected shape or dtype.
    """
    image, text = features.image, features.text
    alike = image.shape == text.shape and image.dtype == text.dtype
    if image.dim() != 2 or not alike or not image.is_floating_point():
        raise ValueError(
            f"{owner}image and text must be [b, D] tensors of the same shape and the same floating dtype, got "
            f"{tuple(image.shape)} {image.dtype} and {tuple(text.shape)} {text.dtype}"
        )
    for name in ("scale", "bias"):
        value = getattr(features, name)
        if value is not None and value.shape != (1,):
            raise ValueError(
                f"{owner}{name} must have shape [1], got {list(value.shape)}; reshape it with {name}.view(1)"
            )


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns."""

    loss: Tensor
    """0-d: this rank's share; its mean over ranks is the global mean loss."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """0-d tensors, the same on every rank. `loss` is required. The losses of this package add `i2t_accuracy` and
    `t2i_accuracy` if Loss.accuracy is True."""


@dataclass(frozen=True)
class LossCost:
    """The cost of a loss on one rank in one step, for `disco-ds plan`."""

    peak: int
    """Peak memory in bytes, including the gradients of the features but not the features themselves."""
    state: int
    """Bytes that the loss keeps between steps, on the device or the host."""
    state_on_host: bool
    flops: int
    precision: str
    """Precision of the matrix multiplications: fp32, tf32, fp16 or bf16."""
    received_bytes: int
    """Bytes of features and feature gradients that one rank receives in a step."""


class LossContractError(ValueError):
    """The return value of a loss does not fulfill the contract."""


class Loss(nn.Module):
    """Base class of the contrastive losses. The top of this file describes what a subclass must provide."""

    accuracy: bool = True
    """Whether forward also computes accuracies."""
    learns_scale: ClassVar[bool] = True
    """True if this loss trains the model's logit scale."""
    initial_scale: float = 1 / 0.07
    """Initial value of the logit scale."""
    teacher_weight: float | None = None
    """Weight of the teachers' targets, from 0 to 1; None if the loss learns from the pairs alone."""

    def initial_bias(self, global_batch: int) -> float | None:
        """Return the initial value of the logit bias, or None if the model needs no bias."""
        return None

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss. Every subclass overrides this."""
        raise NotImplementedError

    def __call__(self, embeddings: Embeddings) -> LossOutput:
        """Call forward and the module's hooks.

        Raises:
            ValueError: If the loss needs a teacher and the embeddings have none, or if the
                embeddings have a teacher that the loss does not use.
            LossContractError: If the output breaks the contract.
        """
        name = type(self).__name__
        if self.teacher_weight is None and embeddings.teacher:
            raise ValueError(
                f"Embeddings have a teacher, but {name} does not use it: set the option teacher_weight (from 0 to 1) "
                "of clip, disco, disco_fused, inf_cl or siglip"
            )
        if self.teacher_weight is not None and not embeddings.teacher:
            raise ValueError(
                f"{name} has teacher_weight={self.teacher_weight}, but Embeddings have no teacher"
            )
        if embeddings.teacher and not self.teacher_weight:
            embeddings = replace(embeddings, teacher=())
        out = super().__call__(embeddings)
        if problem := _find_problem(out, embeddings):
            raise LossContractError(
                f"{type(self).__module__}:{type(self).__qualname__}.forward {problem}"
            )
        return out

    def set_num_samples(self, num_samples: int, run_samples: int) -> None:
        """Prepare for data of this size. Called once, before the first forward.

        Args:
            num_samples: Number of samples in the data; all sample ids are below it. 0: the samples have not been
                counted.
            run_samples: Number of samples that the whole run trains on, counting repetitions.
        """

    def commit(self) -> None:
        """Apply the state that the last forward staged. Called after the optimizer step."""

    def cost(self, b: int, N: int, D: int, num_samples: int) -> LossCost | None:
        """Return the cost of this loss on one of N GPUs, or None if the cost is unknown.

        For the losses in this package, plan/losses.py computes the cost.

        Args:
            b: Rows per rank.
            N: Number of ranks.
            D: Width of the features.
            num_samples: Number of samples in the data.
        """
        return None

    def load_state_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        """Restore the state from a checkpoint, which may come from a run on a different number of ranks.

        A loss that keeps state overrides this.

        Args:
            parts: One state_dict() for each rank that saved the checkpoint. Tensors are memory-mapped.

        Raises:
            ValueError: If the checkpoint has state that this loss does not keep.
        """
        if parts[0]:
            raise ValueError(f"the checkpoint has state that {type(self).__name__} does not keep")


def _find_problem(out: Any, embeddings: Embeddings) -> str | None:
    """Return how the output of a loss breaks the contract, or None if the output is valid."""
    if not isinstance(out, LossOutput):
        return f"must return a LossOutput, but returned a {type(out).__name__}"
    if "loss" not in out.metrics:
        return f"must return the metric 'loss' (the mean over ranks), but the metrics are {sorted(out.metrics)}"
    trained = embeddings.image.requires_grad or embeddings.text.requires_grad
    if torch.is_grad_enabled() and trained and not out.loss.requires_grad:
        return "returned a loss without a gradient: compute it from the features without detaching them"
    return None


_REGISTRY: dict[str, type[Loss]] = {}
AnyLoss = TypeVar("AnyLoss", bound=type[Loss])


def register_loss(name: str) -> Callable[[AnyLoss], AnyLoss]:
    """Return a class decorator that registers a loss under this name.

    Raises:
        ValueError: If the name is taken.
    """

    def register(cls: AnyLoss) -> AnyLoss:
        if name in _REGISTRY:
            raise ValueError(
                f"loss {name!r} is registered twice: {_REGISTRY[name].__qualname__} and {cls.__qualname__}"
            )
        _REGISTRY[name] = cls
        return cls

    return register


def list_losses() -> list[str]:
    """Return the names of the registered losses."""
    return sorted(_REGISTRY)


def build_loss(name: str, **options: Any) -> Loss:
    """Build a loss. Not collective.

    Args:
        name: A registered name, or `package.module:Class` for a custom loss.
        **options: Keyword arguments of the loss's constructor.

    Raises:
        ValueError: For an unknown name or option, or a custom class that cannot be imported or is not a Loss.
        TypeError: For a missing option.

    >>> build_loss("disco_fused", tile=[1024, 1024]).initial_scale  # doctest: +ELLIPSIS
    14.28...
    >>> build_loss("disko")
    Traceback (most recent call last):
    ValueError: unknown loss 'disko'; did you mean disco?; known: clip, ...
    """
    cls = _find_class(name)
    is_custom = ":" in name
    known, takes_any = list_options(cls, resolve=not is_custom)
    unknown = sorted(options.keys() - known.keys())
    if unknown and not takes_any:
        raise ValueError(
            f"loss {name!r} has no option {', '.join(unknown)}; its options: {', '.join(known) or 'none'}"
        )
    if not is_custom:
        _check_types(known, options)
    return cls(**options)


def _check_types(known: dict[str, inspect.Parameter], options: dict[str, Any]) -> None:
    """Check the options of a registered loss against their type annotations, which `list_options` has resolved.

    Raises:
        ValueError: If an option has the wrong type, is out of range or is not finite.
    """
    rules = ConfigDict(strict=True, allow_inf_nan=False)
    for name, value in options.items():
        try:
            TypeAdapter(known[name].annotation, config=rules).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"loss.options.{name}={value!r}: {error.errors()[0]['msg']}") from None


def _find_class(name: str) -> type[Loss]:
    if ":" not in name:
        if name not in _REGISTRY:
            known = list_losses()
            hint = did_you_mean(name, known)
            raise ValueError(f"unknown loss {name!r}{hint}; known: {', '.join(known)}")
        return _REGISTRY[name]
    try:
        cls: Any = load_custom(name, base=Loss)
    except ValueError as error:
        raise ValueError(f"loss {error}") from error
    if cls.forward is Loss.forward:
        raise ValueError(f"loss {name} needs a method forward(embeddings) -> LossOutput")
    return cls


def list_options(
    cls: type[Loss], resolve: bool = False
) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the options of a loss by name, and whether its constructor also accepts unknown names.

    The options are the parameters of the constructor. If the constructor takes `**options`, the parameters of the base
    class's constructor are included. `resolve`: evaluate annotations that are strings.
    """
    options: dict[str, inspect.Parameter] = {}
    takes_any = False
    # Go from the class to its base classes, as long as each constructor takes `**options`.
    for owner in cls.__mro__[: cls.__mro__.index(Loss)]:
        if "__init__" not in vars(owner):
            continue
        constructor = vars(owner)["__init__"]
        _, *parameters = inspect.signature(constructor, eval_str=resolve).parameters.values()
        for option in parameters:
            if option.kind not in (option.VAR_POSITIONAL, option.VAR_KEYWORD):
                options.setdefault(option.name, option)
        takes_any = any(option.kind is option.VAR_KEYWORD for option in parameters)
        if not takes_any:
            break
    return options, takes_any


TIE = 1e-5
"""Similarities count as equal if they differ by less than this, multiplied by the scale.

This is more than the rounding errors of a matrix product of unit rows, so a copy of a sample always ties with it."""


def count_hits(largest: Tensor, pairs: Tensor, scale: Tensor) -> Tensor:
    """Count the rows in which a positive has a higher logit than all negatives. Pass the result to global_metrics.

    Args:
        largest: [1, b]: for each row, the highest logit of a negative. [2, b]: in addition, largest[1] is the
            highest logit of a positive other than the row's pair.
        pairs: [b], the logit of each row's positive pair.
        scale: [1] or [b], the logit scale.

    Returns:
        0-d.
    """
    best = pairs if len(largest) == 1 else torch.maximum(pairs, largest[1])
    return (largest[0] < best - TIE * scale.abs()).sum()


def global_metrics(
    loss: Tensor,
    hits: Sequence[Tensor],
    num_rows: int,
    group: Any,
    others: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Average the loss, the accuracies and other metrics over all ranks. Collective: one all_reduce.

    Args:
        loss: This rank's share, 0-d.
        hits: Results of count_hits, first for image to text, then for text to image. Empty: no accuracies.
        num_rows: Number of rows in which this rank counted hits. The accuracies are hits / num_rows.
        group: The process group; None: all ranks.
        others: This rank's shares of further metrics, 0-d.
    """
    accuracies = [x.float() / num_rows for x in hits]
    parts = dict(zip(("loss", "i2t_accuracy", "t2i_accuracy"), [loss, *accuracies], strict=False))
    parts |= others or {}
    mean = comm.all_reduce_sum(torch.stack([x.detach().float() for x in parts.values()]), group)
    return dict(zip(parts, (mean / comm.size(group)).unbind(), strict=True))


SAMPLE = 128
"""teacher_agreement is computed on this number of pairs, with the same number (at least 1) from every rank."""


def teacher_metrics(
    embeddings: Embeddings, parts: Sequence[Tensor], group: Any
) -> dict[str, Tensor]:
    """Return the metrics of a loss with teachers. Their means over ranks are the global values. Collective.

    Args:
        embeddings: Features of this rank.
        parts: This rank's shares, 0-d, of the loss of the pairs, the cross-entropy with the teachers' targets and,
            optionally, KL(teacher, student), averaged over the teachers.
        group: The process group; None: all ranks.

    Returns:
        pair_loss and teacher_loss. If `parts` has three entries, also teacher_kl and teacher_agreement: the fraction of
        images for which the student and the teachers choose the same text, among the first SAMPLE / N pairs of every
        rank.
    """
    names = ("pair_loss", "teacher_loss", "teacher_kl")
    metrics = dict(zip(names, parts, strict=False))
    if "teacher_kl" not in metrics:
        return metrics
    with torch.no_grad():
        count = min(len(embeddings.image), max(SAMPLE // comm.size(group), 1))
        student = _gather_logits(embeddings, count, group)
        teachers = [_gather_logits(each, count, group).softmax(1) for each in embeddings.teacher]
        agree = student.argmax(1) == torch.stack(teachers).sum(0).argmax(1)
        metrics["teacher_agreement"] = agree.double().mean()
    return metrics


def _gather_logits(features: Embeddings | Teacher, count: int, group: Any) -> Tensor:
    """Return the logits of the first `count` pairs of every rank, [N count, N count] in fp32. Collective."""
    image, text = (
        comm.gather(x[:count].detach().float(), group) for x in (features.image, features.text)
    )
    return features.scale.detach().float() * (image @ text.T)
