"""Weights read from checkpoints are bit-identical to the engine's master weights, at every ZeRO stage and precision."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from disco_ds.checkpoints.keep import find_latest
from disco_ds.checkpoints.resume import identity_of, shape_of
from disco_ds.checkpoints.weights import MODEL_CONFIG, TENSORS, build_from, read_weights
from disco_ds.config import EmaSettings, ModelSettings, render_ds_config
from disco_ds.distributed import comm
from disco_ds.models.clip import build_model, build_tokenizer, read_architecture
from disco_ds.runs.run_folder import CHECKPOINTS, META
from disco_ds.training.engine import backward_and_step, build_engine, set_lr
from disco_ds.training.optimizer import averaged, update_average
from helpers.checkpoints import flip, plant, save_now
from helpers.dist import run_ranks
from helpers.machine import runnable
from helpers.towers import CONTEXT, batches, masters, tiny_config, write_tiny
from helpers.trained import write_run

BF16 = {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero0": ({"zero_optimization": {"stage": 0}}, {}),
    "zero0_autocast_frozen": (
        {"zero_optimization": {"stage": 0}, **AUTOCAST},
        {"model__lock_image": True},
    ),
    "zero1": ({"zero_optimization": {"stage": 1}}, {}),
    "zero1_autocast": ({"zero_optimization": {"stage": 1}, **AUTOCAST}, {}),
    "zero1_bf16_frozen": ({"zero_optimization": {"stage": 1}, **BF16}, {"model__lock_image": True}),
    "zero1_fp16": (
        {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "initial_scale_power": 4}},
        {},
    ),
    "zero2_bf16": ({"zero_optimization": {"stage": 2}, **BF16}, {}),
    "zero2_round_robin_frozen": (
        {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
        {"model__lock_text": True},
    ),
    "zero2_offload": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {},
    ),
    "zero3": ({"zero_optimization": {"stage": 3}}, {}),
    "zero3_bf16_frozen": ({"zero_optimization": {"stage": 3}, **BF16}, {"model__lock_image": True}),
    "zero3_offload": ({"zero_optimization": {"stage": 3, **OFFLOAD}, **BF16}, {}),
}


def hold(engine: Any, name: str) -> dict[str, Tensor]:
    """Return the fp32 master weights of trained parameters, and the values of frozen ones. Collective."""
    # With round_robin_gradients, DeepSpeed's safe_get_full_fp32_param returns the values of another parameter. These
    # cases train in fp32, so the parameters themselves are the master weights.
    held = {} if "round_robin" in name else masters(engine)
    parameters = dict(engine.module.named_parameters())
    gather = engine.zero_optimization_stage() == 3
    with (
        deepspeed.zero.GatheredParameters(list(parameters.values()))
        if gather
        else contextlib.nullcontext()
    ):
        return held | {
            key: p.detach().float().clone() for key, p in parameters.items() if key not in held
        }


def train_and_save(
    folder: Path, model_file: str, name: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take two steps and save a checkpoint. Return the engine's weights and their averages. Collective."""
    ds_config, changes = CASES[name]
    config = tiny_config(
        model_file,
        ds_config,
        global_batch=8,
        micro_batch=4,
        optim={"name": "adamw", "lr": 1.0, "warmup_steps": 0},
        **changes,
    )
    torch.manual_seed(0)
    model: Any = build_model(config.model, initial_bias=-10.0)
    engine = build_engine(model, config.optim, render_ds_config(config, comm.size()))
    for step, batch in enumerate(batches(2, 4, seed=comm.rank())):
        set_lr(engine, 1e-3 * (step + 1))
        image, text, scale, bias = engine(batch["image"], batch["text"])
        surrogate = (image * text).sum() + scale.sum() / 100 + bias.sum()
        backward_and_step(engine, iter([surrogate]))
        update_average(engine, EmaSettings())
    held = hold(engine, name)
    with averaged(engine):
        average = hold(engine, name)
    if comm.rank() == 0:
        (folder / "config.yaml").write_text(config.to_yaml())
    same = identity_of(config, "abc", read_architecture(config.model))
    meta = {"step": 2, "num_steps": 2, "identity": same, "shape": shape_of(config, comm.size())}
    save_now(folder, meta, engine, {}, {})
    engine.destroy()
    return held, average


