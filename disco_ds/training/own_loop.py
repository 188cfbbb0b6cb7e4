"""The full-batch gradient in anybody's loop: grad_accum.py for any two towers under DeepSpeed, DDP or FSDP2.

docs/custom_loop.md shows its use. The trainer of this package has its own way in (step.py) to the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from disco_ds.config.ds_config import check_gradient
from disco_ds.distributed import comm
from disco_ds.distributed.deepspeed_quirks import widen_bucket
from disco_ds.losses import Embeddings, Loss, LossOutput
from disco_ds.losses.input_checks import check_alike, warn, warn_of_unusual
from disco_ds.training.engine import backward_and_step
from disco_ds.training.grad_accum import Features, MicroFeatures, Rng, accumulate
from disco_ds.training.micro_batches import DIVIDES, split

Forward = Callable[[Any], tuple[Tensor, ...]]
REPEAT_TOLERANCE = 0.05
"""Largest distance of a row of a repeated forward from the first, relative to its length; 16-bit kernels reach 0.01."""
RECHECK_STEPS = 200
"""Steps after which a forward is compared with its repetition again."""


def contrastive_step(
    model: Any,
    loss: Loss,
    batch: Any,
    forward: Forward,
    *,
    micro_batches: int = 1,
    scale: float | None = None,
    index: Tensor | None = None,
    backward: Callable[[Tensor], None] = torch.Tensor.backward,
) -> LossOutput:
    """Give the parameters the gradient of the global batch, whatever the number of ranks and micro-batches. Collective.

    Under a DeepSpeed engine the update is done too, for ZeRO needs engine.step() after each micro-batch. Everywhere
    else the gradients are left in the parameters, averaged over ranks, for the loop's own clipping and optimizer.

    Args:    model: a DeepSpeed engine, DistributedDataParallel, a module of FSDP2's fully_shard, or a plain module of
             one process; batch: this rank's b samples, in a form that `split` can divide, or any if K is 1; forward:
             the part of a micro-batch -> (features of one side [m, D], of the other [m, D]), then the learned scale
             and bias, if there are any; it calls `model`, and draws no random numbers but torch's; micro_batches: K,
             divides b; scale: of the logits, exp(logit_scale), where forward gives none;
             index [b]: sample ids, for FastCLIP; backward: what is called on each surrogate, such as
             `lambda x: scaler.scale(x).backward()`; not under DeepSpeed.
    Returns: the loss's output; `metrics["loss"]`, the mean over the global batch, is the figure to log.
    Raises:  ValueError on every rank alike for batches that do not fit together or do not divide into K; for K other
             than the engine's gradient_accumulation_steps, a step inside a step, a forward without a scale, or one that
             is another the second time; FloatingPointError from DeepSpeed engines, see backward_and_step.
    """
    history = _histories.setdefault(model, _History())
    if history.running:
        raise ValueError(
            "contrastive_step inside a contrastive_step of the same model: the loss takes all rows at once"
        )
    backend = _Engine(model) if isinstance(model, DeepSpeedEngine) else _Plain(model, backward)
    backend.check(micro_batches)
    device = None if micro_batches == 1 else find_device(model)
    parts, num_samples = _split_alike({"batch": batch, "index": index}, micro_batches, device)
    group = getattr(loss, "group", None)
    mode = (micro_batches, model.training)
    step = history.steps + 1
    due = step - history.checked.get(mode, -RECHECK_STEPS) >= RECHECK_STEPS
    towers = _Towers(forward, backend, micro_batches, scale, device, group, model if due else None)

    def agree(embeddings: Embeddings, out: LossOutput) -> None:
        if due:
            warn_of_unusual(embeddings.image, embeddings.text, embeddings.scale)

    def checked(embeddings: Embeddings) -> LossOutput:
        check_alike(embeddings.image, embeddings.text, group, step)
        if num_samples is not None and len(embeddings.image) != num_samples:
            raise ValueError(
                f"forward returned {len(embeddings.image)} rows for {micro_batches} micro-batches of "
                f"{num_samples // micro_batches} samples: it must return a row for each sample of its part; {DIVIDES}"
            )
        return loss(embeddings)

    history.running, history.steps = True, step
    try:
        done = accumulate(towers, checked, parts, backend.run, agree)
    finally:
        history.running = False
    if due:
        history.checked[mode] = step
    # Where a loss scaler skips the update, the state of the loss stays too.
    if done.result and (not _has_state(loss) or backend.will_be_applied()):
        loss.commit()
    return done.out


def _has_state(loss: Loss) -> bool:
    return type(loss).commit is not Loss.commit


@dataclass
class _History:
    """What is known of a model from the steps before."""

    steps: int = 0
    running: bool = False
    checked: dict[tuple[int, bool], int] = field(default_factory=dict)
    """(K, training mode) -> the last step whose forward was compared with its repetition, and that succeeded."""


_histories: WeakKeyDictionary[Any, _History] = WeakKeyDictionary()


def find_device(model: torch.nn.Module) -> torch.device:
    """Return the accelerator that the parameters are on, or where all are on the CPU, that of this process.

    Raises:
        ValueError: If they are on several accelerators.
    """
    found = {p.device for p in model.parameters() if p.device.type != "cpu"}
    if len(found) > 1:
        raise ValueError(
            f"the parameters are on {', '.join(sorted(map(str, found)))}: with several micro-batches only one "
            "device's random numbers are replayed; put the model on one device, or use one micro-batch"
        )
    return found.pop() if found else comm.local_device()


def _split_alike(
    batch: Any, count: int, device: torch.device | None
) -> tuple[list[Any], int | None]:
    """As split, but all ranks raise where one does: alone it would leave them waiting. Collective if count > 1."""
    if count == 1:
        return [batch], None
    done: tuple[list[Any], int] | None = None
    problem = ValueError(f"the batch of another rank does not divide into {count} micro-batches")
    try:
        done = split(batch, count)
    except ValueError as error:
        problem = error
    failed = comm.all_reduce_max(torch.tensor([float(done is None)], device=device)).item()
    if done is None or failed:
        raise problem
    return done


class _Towers:
    """A person's forward on one micro-batch, first and again. A `suspect` is watched for what is not repeated."""

    def __init__(
        self,
        forward: Forward,
        backend: Any,
        num_micro_batches: int,
        scale: float | None,
        device: torch.device | None,
        group: Any,
        suspect: Any,
    ):
        self.forward, self.backend, self.scale, self.device = forward, backend, scale, device
        self.K, self.group, self.suspect = num_micro_batches, group, suspect
        self.buffers = {} if suspect is None else {n: b.clone() for n, b in suspect.named_buffers()}

    def __call__(self, batch: Any, keep_graph: bool) -> MicroFeatures:
        rng = Rng(self.device)
        with torch.set_grad_enabled(keep_graph), self.backend.synchronized(last=self.K == 1):
            features = self._features(batch["batch"])
        if self.K > 1:
            self._refuse_change()
        if keep_graph and self.suspect is not None and comm.size(self.group) > 1:
            self.backend.warn_of_unaveraged(*features[2:])
        return MicroFeatures(
            features if keep_graph else tuple(_detach(x) for x in features), batch["index"], rng
        )

    def again(self, batch: Any, first: MicroFeatures) -> MicroFeatures:
        first.rng.restore()
        features = self._features(batch["batch"])
        if self.suspect is not None:
            self._refuse_other(features, first.features)
        return MicroFeatures(features, batch["index"], first.rng)

    def _features(self, batch: Any) -> Features:
        found = self.forward(batch)
        if not isinstance(found, tuple | list) or not 2 <= len(found) <= 4:
            got = (
                f"{len(found)} values"
                if isinstance(found, tuple | list)
                else f"a {type(found).__name__}"
            )
            raise ValueError(
                f"forward returned {got}; expected a tuple: the features of both sides, then the scale and the bias, "
                "if there are any"
            )
        image, text = found[:2]
        if len(found) == 2 and self.scale is None:
            raise ValueError(
                "forward returned no scale, and contrastive_step got none: return exp(logit_scale) as its third value, "
                "or pass scale=, such as 20.0"
            )
        scale = (
            found[2].reshape(1)
            if len(found) > 2
            else torch.tensor([self.scale], device=image.device)
        )
        return image, text, scale.float(), found[3].reshape(1).float() if len(found) > 3 else None

    def _refuse_other(self, again: Features, first: Features) -> None:
        """Raises: ValueError on every rank alike for features that a repeated forward does not repeat. Collective."""
        apart = []
        for new, old in zip(again[:2], first[:2], strict=True):
            lengths = torch.linalg.vector_norm(old.float(), dim=-1)
            distances = torch.linalg.vector_norm(new.detach().float() - old.float(), dim=-1)
            apart.append((distances / lengths.clamp_min(1e-12)).max())
        worst = comm.all_reduce_max(torch.stack(apart).max()).item()
        if not worst <= REPEAT_TOLERANCE:
            raise ValueError(
                f"forward gave other features for a micro-batch the second time ({worst:.2f} apart, relative to the "
                "length of a row): it draws random numbers that are not torch's, or depends on what it has seen before"
            )

    def _refuse_change(self) -> None:
        """Raises: ValueError for a module that notes what it sees: with GradAccum it would see everything twice."""
        for name, buffer in self.suspect.named_buffers() if self.suspect is not None else ():
            if name in self.buffers and not _equal(buffer, self.buffers[name]):
                raise ValueError(
                    f"{name} changes in forward, as a BatchNorm's statistics do: with several micro-batches it would "
                    "be updated twice a step, and the gradient would depend on how the batch is cut; call .eval() on "
                    "that layer, or use one micro-batch"
                )


