"""What is run on the simulated GPU: python -m simulated_cuda.cases OUT NAME ...; the outcomes are written as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.serialization import skip_data

from disco_ds.checkpoints import checkpoint
from disco_ds.checkpoints.checkpoint import Saved
from disco_ds.checkpoints.resume import choose, restore
from disco_ds.config import DataSettings, EvalSettings, ModelSettings, render_ds_config
from disco_ds.config.data import Pixels
from disco_ds.data import ImageSpec, Loader, SampleForm, Share, Staging, StepData, load_sources
from disco_ds.distributed import comm, jobs
from disco_ds.distributed.interrupt import Interrupts
from disco_ds.eval import evaluate_sets, load_sets, record
from disco_ds.losses import Embeddings, LossOutput, build_loss, list_losses
from disco_ds.losses.blocks import TiledLoss
from disco_ds.metrics.anomalies import AnomalyDetector
from disco_ds.metrics.logger import MetricsLogger
from disco_ds.metrics.timers import Timer
from disco_ds.models.clip import build_model, read_architecture, read_preprocessing, read_text_size
from disco_ds.training.engine import build_engine, set_rates
from disco_ds.training.loop import agree, log, prepare
from disco_ds.training.step import StepOutput, train_step
from helpers.checkpoints import save_now
from helpers.schedule import plain
from helpers.simulated_cuda.host import Host, on_the_host, simulate
from helpers.towers import CONTEXT, IMAGE_SIZE, VOCABULARY, tiny_config, write_tiny

MICRO_BATCH, WIDTH = 32, 16  # images of more than CUDA would stage without waiting
NUM_SAMPLES = 100_000
PRECISIONS: dict[str, dict[str, Any]] = {
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "fp32": {},
}


@dataclass(frozen=True)
class Case:
    run: Callable[[Host], None]
    slow: bool = False
    alone: bool = False
    """In a world of one rank."""


# Losses


def loss_case(host: Host, name: str, dtype: torch.dtype = torch.float32, trained: str = "both", autocast: bool = False,
              one_shift: bool = True, **options: Any) -> None:  # fmt: skip
    """A loss forward and backward, twice, with accuracies and without, and its commit."""
    host.answers = {"read_fits": one_shift}
    loss = build_loss(name, **options).to("cuda")
    loss.set_num_samples(NUM_SAMPLES, 10 * NUM_SAMPLES)
    sides = {
        side: torch.randn(64, WIDTH, device="cuda", dtype=dtype).requires_grad_(
            trained in (side, "both")
        )
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
        assert (out.loss.device.type, out.loss.dtype) == ("cuda", torch.float32)
        if name in ("disco_fused", "inf_cl", "nt_xent"):
            assert (out.loss.grad_fn.shift is not None) == one_shift
    assert (host.launches > launches) == (
        isinstance(loss, TiledLoss) and options.get("impl") != "torch"
    )
    for x in (*sides.values(), scale, bias):
        if x is not None and x.requires_grad:
            check_gradient(x)


def check_gradient(x: Tensor, name: str = "") -> None:
    assert x.grad is not None, name
    assert (x.grad.device, x.grad.dtype) == (x.device, x.dtype), name


LOSS_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "disco_fused": [
        {"store": True},
        {"impl": "torch"},
        {"comm_dtype": "bf16"},
        {"one_shift": False},
    ]
    + [
        {"precision": precision, "impl": impl}
        for precision in ("fp32", "tf32", "bf16")
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
    "fastclip_v3": [{"memory": "host"}, {"gather_both": True}, {"one_shift": False}],
}


def loss_cases() -> Iterator[tuple[str, Case]]:
    for name in list_losses():
        kinds = [
            {},
            {"dtype": torch.bfloat16},
            {"autocast": True},
            {"trained": "image"},
            {"trained": "text"},
        ]
        for options in (*kinds, *LOSS_OPTIONS.get(name, [])):
            words = " ".join(f"{key}={value}" for key, value in options.items())
            yield f"loss {name} {words}".strip(), Case(partial(loss_case, name=name, **options))


# Steps


@lru_cache
def open_loader(global_batch: int, pixels: Pixels) -> Loader:
    """Its worker is real; what it writes is not looked at."""
    data = DataSettings(source="synthetic", workers=1)
    form = SampleForm(
        ImageSpec((IMAGE_SIZE, IMAGE_SIZE)), partial(torch.zeros, 1), CONTEXT, VOCABULARY
    )
    share = Share(comm.rank(), comm.size(), global_batch, MICRO_BATCH)
    staging = Staging(pixels, "cuda")
    return Loader(data, load_sources(data), form, share, 0, None, staging, count_tokens)


def count_tokens(text: Tensor) -> Any:
    """As the loader of a run counts them for the tiny model."""
    return text.argmax(-1).numpy() + 1


class Training:
    """The parts of a run of the tiny model that a step goes through."""

    def __init__(
        self,
        stage: int,
        precision: str,
        K: int,
        loss: str = "disco_fused",
        saved: Saved | None = None,
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
        self.prepare = partial(prepare, self.config)
        self.loader = open_loader(self.config.global_batch, self.config.image_staging)
        self.loss = build_loss(loss, **self.config.loss.options).to("cuda")
        self.loss.set_num_samples(NUM_SAMPLES, 10 * NUM_SAMPLES)
        bias = self.loss.initial_bias(self.config.global_batch)
        start = self.loss.initial_scale, bias, self.loss.learns_scale
        with on_the_host():
            model = build_model(self.config.model, *start)
        rendered = render_ds_config(self.config, comm.size())
        if saved is None:
            self.engine = build_engine(model, self.config.optim, rendered)
        else:
            new_engine = partial(build_engine, model, self.config.optim, rendered)
            self.engine = restore(saved, self.config, model, new_engine)
        self.engine.train()
        trouble = AnomalyDetector(
            lambda step, values: None, skip=OFFLOAD in changes, max_scale=100.0, warmup_steps=0
        )
        parts = {
            "engine": self.engine,
            "interrupts": Interrupts(),
            "config": self.config,
            "anomalies": trouble,
            "schedule": plain(self.config.global_batch, 10),
        }
        self.run: Any = SimpleNamespace(**parts)

    def step(self, timer: Timer = record_function) -> tuple[StepOutput, StepData]:
        """As train.train does one."""
        data = self.loader.read_step()

        def agree_and_set_rates(embeddings: Embeddings, out: LossOutput) -> None:
            agree(0, data, self.run.interrupts, self.run.anomalies, embeddings, out)
            set_rates(self.engine, 1e-3, self.config.optim, embeddings.scale)

        out = train_step(
            self.engine,
            self.loss,
            data.micro_batches,
            self.prepare,
            100.0,
            agree_and_set_rates,
            self.run.anomalies.check_norm,
            timer,
        )
        assert data.error is None, data.error
        self.loss.commit()
        return out, data


OFFLOAD = "deepspeed__zero_optimization__offload_optimizer"


def step_case(
    stage: int, precision: str, K: int, loss: str = "disco_fused", *, host: Host, **changes: Any
) -> None:
    """Steps, of which the last is counted: in the first one DeepSpeed makes its states, in the third it begins to time.

    The fourth is counted where it is DeepSpeed's waits that are looked at, at ZeRO 1.
    """
    host.answers = {"read_fits": True, "backward_and_step": True}
    training = Training(stage, precision, K, loss, **changes)
    for _ in range(3 if (stage, precision) == (1, "autocast") and not changes else 1):
        training.step()
    with host.counted():
        out, _ = training.step()
    assert out.grad_norm is not None
    # At ZeRO 3 alone, DeepSpeed computes the norm without reading it, unless the optimizer is offloaded.
    on_host = {"gamma"} if stage == 3 and OFFLOAD not in changes else {"gamma", "norm"}
    for name, x in {**out.metrics, "scale": out.scale, "norm": out.grad_norm}.items():
        assert x.is_cuda or name in on_host, f"{name} is on the CPU"


def logged_case(host: Host) -> None:
    """A step that is timed, and its record."""
    host.answers = {"read_fits": True}
    training = Training(1, "autocast", 1)
    metrics = training.run.metrics = MetricsLogger(Path.cwd(), {}, training.run.schedule)
    training.run.loader = SimpleNamespace(state_dict=lambda: {"steps": 1}, broken=0, dropped=0)
    with host.counted():
        out, data = training.step(metrics.phases.timer(sampled=True))
        log(training.run, 1, out, data)
    metrics.close()


def step_cases() -> Iterator[tuple[str, Case]]:
    for stage in range(4):
        for precision in PRECISIONS:
            for K in (1, 3):
                if stage or precision not in ("bf16", "fp16"):
                    slow = precision != "autocast" and (stage, precision, K) != (3, "bf16", 1)
                    yield (
                        f"step ZeRO {stage} {precision} K={K}",
                        Case(partial(step_case, stage, precision, K), slow),
                    )
    clip = {"optim__clip_norm": 1.0}
    yield "step with clipping", Case(partial(step_case, 1, "autocast", 1, **clip))
    buckets = {"deepspeed__zero_optimization__reduce_bucket_size": 10_000}
    for stage in (1, 2):
        yield (
            f"step ZeRO {stage} in many buckets",
            Case(partial(step_case, stage, "autocast", 1, **buckets), slow=stage == 2),
        )
    for pixels in ("device", "compressed"):
        yield (
            f"step with image_staging={pixels}",
            Case(partial(step_case, 1, "autocast", 3, image_staging=pixels)),
        )
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


# A tensor of the CPU where none may be


def stray_case(host: Host, where: str) -> None:
    if where == "collective":
        comm.all_reduce_sum(torch.zeros(3))
        return
    training = Training(1, "autocast", 1)
    on_device = partial(prepare, training.config)
    training.prepare = lambda batch: (on_device(batch)[0], batch.text.cpu(), on_device(batch)[2])
    training.step()


# Models

VISION: dict[str, dict[str, Any]] = {
    "ViT": {},
    "ResNet": {"layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
    "ConvNeXt": {"timm_model_name": "convnext_atto", "timm_pool": "", "timm_proj": "linear"},
}


def model_case(host: Host, name: str, dtype: torch.dtype, autocast: bool, **settings: Any) -> None:
    """A model forward and backward, of uint8 images, in eval and in training."""
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
    for x in features:
        assert (x.device.type, x.dtype) == ("cuda", torch.float32)
    sum(x.sum() for x in features).backward()
    for key, parameter in model.named_parameters():
        check_gradient(parameter, key)


def model_cases() -> Iterator[tuple[str, Case]]:
    towers = {"activation_checkpointing": True, "patch_dropout": 0.5}
    for name, settings in (*((name, {}) for name in (*VISION, "quickstart")), ("ViT", towers)):
        for kind, dtype, autocast in (
            ("fp32", torch.float32, False), ("autocast", torch.float32, True), ("bf16", torch.bfloat16, False)
        ):  # fmt: skip
            words = " ".join(("model", name, kind, *settings))
            slow = kind != "autocast" and (name != "ViT" or bool(settings))
            yield (
                words,
                Case(
                    partial(model_case, name=name, dtype=dtype, autocast=autocast, **settings), slow
                ),
            )
    for name in ("ViT-B-32", "RN50", "ViT-B-16-SigLIP"):
        run = partial(model_case, name=name, dtype=torch.float32, autocast=True)
        yield f"model {name}", Case(run, slow=True)


# Evaluation, checkpoints


def evaluation_case(host: Host, stage: int) -> None:
    """Zero-shot and retrieval by the engine; images and their texts are read and decoded as always."""
    host.answers = {"classify": 1, "_check_finite": 1, "find_ranks": 1}
    training = Training(stage, "autocast", 1)
    settings = EvalSettings(
        labeled={"unseen": "bundled:emoji/unseen"},
        label_key="{json[caption]}",
        retrieval={"val": "bundled:emoji/unseen"},
    )
    with on_the_host():
        sets = [
            replace(x, source=replace(x.source, shards=x.source.shards[:1]))
            for x in load_sets(settings, training.config.data)
        ]
    spec = ImageSpec((IMAGE_SIZE, IMAGE_SIZE), "bicubic", "squash")
    results = evaluate_sets(
        training.engine,
        sets,
        spec,
        lambda texts: torch.zeros(len(texts), CONTEXT, dtype=torch.int64),
        64,
    )
    assert len(record(results)) > 10


@contextmanager
def saving_here() -> Iterator[None]:
    """Save without data: torch's skip_data has no effect on other threads, and needs a file that can seek."""

    def start_here(work: Callable[[], Any]) -> Future[Any]:
        job: Future[Any] = Future()
        job.set_result(work())
        return job

    def save_in_memory(value: Any, file: Any) -> None:
        buffer = BytesIO()
        save(value, buffer)
        file.write(buffer.getvalue())

    save = torch.save
    with (
        skip_data(materialize_fake_tensors=True),
        patch.object(jobs, "start", start_here),
        patch.object(torch, "save", save_in_memory),
    ):
        yield


