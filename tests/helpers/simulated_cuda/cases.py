"""The code that is run on the simulated GPU.

`python -m helpers.simulated_cuda.cases OUT NAME ...` runs the cases NAME and writes their outcomes to OUT as JSON.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.profiler import record_function

from disco_ds.config import DataSettings, ModelSettings, render_ds_config
from disco_ds.config.data import Pixels
from disco_ds.data import ImageSpec, InputSpec, Loader, Share, Staging, StepData, load_sources
from disco_ds.distributed import comm
from disco_ds.distributed.launcher import Interrupts
from disco_ds.losses import Embeddings, build_loss, list_losses
from disco_ds.losses.blocks import TiledLoss
from disco_ds.metrics.anomalies import AnomalyDetector
from disco_ds.metrics.logger import MetricsLogger
from disco_ds.metrics.step_metrics import Timer
from disco_ds.models.clip import build_model, read_preprocessing, read_text_size
from disco_ds.training.engine import EngineTowers, build_engine, prepare
from disco_ds.training.loop import log
from disco_ds.training.step import StepOutput, run_step
from helpers.schedule import plain
from helpers.simulated_cuda.host import Host, on_the_host, simulate
from helpers.towers import CONTEXT, IMAGE_SIZE, VOCABULARY, tiny_config, write_tiny

# The images of a micro-batch exceed STAGED_BYTES, so an unpinned copy would make the host wait.
MICRO_BATCH, WIDTH = 32, 16
NUM_SAMPLES = 100_000
PRECISIONS: dict[str, dict[str, Any]] = {
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": {"bf16": {"enabled": True}},
}


@dataclass(frozen=True)
class Case:
    run: Callable[[Host], None]
    slow: bool = False


# Losses


def loss_case(host: Host, name: str, trained: str = "both", autocast: bool = False,
              one_shift: bool = True, **options: Any) -> None:  # fmt: skip
    """Run forward, backward and commit of a loss, first with accuracies and then without."""
    host.answers = {"read_fits": one_shift}
    loss = build_loss(name, **options).to("cuda")
    loss.set_num_samples(NUM_SAMPLES, 10 * NUM_SAMPLES)
    sides = {
        side: torch.randn(64, WIDTH, device="cuda").requires_grad_(trained in (side, "both"))
        for side in ("image", "text")
    }
    scale = torch.ones(1, device="cuda", requires_grad=loss.learns_scale)
    bias = (
        torch.ones(1, device="cuda", requires_grad=True)
        if loss.initial_bias(64) is not None
        else None
    )
    launches = host.launches
    for loss.accuracy in (True, False):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = loss(
                Embeddings(**sides, scale=scale, bias=bias, index=torch.arange(64, device="cuda"))
            )
        out.loss.backward()
        loss.commit()
        assert out.loss.is_cuda
        if name in ("disco_fused", "inf_cl", "nt_xent"):
            assert (out.loss.grad_fn.shift is not None) == one_shift
    in_triton = isinstance(loss, TiledLoss) and options.get("impl") != "torch"
    assert (host.launches > launches) == in_triton


LOSS_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "disco_fused": [
        {"impl": "torch"},
        {"comm_dtype": "bf16"},
        {"one_shift": False},
    ]
    + [
        {"precision": precision, "impl": impl}
        for precision in ("fp32", "bf16")
        for impl in ("torch", "auto")
    ],
    "inf_cl": [
        {"precision": "bf16"},
        {"comm_dtype": "bf16"},
        {"impl": "torch"},
        {"one_shift": False},
    ],
    "nt_xent": [{"ring": True}],
    "siglip": [{"precision": "bf16"}, {"comm_dtype": "bf16"}, {"impl": "torch"}],
    "fastclip_v2": [{"memory": "host"}],
    "fastclip_v3": [{"memory": "host"}, {"one_shift": False}],
}


def loss_cases() -> Iterator[tuple[str, Case]]:
    for name in list_losses():
        kinds = [
            {},
            {"autocast": True},
            {"trained": "image"},
        ]
        for options in (*kinds, *LOSS_OPTIONS.get(name, [])):
            words = " ".join(f"{key}={value}" for key, value in options.items())
            yield f"loss {name} {words}".strip(), Case(partial(loss_case, name=name, **options))


# Steps


@lru_cache
def open_loader(global_batch: int, pixels: Pixels) -> Loader:
    """Return a loader with one real worker process. Its batches are never read, because tensors are fake."""
    data = DataSettings(source="synthetic", workers=1)
    inputs = InputSpec(
        ImageSpec((IMAGE_SIZE, IMAGE_SIZE)), partial(torch.zeros, 1), CONTEXT, VOCABULARY
    )
    share = Share(comm.rank(), comm.size(), global_batch, MICRO_BATCH)
    staging = Staging(pixels, "cuda")
    return Loader(data, load_sources(data), inputs, share, 0, None, staging, count_tokens)


def count_tokens(text: Tensor) -> Any:
    """Count tokens as the loader of a run does for the tiny model."""
    return text.argmax(-1).numpy() + 1


class Training:
    """The parts of a run of the tiny model that a training step needs."""

    def __init__(
        self,
        stage: int,
        precision: str,
        K: int,
        loss: str = "disco_fused",
        **changes: Any,
    ) -> None:
        ds_config = {"zero_optimization": {"stage": stage}} | PRECISIONS[precision]
        optim = {"optim__name": "adamw", "optim__lr": 1e-3, "optim__weight_decay": 0.1}
        given = {"image_staging": "host", "loss__name": loss, **optim, **changes}
        size = {"micro_batch": MICRO_BATCH, "global_batch": MICRO_BATCH * K * comm.size()}
        self.config, self.K = (
            tiny_config(write_tiny(Path.cwd(), layers=1), ds_config, **size, **given),
            K,
        )
        self.loader = open_loader(self.config.global_batch, self.config.image_staging)
        self.loss = build_loss(loss, **self.config.loss.options).to("cuda")
        self.loss.set_num_samples(NUM_SAMPLES, 10 * NUM_SAMPLES)
        bias = self.loss.initial_bias(self.config.global_batch)
        start = self.loss.initial_scale, bias, self.loss.learns_scale
        with on_the_host():
            model = build_model(self.config.model, *start)
        rendered = render_ds_config(self.config, comm.size())
        self.engine = build_engine(model, self.config.optim, rendered)
        self.engine.train()
        trouble = AnomalyDetector(
            lambda step, values: None, skip=OFFLOAD in changes, warmup_steps=0
        )
        parts = {
            "engine": self.engine,
            "towers": EngineTowers(self.engine, partial(prepare, self.config)),
            "loss": self.loss,
            "loader": self.loader,
            "interrupts": Interrupts(),
            "heartbeat": SimpleNamespace(mark=lambda *place, timed: None),
            "metrics": SimpleNamespace(phases=SimpleNamespace()),
            "learning_rate": lambda step: 1e-3,
            "config": self.config,
            "anomalies": trouble,
            "schedule": plain(self.config.global_batch, 10),
        }
        self.run: Any = SimpleNamespace(**parts)
        self.steps = 0

    def step(self, timer: Timer = record_function) -> tuple[StepOutput, StepData]:
        """Take one step as the training loop does."""
        data = self.loader.start_step()
        self.run.metrics.phases.timer = lambda sampled: timer
        out = run_step(self.run, self.steps, data)
        self.steps += 1
        assert data.error is None, data.error
        return out, data


OFFLOAD = "deepspeed__zero_optimization__offload_optimizer"


def step_case(
    stage: int, precision: str, K: int, loss: str = "disco_fused", *, host: Host, **changes: Any
) -> None:
    """Take two steps and count the waits of the second. In the first, DeepSpeed creates its states."""
    host.answers = {"read_fits": True, "backward_and_step": True}
    training = Training(stage, precision, K, loss, **changes)
    training.step()
    with host.counted():
        out, _ = training.step()
    assert out.grad_norm is not None


def logged_case(host: Host) -> None:
    """Take a step whose phases are timed, and log it."""
    host.answers = {"read_fits": True}
    training = Training(1, "autocast", 1)
    metrics = training.run.metrics = MetricsLogger(Path.cwd(), {}, training.run.schedule)
    with host.counted():
        out, data = training.step(metrics.phases.timer(sampled=True))
        log(training.run, 1, out, data)
    metrics.close()


def shared_case(host: Host) -> None:
    """Be the second rank of a host with one GPU. That is refused, unless the ranks may share the GPU."""
    host.answers = {"read_fits": True, "backward_and_step": True}
    given = {"RANK": "1", "LOCAL_RANK": "1", comm.SHARE_GPUS: "0"}
    with mock.patch.dict(os.environ, given):
        for use in (comm.local_device, partial(comm.init, 60)):
            with pytest.raises(ValueError, match=r"rank 1 .*GPU 0 with rank 0.*" + comm.SHARE_GPUS):
                use()
        os.environ[comm.SHARE_GPUS] = "1"
        comm.init(60)
        assert comm.local_device() == torch.device("cuda", 0)
        for stage in (1, 3):
            training = Training(stage, "autocast", 1)
            assert training.engine.device == torch.device("cuda", 0)
            assert training.step()[0].grad_norm is not None


def step_cases() -> Iterator[tuple[str, Case]]:
    yield "step of a rank that shares the GPU", Case(shared_case)
    for stage in range(4):
        for K in (1, 3):
            run = partial(step_case, stage, "autocast", K)
            yield f"step ZeRO {stage} autocast K={K}", Case(run)
    clip = {"optim__clip_norm": 1.0}
    yield "step with clipping", Case(partial(step_case, 1, "autocast", 1, **clip))
    buckets = {"deepspeed__zero_optimization__reduce_bucket_size": 10_000}
    yield "step ZeRO 1 in many buckets", Case(partial(step_case, 1, "autocast", 1, **buckets))
    on_device = partial(step_case, 1, "autocast", 3, image_staging="device")
    yield "step with image_staging=device", Case(on_device)
    moves = {
        "rotate_degrees": 14,
        "zoom": 0.2,
        "shift": 0.12,
        "color_scale": 0.25,
        "color_offset": 0.1,
        "color_jitter": [0.4, 0.4, 0.4, 0.1],
    }
    yield "step that is logged", Case(logged_case)
    yield "step with augmentation", Case(partial(step_case, 1, "autocast", 1, data__augment=moves))
    yield (
        "step of two views",
        Case(
            partial(
                step_case, 1, "autocast", 1, "nt_xent", data__augment=moves, model__two_views=True
            )
        ),
    )
    yield (
        "step with offload that may skip spikes",
        Case(partial(step_case, 1, "autocast", 1, **{OFFLOAD: {"device": "cpu"}})),
    )
    for side in ("image", "text"):
        yield (
            f"step with {side} tower locked",
            Case(
                partial(step_case, 1, "autocast", 1, **{f"model__lock_{side}": True}),
                slow=side == "text",
            ),
        )
    for name in ("fastclip_v3", "fastclip_v2", "siglip", "inf_cl"):
        yield (
            f"step of {name}",
            Case(partial(step_case, 1, "autocast", 1, name), slow=name != "fastclip_v3"),
        )
    yield (
        "step of fastclip_v3 ZeRO 3 K=3",
        Case(partial(step_case, 3, "bf16", 3, "fastclip_v3"), slow=True),
    )


# Tensors on the CPU by mistake


def stray_case(host: Host, where: str) -> None:
    if where == "collective":
        comm.all_reduce_sum(torch.zeros(3))
        return
    training = Training(1, "autocast", 1)
    on_device = partial(prepare, training.config)
    training.run.towers.prepare = lambda batch: (
        on_device(batch)[0],
        batch["text"].cpu(),
        on_device(batch)[2],
    )
    training.step()


# Models

VISION: dict[str, dict[str, Any]] = {
    "ViT": {},
    "ResNet": {"layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
    "ConvNeXt": {"timm_model_name": "convnext_atto", "timm_pool": "", "timm_proj": "linear"},
}


def model_case(host: Host, name: str, dtype: torch.dtype, autocast: bool, **settings: Any) -> None:
    """Run a model on uint8 images: forward in eval mode, and forward and backward in training mode."""
    given = name if name not in VISION else write_tiny(Path.cwd(), **VISION[name])
    with on_the_host():
        model: Any = build_model(ModelSettings(name=given, **settings), initial_bias=-10.0)
        size, length = read_preprocessing(model).size, read_text_size(model)[0]
    model.to("cuda", dtype)
    image = torch.zeros(4, 3, *size, dtype=torch.uint8, device="cuda")
    text = torch.zeros(4, length, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            model.eval()(image, text)
        features = model.train()(image, text)
    sum(x.sum() for x in features).backward()


def model_cases() -> Iterator[tuple[str, Case]]:
    for name in (*VISION, "quickstart"):
        run = partial(model_case, name=name, dtype=torch.float32, autocast=True)
        yield f"model {name}", Case(run)
    for name in ("ViT-B-32", "RN50", "ViT-B-16-SigLIP"):
        run = partial(model_case, name=name, dtype=torch.float32, autocast=True)
        yield f"model {name}", Case(run, slow=True)


def stray_cases() -> Iterator[tuple[str, Case]]:
    for where in ("collective", "step"):
        yield f"stray in a {where}", Case(partial(stray_case, where=where))


CASES = dict([*loss_cases(), *step_cases(), *model_cases(), *stray_cases()])


def main(out: str, names: list[str]) -> None:
    found = {}
    with simulate() as host:
        for name in names:
            host.waits.clear()
            host.answers, host.refused, error = {}, None, None
            start = time.monotonic()
            try:
                CASES[name].run(host=host)
                if host.refused:
                    raise RuntimeError(host.refused)
            except Exception:
                error = traceback.format_exc()
            host.notes = False
            waits = [[what, place, count] for (what, place), count in sorted(host.waits.items())]
            found[name] = {"error": error, "waits": waits}
            print(
                f"{time.monotonic() - start:6.2f} s  {'ok' if error is None else error}  {name}",
                flush=True,
            )
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # a normal exit would let threads of CUDA's allocator access the device
