"""The moving average of the weights: compared with a float64 loop, saved, resumed, resharded, evaluated, exported."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disco_ds.checkpoints.export import export_run
from disco_ds.checkpoints.keep import find_latest
from disco_ds.checkpoints.weights import build_from, read_weights
from disco_ds.config import load_config, render_ds_config
from disco_ds.distributed import comm
from disco_ds.models.clip import build_model
from disco_ds.run import evaluate_run
from disco_ds.training.build import build
from disco_ds.training.engine import backward_and_step, build_engine, clamp_scale, set_lr
from disco_ds.training.loop import finish, train
from disco_ds.training.optimizer import averaged, update_average
from helpers.dist import run_ranks
from helpers.tiny_run import expect, recipe, refused
from helpers.towers import batches, masters, tiny_config, write_tiny

FP32 = {"torch_autocast": {"enabled": False}}
BF16 = {"bf16": {"enabled": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero0": ({"zero_optimization": {"stage": 0}}, {}),
    "zero1_sgd_locked": (
        {"zero_optimization": {"stage": 1}},
        {"optim__name": "sgd", "optim__momentum": 0.0, "model__lock_image": True},
    ),
    "zero2_bf16_offload": ({"zero_optimization": {"stage": 2, **OFFLOAD}, **BF16}, {}),
    "zero3_bf16": ({"zero_optimization": {"stage": 3}, **BF16}, {}),
    "zero3_lion": ({"zero_optimization": {"stage": 3}}, {"optim__name": "lion"}),
}
DECAY, EVERY, STEPS = 0.5, 2, 7


def features(engine: Any, batch: dict[str, Tensor]) -> Tensor:
    engine.eval()
    with torch.no_grad():
        image, text, scale, _ = engine(batch["image"], batch["text"])
    engine.train()
    return torch.cat([image.flatten(), text.flatten(), scale]).float()


def average_and_compare(model_file: str, names: list[str]) -> list[str]:
    failures = []
    for name in names:
        ds_config, changes = CASES[name]
        given = {"optim": {"lr": 1.0, "warmup_steps": 0}, "global_batch": 8, "micro_batch": 4}
        given["optim"] |= {"ema": {"decay": DECAY, "every_steps": EVERY}}
        config = tiny_config(model_file, ds_config, **given | changes)
        torch.manual_seed(0)
        engine = build_engine(
            build_model(config.model), config.optim, render_ds_config(config, comm.size())
        )
        mean: dict[str, Tensor] = {}
        for step, batch in enumerate(batches(STEPS, 4, seed=comm.rank()), 1):
            set_lr(engine, 1e-2)
            image, text, scale, _ = engine(batch["image"], batch["text"])
            before = scale.detach()
            backward_and_step(engine, iter([(image * text).sum() - scale.sum()]))
            clamp_scale(engine, 14.5, before)  # the scale rises from 14.29 to the bound
            update_average(engine, config.optim.ema)
            now = {key: value.double() for key, value in masters(engine).items()}
            weight = 1 - min(DECAY, (1 + step) / (10 + step)) ** EVERY
            if step == 1:
                mean = now
            elif step % EVERY == 0:
                mean = {key: torch.lerp(mean[key], now[key], weight) for key in mean}
        raw = features(engine, batch)
        last = masters(engine)
        with averaged(engine):
            held = masters(engine)
            smooth = features(engine, batch)
        with pytest.raises(comm.AgreedError), averaged(engine):
            raise comm.AgreedError
        for key, value in mean.items():
            error = (held[key] - value).abs().max().item()
            # The average must differ from the last weights, except for the scale, which reaches its bound in one step.
            same = torch.equal(held[key], last[key]) and key != "logit_scale"
            if error > 1e-6 or same:
                failures.append(f"{name} {key}: off by {error}")
        # A model with the averaged weights, in one process, must compute the same features.
        plain: Any = build_model(config.model)
        plain.load_state_dict({key: value.float() for key, value in mean.items()}, strict=False)
        plain.to(torch.bfloat16 if "bf16" in name else torch.float32)
        if not changes.get("model__lock_image"):
            error = (smooth - features(plain, batch)).abs().max().item()
            if error > (0.2 if "bf16" in name else 2e-5):
                failures.append(f"{name}: features off by {error}")
        if torch.equal(raw, smooth) or not torch.equal(raw, features(engine, batch)):
            failures.append(f"{name}: the features are not exchanged and restored")
        if any(not torch.equal(value, last[key]) for key, value in masters(engine).items()):
            failures.append(f"{name}: the weights are not restored")
        engine.destroy()
    return failures


@pytest.mark.parametrize(
    "names",
    [
        ["zero0", "zero3_bf16"],
        pytest.param(list(CASES), marks=pytest.mark.slow),
    ],
    ids=["fast", "all"],
)
def test_average_is_that_of_a_plain_loop_at_every_stage(names: list[str], tmp_path: Path) -> None:
    for failures in run_ranks(average_and_compare, 2, write_tiny(tmp_path), names):
        assert not failures, "\n".join(failures)


def train_and_finish(path: Path, resume: str | None = None, *overrides: str, **given: Any) -> None:
    with ExitStack() as stack:
        run = build(load_config(path, list(overrides)), resume, stack, **given)
        train(run)
        finish(run)


def write_run(folder: Path, **optim: Any) -> Path:
    sets = {"labeled": {"unseen": "bundled:emoji/unseen"}}
    optim = {"lr": 1e-3, "warmup_steps": 0, **optim}
    return recipe(folder, optim=optim, eval=sets, deepspeed={"base": "zero2", **FP32})


def test_run_evaluates_and_exports_its_average(tmp_path: Path) -> None:
    path = write_run(tmp_path, ema={"decay": 0.9})
    run_ranks(train_and_finish, 2, path)
    run = tmp_path / "runs" / "tiny"
    found = json.loads((run / "finished.json").read_text())
    for ema in (False, True):
        (result,) = evaluate_run(run, ema=ema)
        for name, value in result.values.items():
            assert found[f"eval/unseen{'_ema' if ema else ''}_{name}"] == pytest.approx(value)
    raw, average = (read_weights(run, ema=ema).tensors for ema in (False, True))
    assert raw.keys() == average.keys()
    exported = read_weights(export_run(run, tmp_path / "export", ema=True))
    for name, value in average.items():
        assert torch.equal(exported.tensors[name], value)
        assert name == "logit_scale" or not torch.equal(raw[name], value)
    with pytest.raises(ValueError, match="export, which has only one set of weights"):
        read_weights(tmp_path / "export", ema=True)


TIED = """
import torch
from torch import nn
from disco_ds import TwoTowers