def checkpoint_case(host: Host, stage: int) -> None:
    """Save and resume, at one rank: all files are written, verified and read; what they hold is not looked at."""
    host.answers = {
        "read_fits": True,
        "backward_and_step": True,
        "_checkpoint_tag_validation": True,
    }
    training = Training(stage, "autocast", 1, "fastclip_v3")
    training.step()
    same = checkpoint.identity(
        training.config, "synthetic", read_architecture(training.config.model)
    )
    meta = {
        "step": 1,
        "samples": training.config.global_batch,
        "num_steps": 10,
        "identity": same,
        "shape": checkpoint.shape(training.config, comm.size()),
    }
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    with saving_here():
        save_now(folder, meta, training.engine, {}, training.loss.state_dict())
    saved = choose(folder, "latest", training.config, lambda stage: same, unattended=False)
    resumed = Training(stage, "autocast", 1, "fastclip_v3", saved=saved)
    resumed.loss.load_state_parts(saved.states("loss"))
    resumed.step()
    assert resumed.engine.global_steps == 2


def other_cases() -> Iterator[tuple[str, Case]]:
    for where in ("collective", "step"):
        yield f"stray in a {where}", Case(partial(stray_case, where=where))
    for stage in (1, 3):
        yield (
            f"evaluation ZeRO {stage}",
            Case(partial(evaluation_case, stage=stage), slow=stage == 3),
        )
    for stage in range(4):
        yield (
            f"checkpoint ZeRO {stage}",
            Case(partial(checkpoint_case, stage=stage), slow=stage != 1, alone=True),
        )


CASES = dict([*loss_cases(), *step_cases(), *model_cases(), *other_cases()])


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
    os._exit(0)  # threads of CUDA's allocator look for the device at the end
