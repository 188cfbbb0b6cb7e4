"""Traces what the towers need for a micro-batch: the recipe's own model goes through the step's own passes.

A trace runs on fake tensors, which have shapes but no memory, on a fake CPU, as the backward of a fake GPU needs a
driver. measure.py runs the same passes on real tensors.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from disco_ds.config import Config
from disco_ds.config.data import AugmentSettings
from disco_ds.config.ds_config import precision
from disco_ds.data import MicroBatch, augment
from disco_ds.losses import build_loss
from disco_ds.models.clip import build_model, pixel_affine, read_preprocessing, read_text_size
from disco_ds.training.step import Forward

DTYPES = {"autocast": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision of the ds_config -> dtype of the parameters."""
Watch = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Towers:
    """Needs of one micro-batch: bytes beside parameters, their gradients and uint8 pixels, and FLOPs of products."""

    replay: int
    """Bytes at the peak of the forward without a graph."""
    forward: int
    """Bytes at the peak of the forward with a graph."""
    held: int
    """Bytes that the graph holds until the backward."""
    backward: int
    """Bytes at the peak of the backward."""
    replay_flops: int
    """FLOPs of the forward without a graph."""
    flops: int
    """FLOPs of the forward with a graph and of the backward, recomputation included."""
    trained: int
    """Number of trained parameters."""
    frozen: int
    """Number of frozen parameters."""
    largest: int
    """Number of elements in the largest trained parameter."""
    width: int
    """Width of the features."""
    sample: int
    """Bytes of a decoded sample: uint8 image, tokens, id, epoch."""


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is active and still exist, and FLOPs.

    torch's MemTracker refuses a tower that is called twice, and its FlopCounterMode keeps tensors alive.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.current = self.peak = self.flops = 0
        self._known = WeakIdKeyDictionary()
        self._known.update({tensor.untyped_storage(): True for tensor in known})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                continue
            # Views share a storage, which counts once and until its last tensor is gone.
            if (storage := tensor.untyped_storage()) not in self._known:
                self._known[storage] = True
                self.current += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.current)
        if count := flop_registry.get(func.overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out

    def _free(self, num_bytes: int) -> None:
        self.current -= num_bytes


class _Engine:
    """Stands for DeepSpeed's engine, as far as step.Forward needs one."""

    def __init__(self, model: nn.Module, kind: str):
        self.module, self.kind = model, kind

    def __call__(self, **inputs: Tensor) -> Any:
        device = next(iter(inputs.values())).device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.kind == "autocast"):
            return self.module(**inputs)