class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3 * 16 * 16, 8)
        self.again = self.layer
    def forward(self, x):
        return self.layer(x.flatten(1)) + self.again(x.flatten(1))

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 8)
    def forward(self, tokens):
        return self.embedding(tokens).mean(1)

def tokenize(texts):
    return torch.tensor([[ord(c) % 128 for c in text[:6].ljust(6)] for text in texts])

def build():
    return TwoTowers(Image(), Text(), tokenize, 6, 128, 16)
"""


@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.slow), 2, 3])
def test_shared_parameter_is_averaged_under_all_its_names(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"tied_{level}.py").write_text(TIED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    optim = {"lr": 1e-2, "warmup_steps": 0, "ema": {"decay": 0.9}}
    model = {"factory": f"tied_{level}:build"}
    zero = {"base": f"zero{level}", **FP32}
    run_ranks(train_and_finish, 1, recipe(tmp_path, model=model, optim=optim, deepspeed=zero))
    run = tmp_path / "runs" / "tiny"
    last, average = (read_weights(run, ema=ema) for ema in (False, True))
    wanted = average.tensors["visual.layer.weight"]
    assert not torch.equal(wanted, last.tensors["visual.layer.weight"])
    built: Any = build_from(average)
    assert built.visual.again is built.visual.layer
    assert torch.equal(built.visual.layer.weight, wanted)
    exported = read_weights(export_run(run, tmp_path / "export", ema=True))
    assert torch.equal(exported.tensors["visual.again.weight"], wanted)


def resume_with_and_without(path: Path) -> None:
    """Train without an average, resume with one, and resume again without."""
    train_and_finish(path)
    ema = ["optim.ema.decay=0.9", "steps=6"]
    expect(
        refused(load_config(path, ema), "latest"),
        "optim.ema.decay: None in the checkpoint, 0.9 now",
        "--allow-change optim.ema resumes",
    )
    train_and_finish(path, "latest", *ema, allow_change=["optim.ema"])
    if comm.rank() == 0:
        shutil.copytree(find_latest(path.parent / "runs" / "tiny"), path.parent / "with")
    train_and_finish(path, "latest", "steps=8", allow_change=["optim.ema"])


@pytest.mark.slow
def test_average_may_be_added_and_dropped_on_resume(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    run_ranks(resume_with_and_without, 2, path)
    run = tmp_path / "runs" / "tiny"
    shutil.copytree(tmp_path / "with", run / "checkpoints" / "step-00000006", dirs_exist_ok=True)
    saved = run / "checkpoints" / "step-00000006"
    # The average began with the weights after step 5, so the weights after step 6 already differ from it.
    raw, average = (read_weights(saved, ema=ema).tensors for ema in (False, True))
    assert any(not torch.equal(raw[name], average[name]) for name in raw)
    for step in (4, 8):
        with pytest.raises(ValueError, match=f"step-0000000{step} has no average of the weights"):
            read_weights(run / "checkpoints" / f"step-0000000{step}", ema=True)