def _equal(a: Tensor, b: Tensor) -> bool:
    """torch.equal, but a NaN equals a NaN."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _detach(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


class _Engine:
    """DeepSpeed: every micro-batch is a backward and a step, of which the last updates."""

    def __init__(self, engine: DeepSpeedEngine):
        self.engine = engine

    def check(self, micro_batches: int) -> None:
        steps = self.engine.gradient_accumulation_steps()
        if steps != micro_batches:
            raise ValueError(
                f"micro_batches is {micro_batches}, the engine's gradient_accumulation_steps {steps}: ZeRO would "
                "reduce too early or too late; set both to one number"
            )
        if self.engine.micro_steps % steps:
            raise ValueError(
                f"the engine is in the middle of a step ({self.engine.micro_steps % steps} of {steps} micro-batches): "
                "its gradients of micro-batches before would be mixed with this step's"
            )
        check_gradient(self.engine._config._param_dict)
        widen_bucket(self.engine)

    def synchronized(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def run(self, surrogates: Iterator[Tensor]) -> bool:
        """Return True if the update was applied."""
        return backward_and_step(self.engine, surrogates) is not None

    def will_be_applied(self) -> bool:
        return True

    def warn_of_unaveraged(self, *learned: Tensor | None) -> None:
        _warn_of_outside(self.engine, *learned)


class _Plain:
    """DDP, FSDP2 or neither: gradients are summed up, and averaged over ranks with the last micro-batch."""

    def __init__(self, model: Any, backward: Callable[[Tensor], None]):
        self.model, self.backward, self.K = model, backward, 1

    def check(self, micro_batches: int) -> None:
        self.K = micro_batches
        if micro_batches > 1 and getattr(self.model, "static_graph", False):
            raise ValueError(
                "DistributedDataParallel(static_graph=True) takes no gradients of several micro-batches: leave "
                "static_graph out, or use one micro-batch"
            )

    @contextmanager
    def synchronized(self, last: bool) -> Iterator[None]:
        """Whether a forward and its backward reduce gradients over ranks."""
        if hasattr(self.model, "set_requires_gradient_sync"):  # FSDP2
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
        with (
            nullcontext() if last or not hasattr(self.model, "no_sync") else self.model.no_sync()
        ):  # DDP
            yield

    def run(self, surrogates: Iterator[Tensor]) -> bool:
        """Return True: the update is the loop's own."""
        for k in range(self.K):
            with self.synchronized(last=k == self.K - 1):
                self.backward(next(surrogates))
        return True

    def will_be_applied(self) -> bool:
        """Return False where torch's GradScaler will skip the update: for a gradient that is not finite. Collective."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        parts = [
            grad.to_local() if hasattr(grad, "to_local") else grad for grad in gradients
        ]  # FSDP2's shards
        largest = torch.nn.utils.get_total_norm(
            [part for part in parts if part.numel()], norm_type=torch.inf
        )
        return not comm.all_reduce_max((~torch.isfinite(largest)).float()).item()

    def warn_of_unaveraged(self, *learned: Tensor | None) -> None:
        """Warn of gradients that no wrapper averages over ranks."""
        if hasattr(self.model, "set_requires_gradient_sync"):
            return  # FSDP2's forward has other parameters than the module
        if hasattr(self.model, "no_sync"):
            _warn_of_outside(self.model, *learned)
        elif comm.rank() == 0:
            warn(
                "the gradients of a plain module are not averaged over ranks: pass the DistributedDataParallel module, "
                "or FSDP2's root module (fully_shard(model) after its parts), unless the loop averages them itself"
            )


def _warn_of_outside(model: Any, *learned: Tensor | None) -> None:
    """Warn of a learned scale or bias that depends on no parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    for name, value in zip(("scale", "bias"), learned, strict=False):
        leaves = _find_leaves(value)
        if leaves and not any(id(leaf) in own for leaf in leaves) and comm.rank() == 0:
            warn(
                f"the {name} returned by forward is learned, but not a part of the model: its gradient is not averaged "
                "over ranks; make it a parameter of the module that is wrapped, and return it from its forward"
            )


def _find_leaves(value: Tensor | None) -> list[Tensor]:
    """Return the tensors whose gradient the backward of `value` computes."""
    found, seen = [], set()
    open_nodes = [] if value is None else [value.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            open_nodes += [following for following, _ in node.next_functions]
    return found
