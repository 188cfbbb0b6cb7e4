"""Runs whose global batch, image size or patch dropout changes, in stages or on resume."""

import gc
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor
from torch.nn import functional as F

from disco_ds.checkpoints.checkpoint import read
from disco_ds.checkpoints.state import read_tensors
from disco_ds.config import Config, load_config
from disco_ds.data import ImageSpec, InputSpec, Loader, Share, load_sources, merge_states
from disco_ds.distributed.comm import AgreedError, AskedToStopError, RefusedError
from disco_ds.models.clip import build_model, build_tokenizer, read_text_size
from disco_ds.models.param_groups import parameter_groups
from disco_ds.run import run_training
from disco_ds.runs.messages import LOG
from disco_ds.runs.run_folder import list_complete, step_of
from helpers.dist import run_ranks
from helpers.launched import records, same_as_uninterrupted
from helpers.stage_optimizers import KILLED_AT
from helpers.tiny_run import recipe
from helpers.towers import BPE_SIZE, TINY

STAGES: list[dict[str, Any]] = [
    {"until": 64},
    {"until": 192, "global_batch": 32, "micro_batch": 8},
    {"until": 288, "global_batch": 48, "image_size": 64, "crop_scale": [0.5, 1.0]},
]
"""Ten steps: 4 of 16 samples, 4 of 32, and 2 of 48 larger images."""
OPTIM = {"base_lr": 0.02, "lr_rule": "sqrt", "warmup_steps": 2, "eps": 1e-3}


