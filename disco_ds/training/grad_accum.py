"""GradAccum, from the BASIC paper: one contrastive loss on the features of all micro-batches.

As in DisCo-CLIP's Algorithm 1, the autograd graph is always cut at the features:

1. `forward_all` runs the forward of every micro-batch without a graph.
2. `loss_at_features` computes one loss on all features, and the gradient of the loss with respect to the features.
3. `surrogates` runs the forward of each micro-batch again with the same random numbers, and yields a surrogate loss
   that backpropagates the micro-batch's rows of the gradient.

The last micro-batch is an exception: it keeps its graph in step 1 and needs no second forward, so a
batch with only one micro-batch needs only one forward. The caller backpropagates the surrogate losses: engine.py for
the trainer, with DeepSpeed, and custom_loop.py for custom training loops, with DeepSpeed, DDP or FSDP2.
"""

# Symbols in shapes: b = K x m samples on this rank, in K micro-batches of m samples; D is the feature width.

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, LossOutput, Teacher
from disco_ds.losses.kernels.tiles import full_dtype

Features = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""(features of the first side [m, D], features of the second side [m, D], scale [1], bias [1] or None)."""


class Rng:
    """The random states of the CPU and one device, copied when this object is created.

    Dropout, patch dropout and drop path draw their random numbers from these generators.

    Args:
        device: The device; None means this process's current device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._index = None if device is None else device.index
        self._cpu_state = torch.get_rng_state()
        self._device_state = get_accelerator().get_rng_state(self._index)

    def restore(self) -> None:
        """Set the generators back to the copied states."""
        torch.set_rng_state(self._cpu_state)
        get_accelerator().set_rng_state(self._device_state, self._index)


class Snapshot:
    """What a forward pass changes: the model's buffers, such as BatchNorm's running statistics, and the random states.

    Args:
        model: Its buffers are copied when this object is created.
        device: The device whose random state is copied, in addition to the CPU's. None means this process's current
            device.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device | None = None) -> None:
        # A forward cannot change an expanded buffer, because its elements share memory.
        self._copies = [
            (name, buffer, buffer.clone())
            for name, buffer in model.named_buffers()
            if not any(
                size > 1 and stride == 0
                for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
            )
        ]
        self._rng = Rng(device)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers and the random generators back to the copied values."""
        for _, buffer, copy in self._copies:
            buffer.copy_(copy)
        self._rng.restore()

    def warn_of_changed_buffers(self, model: torch.nn.Module) -> None:
        """Warn if the forwards since this snapshot changed a buffer of `model`, other than batch statistics."""
        norms = {name for name, module in model.named_modules() if isinstance(module, _NormBase)}
        changed = [
            name
            for name, buffer, copy in self._copies
            if name.rpartition(".")[0] not in norms and not torch.equal(buffer, copy)
        ]
        if changed:
            comm.warn(
                f"the forward changes the buffer {changed[0]}; if it also uses this buffer, as spectral_norm does, the "
                "gradient depends on the number of micro-batches"
            )


@dataclass(frozen=True)
class MicroFeatures:
    """The features of one micro-batch, and the random state from before the forward that computed them."""

    features: Any
    """(first side, second side, scale, bias), as in Features."""
    rng: Rng
    teacher: Sequence[Teacher] = ()
    """The teachers' features, without a graph."""
    index: Tensor | None = None
    """[m] sample ids."""
    group_id: Tensor | None = None
    """[m] int64, ids of the groups to which the samples belong; None if samples are not grouped."""


class Towers(Protocol):
    """Runs both towers on one micro-batch."""

    def __call__(self, batch: Any, keep_graph: bool) -> MicroFeatures:
        """Compute the features of a micro-batch. An autograd graph is needed only if `keep_graph` is True."""

    def again(self, batch: Any, first: MicroFeatures) -> Any:
        """Recompute the features of the trained towers, now with a graph. They equal the features in `first`.

        The features of a locked tower may be None.
        """


def forward_all(
    towers: Towers, micro_batches: Iterable[Any], num_micro_batches: int
) -> list[MicroFeatures]:
    """Compute the features of all micro-batches. Only the features of the last one have a graph.

    Args:
        towers: Called on each micro-batch.
        micro_batches: This rank's micro-batches. Each one is requested when the one before it has been used.
        num_micro_batches: K, their number. K and the size of a micro-batch are the same on every rank.
    """
    last = num_micro_batches - 1
    features = []
    for k, batch in enumerate(micro_batches):
        part = towers(batch, keep_graph=k == last)
        # The towers may build a graph even if keep_graph is False. Detaching the features frees it.
        if k != last:
            part = replace(part, features=tree_map_only(Tensor, Tensor.detach, part.features))
        features.append(part)
    return features