def compare_all(folder: Path, model_file: str, names: list[str]) -> list[str]:
    """Train and save each case, and compare its checkpoint with the engine. Collective.

    Returns:
        Descriptions of the differences on rank 0; an empty list on other ranks.
    """
    failures = []
    for name in names:
        run = folder / name
        run.mkdir(exist_ok=True)
        for ema, held in enumerate(train_and_save(run, model_file, name)):
            if comm.rank() != 0:
                continue
            read = read_weights(run, ema=bool(ema)).tensors
            failures += [f"{name}: {key} is in one only" for key in read.keys() ^ held.keys()]
            failures += [
                f"{name}: {key} of {ema} differs by {(read[key] - held[key]).abs().max()}"
                for key in read.keys() & held.keys()
                if read[key].dtype != torch.float32 or not torch.equal(read[key], held[key])
            ]
        if comm.rank() == 0:
            failures += [f"{name}: {file} is read unverified" for file in unverified(run)]
            trained = read[
                "visual.proj" if "model__lock_text" in CASES[name][1] else "text_projection"
            ]
            for dtype in (torch.bfloat16, torch.float16):
                if torch.equal(trained, trained.to(dtype).float()):
                    failures.append(
                        f"{name}: the weights fit into {dtype}, so masters are not tested"
                    )
    return failures


def unverified(run: Path) -> list[str]:
    """Flip a bit in each of DeepSpeed's files in turn, and return those that are read without an error."""
    found = []
    for file in (find_latest(run) / "engine").iterdir():
        # The model-states files of ranks above 0 contain only frozen parameters.
        if "zero_pp_rank_1_mp_rank_00_model" not in file.name:
            flip(file)
            with contextlib.suppress(ValueError):
                read_weights(run)
                found.append(file.name)
            flip(file)
    return found


FAST = [
    "zero0_autocast_frozen",
    "zero1_bf16_frozen",
    "zero2_bf16",
    "zero3_bf16_frozen",
    "zero3_offload",
]
REST = runnable([name for name in CASES if name not in FAST])


@pytest.mark.parametrize(
    "names", [FAST, pytest.param(REST, marks=pytest.mark.slow)], ids=["fast", "rest"]
)
def test_tensors_are_the_masters_at_every_stage_and_precision(
    names: list[str], tmp_path: Path
) -> None:
    failures = run_ranks(compare_all, 2, tmp_path, write_tiny(tmp_path), names)[0]
    assert not failures, "\n".join(failures)


def test_read_weights_takes_the_last_checkpoint_or_the_one_named(tmp_path: Path) -> None:
    model_file = write_tiny(tmp_path)
    models = {}
    for step in (5, 40):
        torch.manual_seed(step)
        models[step] = build_model(ModelSettings(name=model_file))
        write_run(tmp_path / "run", models[step], model_file, step)
    last, first = (
        read_weights(tmp_path / "run"),
        read_weights(tmp_path / "run/checkpoints/step-00000005"),
    )
    assert last.origin.name == "step-00000040"
    for weights, model in ((last, models[40]), (first, models[5])):
        assert weights.name == "tiny"
        assert torch.equal(weights.tensors["text_projection"], model.text_projection)


@pytest.mark.parametrize("bias", [None, -10.0])
def test_build_from_has_the_features_of_the_run(bias: float | None, tmp_path: Path) -> None:
    model_file = write_tiny(tmp_path)
    model = build_model(ModelSettings(name=model_file), initial_bias=bias).eval()
    write_run(tmp_path / "run", model, model_file)
    built = build_from(read_weights(tmp_path / "run"))
    assert not built.training
    (batch,) = batches(1, 4)
    for got, wanted in zip(
        built(batch["image"], batch["text"]), model(batch["image"], batch["text"]), strict=True
    ):
        assert (got is None and wanted is None) or torch.equal(got, wanted)


