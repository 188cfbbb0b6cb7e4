"""Trace the memory and FLOPs that the towers need for a micro-batch.

The trace runs the recipe's model through the passes of a training step on fake tensors, which have
shapes but no memory. The fake tensors are on the CPU, because a backward pass on a fake GPU needs a driver.
tools/check/memory.py runs the same passes on real tensors.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from disco_ds.config import Config
from disco_ds.data import MicroBatch
from disco_ds.losses import build_loss
from disco_ds.models.clip import (
    build_model,
    pixel_affine,
    read_preprocessing,
    read_text_size,
)
from disco_ds.models.fast.texts import find_counter
from disco_ds.models.param_groups import PARAMETER_DTYPES
from disco_ds.training.engine import EngineTowers, prepare

Watch = Callable[[str], AbstractContextManager[None]]
ERRORS = 6
"""Memory is planned for a micro-batch of long texts.

The mean number of tokens in this micro-batch is this many standard errors above the mean of all texts.
"""


@dataclass(frozen=True)
class Towers:
    """What the towers need for one micro-batch: memory, and FLOPs of matrix multiplications.

    The bytes of the passes do not include the parameters, their gradients or the uint8 pixels.
    """

    replay: int
    """Peak bytes of the forward pass without an autograd graph."""
    forward: int
    """Peak bytes of the forward pass with an autograd graph."""
    held: int
    """Bytes that the autograd graph holds between the forward and the backward pass."""
    backward: int
    """Peak bytes of the backward pass."""
    replay_flops: int
    """FLOPs of the forward pass without an autograd graph."""
    flops: int
    """FLOPs of the forward pass with an autograd graph and of the backward pass, including recomputation."""
    trained: int
    """Number of trained parameters."""
    frozen: int
    """Number of frozen parameters."""
    largest: int
    """Number of elements of the largest trained parameter."""
    width: int
    """Width of the features."""
    sample: int
    """Bytes per decoded sample: uint8 image, tokens, id, epoch, view key and stored embeddings of teachers."""
    teacher: int = 0
    """Number of parameters of the teacher; 0 if there is none."""
    teacher_width: int = 0
    """Width of the teacher's features."""

    def interpolate(self, other: Towers, fraction: float) -> Towers:
        """Interpolate linearly between the values of self (fraction = 0) and of `other` (fraction = 1). Round up."""
        values = zip(astuple(self), astuple(other), strict=True)
        return Towers(*(math.ceil(a + fraction * (b - a)) for a, b in values))


class Allocations(TorchDispatchMode):
    """Dispatch mode that counts FLOPs and the bytes of tensors.

    A tensor is counted if it is created while the mode is active, and only until it is freed.

    Alternatives considered: torch's MemTracker (it refuses a tower that is called twice) and
    FlopCounterMode (it keeps tensors alive).

    Args:
        known: Existing tensors, which are not counted.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.current = self.peak = self.flops = 0
        self._known = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in known})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                continue
            # Views share one storage. Count it once, and subtract it when the last tensor that uses it is freed.
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known[storage] = True
                self.current += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.current)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out

    def _free(self, num_bytes: int) -> None:
        self.current -= num_bytes


@dataclass
class _Engine:
    """Stand-in for DeepSpeed's engine that provides only what EngineTowers needs."""

    module: nn.Module
    precision: str
    """Precision of the run: autocast, bf16, fp16 or fp32."""

    def __call__(self, **inputs: Tensor) -> Any:
        device = next(iter(inputs.values())).device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.precision == "autocast"):
            return self.module(**inputs)


def run_passes(config: Config, model: nn.Module, batch: MicroBatch, watch: Watch) -> int:
    """Run the forward and backward passes of training/step.py on one micro-batch.

    Args:
        config: The recipe.
        model: Its model, in training mode.
        batch: The micro-batch.
        watch: Called before each pass with the name of the field of Towers that the pass measures. The pass runs in
            the context manager that this function returns.

    Returns:
        The width of the features.
    """
    engine: Any = _Engine(model, config.precision)
    forward = EngineTowers(engine, partial(prepare, config))
    with watch("replay"):
        forward(batch, keep_graph=False)
    with watch("forward"):
        features = forward(batch, keep_graph=True).features
    # This block creates only scalars, so the memory counted here is what the graph holds.
    with watch("held"):
        sums = [x.sum() for x in features if x is not None and x.requires_grad]
        surrogate = torch.stack(sums).sum()
    with watch("backward"):
        surrogate.backward()
    return next(x.shape[1] for x in features if x is not None)


def prepare_model(config: Config) -> nn.Module:
    """Build the recipe's model in training mode and in the run's dtype, with gradients allocated.

    The model's weights are random.
    """
    loss = build_loss(config.loss.name, **config.loss_options)
    # Pretrained weights make no difference here, and a compiled model cannot be traced.
    settings = config.model.replace(pretrained=None, pretrained_image=None, compile=False)
    before = torch.get_default_dtype()
    # Fake parameters cannot be cast in place, so they are created in the right dtype.
    torch.set_default_dtype(PARAMETER_DTYPES[config.precision])
    try:
        bias = loss.initial_bias(config.global_batch)
        model = build_model(settings, loss.initial_scale, bias, loss.learns_scale)
    finally:
        torch.set_default_dtype(before)
    model.train()
    # plan/memory.py already counts the gradients. They are allocated here, before the trace begins, so that the traced
    # backward does not show them as new memory.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return model