def write(folder: Path, stages: Sequence[dict[str, Any]] = STAGES, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    given: dict[str, Any] = {
        "steps": None,
        "stages": list(stages),
        "optim": OPTIM,
        "checkpoint": {"every_steps": 1, "keep_last": 20},
    }
    return recipe(folder, **given | changes)


def run_all(jobs: list[tuple[Path, list[str], str | None, tuple[str, ...]]]) -> None:
    """Run several trainings in turn. Runs on every rank. A job is (recipe, overrides, resume, allow_change)."""
    for path, overrides, resume, allow_change in jobs:
        run_training(load_config(path, overrides), resume, allow_change)
        gc.collect()
        left = [each for each in gc.get_objects() if type(each) is DeepSpeedEngine]
        assert not left, "the engine still exists, so it would keep its memory"


def weights(run: Path, step: int) -> dict[str, Tensor]:
    return dict(read_tensors(read(run / "checkpoints" / f"step-{step:08d}")))


def assert_close(mine: dict[str, Tensor], other: dict[str, Tensor], most: float = 1e-5) -> None:
    assert mine.keys() == other.keys()
    for name, value in mine.items():
        assert (value.double() - other[name].double()).abs().max() < most, name


def train_plainly(config: Config) -> dict[str, Tensor]:
    """Train all stages in one process, with one graph per step and torch's AdamW. Return the weights."""
    sources = load_sources(config.data)
    model: Any = None
    moments: Any = None
    state: Any = None
    samples = 0
    total = config.stages[-1].until
    for stage in config.stages:
        batch = stage.global_batch or config.global_batch
        settings = config.model.model_copy(update={"image_size": stage.image_size})
        before, model = model, build_model_with_seed(config, settings)
        optimizer = torch.optim.AdamW(
            parameter_groups(model, config.optim), betas=config.optim.betas, eps=config.optim.eps
        )
        if before is not None:
            take_over(before, moments, model, optimizer)
        tokenizer = build_tokenizer(settings, model)
        crop = stage.crop_scale or config.data.crop_scale
        inputs = InputSpec(
            ImageSpec(model.visual.image_size, "bicubic", "shortest"),
            tokenizer,
            *read_text_size(model),
        )
        data = config.data.model_copy(update={"crop_scale": crop})
        loader = Loader(data, sources, inputs, Share(0, 1, batch, batch), config.seed, state)
        peak = config.optim.base_lr * (batch / 32_768) ** 0.5
        warmup = config.optim.warmup_steps * config.global_batch
        model.train()
        while samples < stage.until:
            loader.start_step()
            (micro_batch,) = loader.first_pass()
            rate = peak * (samples + config.global_batch) / warmup
            if samples >= warmup:
                progress = torch.tensor((samples - warmup) / (total - warmup), dtype=torch.float64)
                rate = peak * (1 + torch.cos(torch.pi * progress).item()) / 2
            image, text, scale, _ = model(micro_batch["image"], micro_batch["text"])
            logits = scale * image @ text.T
            labels = torch.arange(batch)
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            samples += batch
        state = merge_states([loader.state_dict()])
        loader.close()
        moments = optimizer.state
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def build_model_with_seed(config: Config, settings: Any) -> Any:
    torch.manual_seed(config.seed)
    return build_model(settings)


def take_over(before: Any, moments: Any, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Copy weights and moments to the next stage's model. Resize those of the position embedding to the new grid."""
    grid = model.visual.grid_size

    def resize(x: Tensor, like: Tensor, mode: str) -> Tensor:
        if x.shape == like.shape:
            return x.clone()
        side = round((len(x) - 1) ** 0.5)
        square = x[1:].T.reshape(1, -1, side, side)
        square = F.interpolate(square, size=grid, mode=mode, antialias=True, align_corners=False)
        return torch.cat([x[:1], square.flatten(2)[0].T])

    old = dict(before.named_parameters())
    for name, parameter in model.named_parameters():
        kept = moments[old[name]]
        optimizer.state[parameter] = {
            key: value if key == "step" else resize(value, parameter, "bilinear")
            for key, value in kept.items()
        }
        with torch.no_grad():
            parameter.copy_(resize(old[name], parameter, "bicubic"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "stage"),
    [
        (2, 1),
        *(
            pytest.param(ranks, stage, marks=pytest.mark.slow)
            for ranks, stage in ((1, 0), (2, 0), (4, 1), (2, 2), (2, 3))
        ),
    ],
)
def test_stages_train_like_one_process_in_plain_torch(
    ranks: int, stage: int, tmp_path: Path
) -> None:
    deepspeed = {"base": f"zero{stage}", "torch_autocast": {"enabled": False}}
    path = write(tmp_path / "run", deepspeed=deepspeed)
    run_ranks(run_all, ranks, [(path, [], None, ())], joined=False)
    run = path.parent / "runs" / "tiny"
    true = train_plainly(load_config(path))
    assert true["visual.positional_embedding"].shape == (65, 32)
    assert_close(weights(run, 10), true)
    found = records(run)
    assert [r["samples"] for r in found] == [16, 32, 48, 64, 96, 128, 160, 192, 240, 288]
    assert "instead of" not in (run / LOG).read_text(), "no changed setting may be reported"
    assert json.loads((run / "finished.json").read_text()) == {"steps": 10, "samples": 288}


DROPOUT = [
    STAGES[0] | {"patch_dropout": 0.5},
    STAGES[1] | {"patch_dropout": 0.25},
    STAGES[2] | {"patch_dropout": 0.25},
]


@pytest.mark.slow  # test_batch_changed_on_resume_trains_like_a_stage resumes at a border, too
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", range(4))
def test_run_resumed_near_a_border_is_the_uninterrupted_one(stage: int, tmp_path: Path) -> None:
    """Resume from checkpoints of a finished run, as if it had been killed. Its patch dropout draws random numbers."""
    deepspeed = {"base": f"zero{stage}", "torch_autocast": {"enabled": False}}
    path = write(tmp_path / "run", DROPOUT, deepspeed=deepspeed)
    run = path.parent / "runs" / "tiny"
    run_ranks(run_all, 2, [(path, [], None, ())], joined=False)
    copies = {step: run.parent / f"from-{step}" for step in (3, 4, 5, 7, 8, 9)}
    for copy in copies.values():
        shutil.copytree(run, copy)
        (copy / "finished.json").unlink()
    resumed = [
        (path, [], str(copy / "checkpoints" / f"step-{step:08d}"), ())
        for step, copy in copies.items()
    ]
    run_ranks(run_all, 2, resumed, joined=False)
    for copy in copies.values():
        same_as_uninterrupted(copy, run)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [1, 3])
def test_run_killed_near_a_border_resumes_as_if_uninterrupted(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks are killed after the last step of a stage, between two stages, or after the first step of a stage."""
    path = write(
        tmp_path / "run",
        DROPOUT,
        deepspeed={"base": f"zero{stage}", "torch_autocast": {"enabled": False}},
        optim=OPTIM | {"factory": "helpers.stage_optimizers:AdamWUntilKilled", "elementwise": True},
        checkpoint={"every_steps": 3, "asynchronous": False, "keep_last": 20},
    )
    runs = path.parent / "runs"
    run_ranks(run_all, 2, [(path, [], None, ())], joined=False)
    for moment, first_step in (("4", 3), ("border", 4), ("5", 4), ("8", 6), ("9", 8)):
        run = runs / f"killed {moment}"
        name = [f"name={run.name}"]
        monkeypatch.setenv(KILLED_AT, moment)
        with pytest.raises(pytest.fail.Exception, match="ended without a result"):
            run_ranks(run_all, 2, [(path, name, None, ())], joined=False)
        monkeypatch.delenv(KILLED_AT)
        run_ranks(run_all, 2, [(path, name, "latest", ())], joined=False)
        assert f"resumes after step {first_step}," in (run / "log.txt").read_text()
        same_as_uninterrupted(run, runs / "tiny")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("loss", ["disco_fused", "siglip", "fastclip_v3"])
def test_run_resumed_at_another_number_of_ranks_near_a_border_agrees(
    loss: str, tmp_path: Path
) -> None:
    """FastCLIP's state per sample and its schedules, which depend on the number of samples, must continue too."""
    path = write(tmp_path / "run", loss={"name": loss})
    run = path.parent / "runs" / "tiny"
    run_ranks(run_all, 1, [(path, [], None, ())], joined=False)
    for ranks, step in ((2, 3), (4, 4), (2, 5), (2, 8), (4, 9)):
        copy = run.parent / f"from-{step}"
        shutil.copytree(run, copy)
        (copy / "finished.json").unlink()
        resume = str(copy / "checkpoints" / f"step-{step:08d}")
        run_ranks(run_all, ranks, [(path, [], resume, ())], joined=False)
        for mine, other in zip(records(copy), records(run), strict=True):
            assert [mine[key] for key in ("step", "samples", "ids", "lr")] == [
                other[key] for key in ("step", "samples", "ids", "lr")
            ]
            assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)
            assert mine.get("gamma") == other.get("gamma")
        assert_close(weights(copy, 10), weights(run, 10))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_batch_changed_on_resume_trains_like_a_stage(tmp_path: Path) -> None:
    stages = [{"until": 64}, {"until": 128, "global_batch": 32, "micro_batch": 8}]
    # The warmup has more steps than are left of the larger batch.
    path = write(tmp_path / "run", stages, optim=OPTIM | {"warmup_steps": 5})
    by_hand = ["stages=[]", "samples=128", "name=by hand"]
    changed = [*by_hand, "global_batch=32", "micro_batch=8"]
    run, other = (path.parent / "runs" / name for name in ("tiny", "by hand"))
    resume = str(other / "checkpoints" / "step-00000004")
    allowed = ("global_batch", "micro_batch")
    jobs = [(path, [], None, ()), (path, by_hand, None, ())]
    run_ranks(run_all, 2, jobs, joined=False)
    (other / "finished.json").unlink()
    said = run_ranks(refused, 2, path, changed, resume, joined=False)[0]
    assert "global_batch: 16 in the checkpoint, 32 now" in said
    assert "--allow-change global_batch resumes" in said
    run_ranks(run_all, 2, [(path, changed, resume, allowed)], joined=False)
    same_as_uninterrupted(other, run)
    assert read(other / "checkpoints" / "step-00000006").meta["samples"] == 128
    assert "from step 4 on, global_batch is 32 instead of 16" in (other / LOG).read_text()


def refused(path: Path, overrides: list[str], resume: str | None) -> str:
    with pytest.raises(RefusedError) as caught:
        run_training(load_config(path, overrides), resume)
    return str(caught.value)


def find_refusals(path: Path) -> list[str]:
    later = "stages=[{until: 64}, {until: 144, %s}]"
    timm = path.parent / "timm.json"
    cases = [
        [later % "global_batch: 20"],
        [later % "image_size: 64", f"model.name={timm}"],
        [later % "image_size: 4"],
    ]
    return [refused(path, case, None) for case in cases]


def train_over_a_border(folder: Path) -> None:
    stages = [{"until": 32}, {"until": 128, "global_batch": 32}]
    # The upload of the first stage's checkpoint waits for the checkpoint of the second stage.
    last = folder / "make_sgd" / "runs" / "tiny" / "checkpoints" / "step-00000005"
    script = f'until [ -e {last} ]; do sleep 0.05; done; echo "$1" >> {folder}/uploaded'
    command = f"sh -c '{script}' {{path}} {{name}}"
    checkpoint = {"every_steps": 0, "keep_last": 1, "copy_command": command}

    def train(name: str, **checkpoint: Any) -> None:
        optim = {"lr": 1e-3, "warmup_steps": 0, "elementwise": True}
        optim["factory"] = f"helpers.stage_optimizers:{name}"
        path = write(folder / name, stages, optim=optim, checkpoint=checkpoint)
        run_training(load_config(path))

    train("make_sgd", **checkpoint)
    with pytest.raises(AskedToStopError, match="after step 3;"):
        train("make_sgd_after_a_signal", **checkpoint)
    # An error after a stage's steps is not a user's mistake, so `disco-ds launch` restarts the run.
    with pytest.raises(AgreedError, match="the disk does not answer") as caught:
        train("make_sgd_once")
    assert caught.value.exit_code == 1


def test_border_frees_the_engine_and_keeps_uploads_and_a_request_to_stop(tmp_path: Path) -> None:
    run_ranks(train_over_a_border, 1, tmp_path, joined=False)
    uploaded = (tmp_path / "uploaded").read_text().split()
    assert uploaded == [f"step-{step:08d}" for step in (2, 5, 2, 3)]
    # When the last checkpoint was saved, the first one was still being uploaded.
    (run,) = (tmp_path / "make_sgd" / "runs").iterdir()
    assert [step_of(path) for path in list_complete(run)] == [5]


def test_stages_that_cannot_work_are_refused_before_the_start(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    tower = {
        "image_size": 32,
        "timm_model_name": "test_vit",
        "timm_pool": "",
        "timm_proj": "linear",
    }
    text = TINY["text_cfg"] | {"vocab_size": BPE_SIZE}
    config = {"embed_dim": 16, "vision_cfg": tower, "text_cfg": text}
    (path.parent / "timm.json").write_text(json.dumps(config))
    batch, parameters, size = run_ranks(find_refusals, 2, path, joined=False)[0]
    assert "global_batch 20 is not a multiple of ranks x micro_batch (2 x 4 = 8)" in batch
    assert "the image size cannot change to 64, because visual.trunk.pos_embed of" in parameters
    assert not (path.parent / "runs").exists()
    assert "does not take images of 4 x 4" in size