@pytest.mark.parametrize("change", ["gone", "other"])
def test_model_is_built_as_it_was_trained_whatever_became_of_its_config_file(
    change: str, tmp_path: Path
) -> None:
    model_file = write_tiny(tmp_path)
    model = build_model(ModelSettings(name=model_file))
    write_run(tmp_path / "run", model, model_file)
    if change == "gone":
        Path(model_file).unlink()
    else:
        write_tiny(tmp_path, layers=3)
    weights = read_weights(tmp_path / "run")
    assert weights.name == "tiny"
    assert build_from(weights).state_dict().keys() == model.state_dict().keys()
    assert (
        build_tokenizer(
            weights.settings, build_model(ModelSettings(name="quickstart"))
        ).context_length
        == CONTEXT
    )


def test_build_from_other_tensors_names_them(tmp_path: Path) -> None:
    model_file = write_tiny(tmp_path)
    write_run(tmp_path / "run", build_model(ModelSettings(name=model_file)), model_file)
    weights = read_weights(tmp_path / "run")
    del weights.tensors["text_projection"]
    with pytest.raises(ValueError, match=r"step-00000007 .*model tiny.*text_projection"):
        build_from(weights)


def spoil(run: Path, kind: str) -> Path:
    """Damage a run folder. Return the path to read."""
    step = run / CHECKPOINTS / "step-00000007"
    file = step / "engine" / "mp_rank_00_model_states.pt"
    if kind == "no checkpoint":
        (step / META).unlink()
        return run
    if kind == "no meta":
        (step / META).unlink()
        return step
    if kind == "no file":
        file.unlink()
    elif kind == "flipped bit":
        flip(file)
    elif kind == "copied away":
        return shutil.copytree(step, run.parent / "copy")
    elif kind == "foreign folder":
        return run.parent
    elif kind == "foreign export":
        (run / MODEL_CONFIG).write_text("{}")
        (run / TENSORS).touch()
    elif kind == "half an export":
        (run / MODEL_CONFIG).write_text("{}")
    elif kind == "nothing":
        return run / "nothing"
    return run


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no checkpoint", "has no complete checkpoint"),
        ("no meta", "is not a complete disco_ds checkpoint"),
        ("no file", "is incomplete: engine/mp_rank_00_model_states.pt is missing"),
        (
            "flipped bit",
            "step-00000007 is damaged: engine/mp_rank_00_model_states.pt is not what was written; "
            "previous complete checkpoint: none",
        ),
        ("copied away", "copy is not inside a run folder: .*config.yaml is missing"),
        ("foreign folder", "contains no weights: expected a run folder"),
        ("foreign export", "run is not a complete open_clip folder: KeyError"),
        ("half an export", "run is not a complete open_clip folder: "),
        ("nothing", "nothing contains no weights"),
    ],
)
def test_read_weights_what_is_not_whole_or_ours_is_refused(
    kind: str, words: str, tmp_path: Path
) -> None:
    model_file = write_tiny(tmp_path)
    write_run(tmp_path / "run", build_model(ModelSettings(name=model_file)), model_file)
    path = spoil(tmp_path / "run", kind)
    with pytest.raises(ValueError, match=words):
        read_weights(path)


def test_read_weights_runs_no_code_that_was_not_written_there_and_names_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    model_file = write_tiny(tmp_path)
    model = build_model(ModelSettings(name=model_file))
    older, newest = (write_run(tmp_path / "run", model, model_file, step) for step in (5, 40))
    plant(newest, "engine/mp_rank_00_model_states.pt", tmp_path / "ran")
    with pytest.raises(ValueError, match=f"is not what was written; .*{older}"):
        read_weights(tmp_path / "run")
    assert not (tmp_path / "ran").exists()
    assert read_weights(older).origin == older
    # A damage that the sizes reveal, before any file is read, is refused as well.
    (newest / "engine" / "mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is damaged: .* has 0 bytes"):
        read_weights(tmp_path / "run")