def run_passes(model: Any, kind: str, batch: MicroBatch, settings: AugmentSettings, watch: Watch) -> int:
    """Make the passes of step.py, each in watch(its name in Towers). Returns: the width of the features."""

    def prepare(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        def view(number: int) -> Tensor:
            return augment(batch.image, batch.epoch, batch.index, 0, settings, number)

        return view(0), view(1) if model.two_views else batch.text, batch.index

    engine: Any = _Engine(model, kind)
    forward = Forward(engine, prepare)
    with watch("replay"):
        forward(batch, keep_graph=False)
    with watch("forward"):
        features = forward(batch, keep_graph=True).features
    # A new scalar only: what is counted here is what the graph holds.
    with watch("held"):
        surrogate = torch.stack([x.sum() for x in features if x is not None and x.requires_grad]).sum()
    with watch("backward"):
        surrogate.backward()
    return next(x.shape[1] for x in features if x is not None)


def prepare_model(config: Config) -> nn.Module:
    """The recipe's model with random weights, in training mode and the run's dtype, with its gradients allocated."""
    loss = build_loss(config.loss.name, **config.loss.options)
    # The origin of the weights makes no difference, and a compiled model cannot be traced.
    settings = config.model.model_copy(update={"pretrained": None, "pretrained_image": None, "compile": False})
    before = torch.get_default_dtype()
    # By the default dtype, as fake parameters cannot be cast in place.
    torch.set_default_dtype(DTYPES[precision(config.deepspeed)])
    try:
        model = build_model(settings, loss.initial_scale, loss.initial_bias, loss.learns_scale).train()
    finally:
        torch.set_default_dtype(before)
    # DeepSpeed's gradients are planned apart: here they must not count as allocated by the backward.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return model


def make_batch(model: nn.Module, m: int, device: torch.device | str = "cpu") -> MicroBatch:
    """A micro-batch of random images and texts, of the sizes that the model takes."""
    context, vocabulary = read_text_size(model)
    image = torch.randint(0, 256, (m, 3, *read_preprocessing(model).size), dtype=torch.uint8, device=device)
    text = torch.randint(1, vocabulary, (m, context), device=device)
    return MicroBatch(image, text, torch.arange(m, device=device), torch.zeros(m, dtype=torch.int64, device=device))


def trace(config: Config, m: int, like_gpu: bool = True) -> Towers:
    """Trace the towers with a micro-batch of m samples, without allocating memory. The result is cached.

    Args:   like_gpu: count copies that autocast makes on a GPU and not on a CPU.
    Raises: ValueError for a model that cannot be traced.
    """
    # The cache goes by JSON: settings without influence on the trace take one value, so that more calls hit it.
    keys = {"name", "global_batch", "micro_batch", "model", "loss", "data", "deepspeed"}
    tree = config.model_dump(mode="json", include=keys) | {"steps": 1, "optim": {"warmup_steps": 0}}
    tree |= {"global_batch": 1, "micro_batch": 1, "data": {"source": "synthetic", "augment": tree["data"]["augment"]}}
    try:
        return _trace(Config.model_validate(tree).model_dump_json(), m, like_gpu)
    except ValueError:
        raise
    except Exception as error:
        # Of any type: shapes that depend on values, operators that know no shapes.
        raise ValueError(
            f"model {config.model.label} cannot be traced: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


@lru_cache(maxsize=64)
def _trace(tree: str, m: int, like_gpu: bool) -> Towers:
    config = Config.model_validate_json(tree)
    found: Counter[str] = Counter()
    with _fake(like_gpu):
        model = prepare_model(config)
        batch = make_batch(model, m)
        parameters = list(model.parameters())
        trained = [p.numel() for p in parameters if p.requires_grad]
        samples = [batch.image, batch.text, batch.index, batch.epoch]
        gradients = [p.grad for p in parameters if p.grad is not None]
        # What is there before the passes is planned apart.
        memory = Allocations([*parameters, *model.buffers(), *gradients, *samples])

        @contextmanager
        def watch(name: str) -> Iterator[None]:
            memory.peak = memory.current  # the peak of this pass alone
            before = memory.flops
            with memory:
                yield
            found[name] = memory.peak
            found["replay_flops" if name == "replay" else "flops"] += memory.flops - before

        width = run_passes(model, precision(config.deepspeed), batch, config.data.augment, watch)
    return Towers(
        **found,
        trained=sum(trained),
        frozen=sum(p.numel() for p in parameters) - sum(trained),
        largest=max(trained),
        width=width,
        sample=sum(x.numel() * x.element_size() for x in samples) // m,
    )


@contextmanager
def _fake(like_gpu: bool) -> Iterator[None]:
    """Tensors made in this block have no memory, and none of them stays in a cache."""
    pixel_affine.cache_clear()
    try:
        with ExitStack() as stack:
            # open_clip moves the model to the device it is on, which fake parameters refuse.
            stack.enter_context(patch.object(nn.Module, "to", lambda module, *_, **__: module))
            for name in ("layer_norm", "group_norm") if like_gpu else ():
                stack.enter_context(patch.object(F, name, _in_fp32(getattr(F, name))))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield
    finally:
        pixel_affine.cache_clear()


def _in_fp32(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm as autocast runs it on a GPU and not on a CPU: its input is copied, and the graph holds the copy."""

    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return norm(x.float() if torch.is_autocast_enabled("cpu") else x, *args, **kwargs)

    return wrapped