def make_batch(
    model: nn.Module,
    m: int,
    device: torch.device | str = "cpu",
    lengths: np.ndarray | None = None,
) -> MicroBatch:
    """Create a micro-batch of random images and texts in the sizes that the model takes.

    Args:
        model: The model.
        m: Number of samples.
        device: Device of the tensors.
        lengths: Number of tokens of each text that the tower needs, [m]. None: all.
    """
    context, vocabulary = read_text_size(model)
    size = read_preprocessing(model).size
    image = torch.randint(0, 256, (m, 3, *size), dtype=torch.uint8, device=device)
    text = torch.randint(1, vocabulary - 1, (m, context), device=device)
    text[:, -1] = vocabulary - 1  # towers pool at the largest token
    index = torch.arange(m, device=device)
    batch: MicroBatch = {"image": image, "text": text}
    batch |= {"index": index, "epoch": index, "view_key": index}
    if find_counter(model):
        batch["lengths"] = np.full(m, context) if lengths is None else lengths
    return batch


def trace(
    config: Config, m: int, like_gpu: bool = True, text_tokens: float | None = None
) -> Towers:
    """Trace the towers with a micro-batch of m samples, without allocating memory.

    Args:
        config: The recipe.
        m: Number of samples.
        like_gpu: Whether to count the copies that autocast makes on a GPU but not on a CPU.
        text_tokens: Mean number of tokens of a text. FLOPs are traced for texts of this length, and memory for longer
            ones (see ERRORS). None: all texts have the maximum number of tokens.

    Raises:
        ValueError: If the model cannot be traced.
    """
    # The standard deviation is assumed to be half of the mean.
    long = text_tokens and text_tokens * (1 + ERRORS / 2 / m**0.5)
    student = _trace(config, m, like_gpu, long)
    if text_tokens is not None:
        mean = _trace(config, m, like_gpu, text_tokens)
        student = replace(student, flops=mean.flops, replay_flops=mean.replay_flops)
    if config.teacher is None:
        return student
    if config.teacher.settings is None:  # its embeddings are stored
        width = sum(config.teacher.widths or (student.width,))
        # A sample contains an image and a text embedding, in fp32.
        return replace(student, teacher_width=width, sample=student.sample + 2 * 4 * width)
    # The teacher runs once per micro-batch, before the student's forward, and without a graph.
    alone = config.replace(model=config.teacher.settings, teacher=None)
    teacher = _trace(alone, m, like_gpu, long)
    return replace(
        student,
        replay=max(student.replay, teacher.replay),
        forward=max(student.forward, teacher.replay),
        flops=student.flops + teacher.replay_flops,
        teacher=teacher.trained + teacher.frozen,
        teacher_width=teacher.width,
    )


def _trace(config: Config, m: int, like_gpu: bool, text_tokens: float | None) -> Towers:
    """Trace the recipe's model without its teacher, for texts of this mean length."""
    measured: Counter[str] = Counter()
    with fake_tensors(config, like_gpu):
        model = prepare_model(config)
        lengths = None
        if text_tokens is not None:
            context = read_text_size(model)[0]
            total = np.arange(m + 1) * min(text_tokens, context)
            lengths = np.diff(np.ceil(total)).astype(int).clip(1, context)
        batch = make_batch(model, m, lengths=lengths)
        parameters = list(model.parameters())
        trained = [p.numel() for p in parameters if p.requires_grad]
        samples = [array for array in batch.values() if isinstance(array, Tensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        # Do not count what exists before the passes; plan/memory.py counts it.
        memory = Allocations([*parameters, *model.buffers(), *gradients, *samples])

        @contextmanager
        def watch(name: str) -> Iterator[None]:
            memory.peak = memory.current  # measure the peak of this pass only
            memory.flops = 0
            with memory:
                yield
            measured[name] = memory.peak
            measured["replay_flops" if name == "replay" else "flops"] += memory.flops

        width = run_passes(config, model, batch, watch)
    return Towers(
        **measured,
        trained=sum(trained),
        frozen=sum(p.numel() for p in parameters) - sum(trained),
        largest=max(trained),
        width=width,
        sample=sum(x.numel() * x.element_size() for x in samples) // m,
    )


@contextmanager
def fake_tensors(config: Config, like_gpu: bool = False) -> Iterator[None]:
    """Make every tensor that is created inside the `with` block a fake tensor, which has a shape but no values.

    Any error inside the block becomes a ValueError that names the model, except that a ValueError is not changed.
    """
    with ExitStack() as stack:

        def replace_in(owner: Any, name: str, value: Callable[..., Any]) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        # The cache of pixel_affine must never mix fake and real tensors.
        pixel_affine.cache_clear()
        stack.callback(pixel_affine.cache_clear)
        # open_clip moves the model to its device, which fails for fake parameters.
        replace_in(nn.Module, "to", lambda module, *_, **__: module)
        if like_gpu:
            for name in ("layer_norm", "group_norm"):
                replace_in(F, name, _in_fp32(getattr(F, name)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        try:
            yield
        except ValueError:
            raise
        except Exception as error:
            # The cause may be a shape that depends on values, or an operator without fake tensor support.
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise ValueError(f"model {config.model.label} cannot be traced: {reason}") from error


def _in_fp32(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a norm function so that, under autocast on a CPU, it takes as much memory as under autocast on a GPU.

    The wrapped function converts its input to an fp32 copy, which the autograd graph holds.
    """

    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return norm(x.float() if torch.is_autocast_enabled("cpu") else x, *args, **kwargs)

    return wrapped
