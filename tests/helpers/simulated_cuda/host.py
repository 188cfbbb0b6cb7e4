"""The host's side of the simulated GPU: replaces what cannot work on a device that computes nothing.

Tensors are fake (torch's FakeTensorMode), and collectives use torch's "fake" process group. If code reads the value of
a tensor, this module returns a made-up value, and records that a real host would wait here. It replaces functions of
torch, Triton and DeepSpeed, but nothing of disco_ds.
"""

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import utils as zero_utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import disco_ds
from disco_ds.distributed import comm

OURS, DEEPSPEED = (f"{Path(module.__file__).parent}{os.sep}" for module in (disco_ds, deepspeed))
THROUGH = (f"{DEEPSPEED}accelerator{os.sep}", f"{DEEPSPEED}comm{os.sep}")
"""Wrappers in DeepSpeed. If the host waits inside one, the caller of the wrapper is recorded."""

STAGED_BYTES = 64 * 1024
"""Up to this size, CUDA copies pageable memory to the device with non_blocking=True without making the host wait."""


class Host(TorchDispatchMode):
    """Intercepts operations: makes up values, records waits, and rejects errors. Enter it inside a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.notes = False
        self.answers: dict[str, float] = {}
        """Name of a function of disco_ds or DeepSpeed -> the value that it reads from the device. Others read 0."""
        self.registered: list[int] = []
        """Sizes of the memory that was passed to cudaHostRegister."""
        self.launches = 0
        """Number of launched Triton kernels."""
        self.refused: str | None = None
        """A CUDA call that would need the device's memory. It is kept here, because torch may catch its error."""

    def note(self, what: str) -> None:
        if self.notes:
            self.waits[what, _place()] += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Record the waits of this block."""
        self.waits.clear()
        self.notes = True
        yield
        self.notes = False

    def answer(self, x: Tensor) -> Any:
        frame = _innermost()
        value = self.answers.get(frame.f_code.co_name, 0) if frame else 0
        return (
            bool(value)
            if x.dtype == torch.bool
            else float(value)
            if x.is_floating_point()
            else int(value)
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and func.overloadpacket is not torch.ops.c10d.barrier:
            _check_collective(
                func.name(), [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            )
        instead = getattr(self, f"on_{func._schema.name.split('::')[1].strip('_')}", None)
        if instead is not None and (out := instead(func, *args, **kwargs)) is not NotImplemented:
            return out
        return func(*args, **kwargs)

    # There is a method for each operation that needs values or may make the host wait. Its name is "on_" and the name
    # of the operation without outer underscores. It returns NotImplemented to run the operation as usual.

    def on_local_scalar_dense(self, func: Any, x: Tensor) -> Any:
        if x.is_cuda:
            self.note("reads")
        elif getattr(x, "constant", None) is not None or not isinstance(x, FakeTensor):
            return NotImplemented
        return self.answer(x)

    def on_to_copy(self, func: Any, x: Tensor, **kwargs: Any) -> Any:
        device = torch.device(kwargs.get("device") or x.device)
        if device.type == x.device.type:
            return NotImplemented
        self._crosses(x, device, kwargs.get("non_blocking", False))
        options = {"dtype": kwargs.get("dtype") or x.dtype, "device": device}
        memory = kwargs.get("memory_format") or torch.preserve_format
        if memory is torch.preserve_format and 0 not in x.stride():
            return torch.empty_strided(x.shape, x.stride(), **options)
        return torch.empty(x.shape, memory_format=memory, **options)

    def on_copy(self, func: Any, to: Tensor, x: Tensor, non_blocking: bool = False) -> Any:
        if to.device.type != x.device.type:
            self._crosses(x, to.device, non_blocking)
        return NotImplemented

    def _crosses(self, x: Tensor, to: torch.device, non_blocking: bool) -> None:
        if to.type == "cpu":
            if not non_blocking:
                self.note("copies to host")
        elif not (non_blocking and (self._is_pinned(x) or x.nbytes <= STAGED_BYTES)):
            self.note("copies to device")

    def _is_pinned(self, x: Tensor) -> bool:
        """Return whether a tensor is in pinned memory. Registered memory is recognized by its size alone."""
        return hasattr(x, "simulated_pinned") or x.untyped_storage().nbytes() in self.registered

    def on_pin_memory(self, func: Any, x: Tensor, *_: Any) -> Any:
        out = torch.empty_like(x)
        out.simulated_pinned = True  # type: ignore[attr-defined]
        return out

    def on_is_pinned(self, func: Any, x: Tensor, *_: Any) -> Any:
        return self._is_pinned(x)

    def on_barrier(self, func: Any, *_: Any, **__: Any) -> Any:
        self.note("barrier")
        return NotImplemented

    def on_equal(self, func: Any, x: Tensor, y: Tensor) -> Any:
        if not x.is_cuda:
            return NotImplemented
        self.note("compares")
        return True

    def on_record_stream(self, func: Any, x: Tensor, stream: Any) -> Any:
        return None if x.is_cuda else NotImplemented

    def on_nonzero(self, func: Any, x: Tensor) -> Any:
        return x.new_empty(self._true(x), x.dim(), dtype=torch.int64)

    def on_unique2(self, func: Any, x: Tensor, *_: Any) -> Any:
        self._true(x)
        return (
            torch.empty_like(x),
            torch.empty_like(x, dtype=torch.int64),
            torch.empty_like(x, dtype=torch.int64),
        )

    def on_index(self, func: Any, x: Tensor, indices: list[Tensor | None]) -> Any:
        if not any(i is not None and i.dtype == torch.bool for i in indices):
            return NotImplemented
        return func(
            x,
            [
                _places(i, self._true(i)) if i is not None and i.dtype == torch.bool else i
                for i in indices
            ],
        )

    def on_index_put(self, func: Any, x: Tensor, indices: list[Tensor | None], *_: Any) -> Any:
        for i in indices:
            if i is not None and i.dtype == torch.bool:
                self._true(i)
                return x
        return NotImplemented

    def _true(self, mask: Tensor) -> int:
        """Return a made-up number of true elements: one rank's share."""
        if mask.is_cuda:
            self.note("counts")
        return max(mask.numel() // comm.size(), 1)


def _places(mask: Tensor, count: int) -> Tensor:
    assert mask.dim() == 1
    return mask.new_empty(count, dtype=torch.int64)


def _check_collective(name: str, tensors: list[Tensor]) -> None:
    for x in tensors:
        if not x.is_cuda:
            raise RuntimeError(f"{name}: NCCL does not accept a tensor on the CPU")
        if not x.is_contiguous():
            raise RuntimeError(f"{name}: NCCL does not accept a tensor that is not contiguous")


def _innermost() -> FrameType | None:
    """Return the innermost stack frame of disco_ds or DeepSpeed, except those in THROUGH."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        not frame.f_code.co_filename.startswith((OURS, DEEPSPEED))
        or frame.f_code.co_filename.startswith(THROUGH)
    ):
        frame = frame.f_back
    return frame


def _place() -> str:
    """Return where the host is now: "FILE FUNCTION", with "deepspeed/" before files of DeepSpeed."""
    frame = _innermost()
    if frame is None:
        return "?"
    path = frame.f_code.co_filename
    if path.startswith(OURS):
        return f"{path.removeprefix(OURS)} {frame.f_code.co_name}"
    return f"deepspeed/{path.removeprefix(DEEPSPEED)} {frame.f_code.co_name}"


def _as_meta(x: FakeTensor) -> tuple[Any, tuple[()]]:
    """Pickle a fake tensor as a meta tensor, because a data worker has no fake tensors."""
    return partial(torch.empty, x.shape, dtype=x.dtype, device="meta"), ()


@contextmanager
def simulate() -> Iterator[Host]:
    """Set up the device and the process group for a `with` block in which all tensors are fake."""
    host = Host()
    ForkingPickler.register(FakeTensor, _as_meta)
    # Otherwise, torch.tensor(..., device="cuda") would write to the device.
    torch._C._set_only_lift_cpu_tensors(True)
    # Run backward in this thread, so that the stack shows which code has called it.
    torch.autograd.set_multithreading_enabled(False)
    _replace(host)
    dist.init_process_group(
        "fake",
        store=FakeStore(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    comm.init(60)
    report = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda call: _heard(host, call.decode()))
    library = ctypes.CDLL(os.environ["SIMULATED_CUDA"])
    library.simulated_report(report)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), host:
            yield host
    finally:
        library.simulated_report(None)


on_the_host = _disable_current_modes
"""A context in which tensors are real tensors on the CPU."""


def _heard(host: Host, call: str) -> None:
    """Record a call that the stub reports: it makes the host wait, or it failed."""
    if "Synchronize" in call:
        host.note(call)
    else:
        host.refused = f"{call} by {_place()}: something was not fake"


def _replace(host: Host) -> None:
    """Replace functions of torch, Triton and DeepSpeed that need values of tensors or a working device."""
    import triton  # not at the top, so that the tests can be collected without Triton

    def tolist(self: FakeTensor) -> Any:
        """Read all values in one copy, as a real tensor does. FakeTensor would read each element separately."""
        if self.is_cuda:
            return self.cpu().tolist()
        return [x.tolist() for x in self] if self.dim() else self.item()

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        given = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
        if not all(x.is_cuda for x in given):
            raise RuntimeError(f"{kernel} was launched with a tensor on the CPU")
        if isinstance(kernel, triton.runtime.Autotuner):
            kernel.best_config = kernel.configs[0]
        sizes = (
            kernel.configs[0].kwargs if isinstance(kernel, triton.runtime.Autotuner) else options
        )
        assert all(n > 0 for n in (grid(sizes) if callable(grid) else grid))
        host.launches += 1

    class Runtime:
        """CUDA functions that are called by name."""

        @staticmethod
        def cudaHostRegister(address: int, size: int, flags: int) -> int:  # noqa: N802
            host.registered.append(size)
            return 0

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        host.note("objects")
        object_list[:] = [obj] * len(object_list)

    def broadcast_object_list(object_list: list[Any], src: int = 0, **_: Any) -> None:
        host.note("objects")

    def swap_tensors(old: Tensor, new: Tensor) -> None:
        """Swap two tensors for Module.to. The original refuses fake tensors."""
        old.data = new

    def numpy(self: FakeTensor, **_: Any) -> Any:
        if self.is_cuda:
            raise TypeError("numpy() was called on a tensor on the device")
        with on_the_host():
            return torch.zeros(self.shape, dtype=self.dtype).numpy()

    def set_rng_state(state: Tensor, *_: Any) -> None:
        """Check the type of a generator's state. It has no values to set."""
        assert (state.device.type, state.dtype) == ("cpu", torch.uint8)

    set_state_of_cpu = torch.set_rng_state
    torch.cuda.set_rng_state = set_rng_state
    torch.set_rng_state = lambda x: (
        set_rng_state(x) if isinstance(x, FakeTensor) else set_state_of_cpu(x)
    )
    torch.cuda.cudart = Runtime
    torch.utils.swap_tensors = swap_tensors
    FakeTensor.numpy = numpy  # type: ignore[method-assign]
    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    triton.runtime.Autotuner.run = launch
    triton.runtime.JITFunction.run = launch
    dist.all_gather_object = all_gather_object
    dist.broadcast_object_list = broadcast_object_list
    # These functions compare a list between ranks. In a simulated group, it is the same on all.
    zero_utils.assert_lst_len_same_as_other_ranks = lambda values: None
    zero_utils.get_lst_from_rank0 = lambda values: values