def loss_at_features(
    loss: Callable[[Embeddings], LossOutput], features: Sequence[MicroFeatures]
) -> tuple[LossOutput, Embeddings]:
    """Compute the loss of the global batch and its gradient with respect to the features. Collective if the loss is.

    Returns:
        The output of the loss, without its graph, and this rank's features of all micro-batches as leaf tensors, whose
        .grad is the gradient.
    """
    leaves = _join_leaves(features)
    out = loss(leaves)
    out.loss.backward()  # stops at the leaf tensors
    # Some losses keep the features that they have gathered in the graph. Free them before the backward of the towers.
    return replace(out, loss=out.loss.detach()), leaves


def _join_leaves(parts: Sequence[MicroFeatures]) -> Embeddings:
    """Concatenate the features of all micro-batches, and take the scale and the bias from the last micro-batch.

    The results are leaf tensors, so the backward of the loss stops at them. 16-bit features become fp32, so that their
    gradient, which is not multiplied by a loss scale yet, is not rounded. A leaf requires a gradient if the
    corresponding tensor of the last micro-batch does; the other micro-batches have no graph.
    """
    images, texts, scales, biases = zip(*(part.features for part in parts), strict=True)

    def leaf(value: Tensor, last: Tensor) -> Tensor:
        return value.detach().to(full_dtype(value)).requires_grad_(last.requires_grad)

    def join(ids: list[Tensor | None]) -> Tensor | None:
        found = [x for x in ids if x is not None]
        return torch.cat(found) if found else None

    return Embeddings(
        image=leaf(torch.cat(images), images[-1]),
        text=leaf(torch.cat(texts), texts[-1]),
        scale=leaf(scales[-1], scales[-1]),
        bias=None if biases[-1] is None else leaf(biases[-1], biases[-1]),
        index=join([part.index for part in parts]),
        group_id=join([part.group_id for part in parts]),
        teacher=[
            _join_teacher(each) for each in zip(*(part.teacher for part in parts), strict=True)
        ],
    )


def _join_teacher(parts: Sequence[Teacher]) -> Teacher:
    """Concatenate a teacher's features of all micro-batches. Its scale and bias are constants."""
    return replace(
        parts[0],
        image=torch.cat([part.image for part in parts]),
        text=torch.cat([part.text for part in parts]),
    )


def surrogates(
    towers: Towers, micro_batches: Iterable[Any], features: list[MicroFeatures], leaves: Embeddings
) -> Iterator[Tensor]:
    """Yield a surrogate loss for each micro-batch: the inner product of its features and their gradient.

    Its backward adds this micro-batch's contribution to the gradient of every parameter. The terms of
    scale and bias must count only once per batch, so their weight is 1 in the last micro-batch and 0 in
    the others. The others cannot simply omit these terms, because ZeRO 3 would apply a stale gradient
    to a parameter that is not in the graph.

    Args:
        towers: `towers.again` is called on each micro-batch except the last, when its surrogate is requested.
        micro_batches: The same micro-batches as in forward_all. The last one is not needed.
        features: What forward_all returned. The last element is removed, so that its graph can be freed.
        leaves: What loss_at_features returned.
    """
    # The last micro-batch comes first, so that its graph is freed before the next graph is built.
    last = len(features) - 1
    m = len(leaves.image) // len(features)
    yield _surrogate(features.pop().features, leaves, slice(last * m, None), once=1.0)
    for k, batch in zip(range(last), micro_batches, strict=False):
        again = towers.again(batch, features[k])
        yield _surrogate(again, leaves, slice(k * m, (k + 1) * m), once=0.0)


def _surrogate(features: Any, leaves: Embeddings, rows: slice, once: float) -> Tensor:
    """Return the surrogate loss of a micro-batch. `once` is the weight of the terms of scale and bias."""
    image, text, scale, bias = features
    terms = [
        _inner_product(image, leaves.image, rows),
        _inner_product(text, leaves.text, rows),
        _inner_product(scale, leaves.scale, slice(None), once),
        _inner_product(bias, leaves.bias, slice(None), once),
    ]
    return torch.stack([term for term in terms if term is not None]).sum()


def _inner_product(
    value: Tensor | None, leaf: Tensor | None, rows: slice, weight: float = 1.0
) -> Tensor | None:
    """Return weight x <value, leaf.grad[rows]> (inner product), or None if the value is not trained."""
    if value is None or leaf is None or not leaf.requires_grad:
        return None
    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    # In fp16, the sum could exceed 65,504.
    dtype = full_dtype(value)
    return weight * (value.to(dtype) * grad[rows].to(dtype)).sum()
