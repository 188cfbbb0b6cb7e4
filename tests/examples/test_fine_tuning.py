"""Fine-tuning as docs/fine_tuning.md shows it: weights are evaluated, trained, evaluated again and exported."""

import json
import math
import re
import shlex
import string
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers
import yaml
from open_clip.push_to_hf_hub import save_for_hf

from disco_ds.checkpoints.weights import build_from, read_weights
from disco_ds.cli.main import main
from disco_ds.config import ModelSettings, load_config
from disco_ds.models.clip import build_model, build_tokenizer
from disco_ds.training.build import build
from disco_ds.training.loop import finish, train
from helpers.architectures import architecture
from helpers.dist import run_ranks
from helpers.launched import records
from helpers.paths import ROOT
from helpers.shards import noise
from helpers.tiny_run import recipe

SCALE, BIAS = 117.0, -12.5
EMOJI = "bundled:emoji/unseen"
WORDS = ["A photo, of_a cat!", "dog"]
CASES: dict[str, dict[str, Any]] = {
    "clip": {"optim": {"image": {"lr_factor": 0.5, "layer_decay": 0.8}}},
    "siglip": {"loss": {"name": "siglip"}, "model": {"lock_image": True}},
    "siglip2": {"loss": {"name": "siglip"}},
    "siglip with InfoNCE": {"loss": {"name": "disco_fused"}},
    "siglip2 with InfoNCE": {"loss": {"name": "disco_fused"}, "model": {"lock_image": True}},
}
SLOW = ("siglip", "siglip2", "siglip with InfoNCE", "siglip2 with InfoNCE")


def make_weights(kind: str, folder: Path) -> tuple[str, Any, dict[str, torch.Tensor]]:
    """Write a model config. Return its path, a model that stands for a pretrained one, and its state dict."""
    name = folder / f"{kind}.json"
    name.write_text(json.dumps(architecture(kind, folder)))
    torch.manual_seed(0)
    model: Any = build_model(
        ModelSettings(name=str(name)), initial_bias=BIAS if "siglip" in kind else None
    )
    torch.nn.init.constant_(model.logit_scale, math.log(SCALE))
    for key in ("logit_scale", "logit_bias"):
        if (value := getattr(model, key)) is not None:
            setattr(model, key, torch.nn.Parameter(value.detach().reshape(())))
    return str(name), model, {key: value.clone() for key, value in model.state_dict().items()}


def run_recipe(path: Path) -> None:
    with ExitStack() as stack:
        run = build(load_config(path), None, stack)
        train(run)
        finish(run)


def evaluate(to: Path, *words: object) -> dict[str, Any]:
    assert main(["eval", *map(str, words), "--json", str(to)]) == 0
    return json.loads(to.read_text())


@torch.no_grad()
def check_exports(run: Path, for_open_clip: Path, for_transformers: Path) -> Any:
    """Check that both exports compute the features of the run. Return the model that open_clip loads."""
    weights = read_weights(run)
    ours: Any = build_from(weights)
    model: Any = open_clip.create_model(f"local-dir:{for_open_clip}").eval()
    theirs = transformers.AutoModel.from_pretrained(for_transformers).eval()
    tokens = build_tokenizer(weights.settings, ours)(WORDS)
    assert torch.equal(open_clip.get_tokenizer(f"local-dir:{for_open_clip}")(WORDS), tokens)
    read = transformers.AutoTokenizer.from_pretrained(for_transformers)
    their_tokens = read(WORDS, padding="max_length", truncation=True, return_tensors="pt")
    images = torch.randn(2, 3, 32, 32)
    for method, value, their_value in (
        ("image_features", {"pixel_values": images}, images),
        ("text_features", {"input_ids": their_tokens["input_ids"]}, tokens),
    ):
        encode = "encode_" + method.partition("_")[0]
        expected = getattr(ours, encode)(their_value)
        found = getattr(model, encode)(their_value)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        found = getattr(theirs, f"get_{method}")(**value)
        features = getattr(found, "pooler_output", found)
        tolerance = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(features, expected, rtol=0, atol=tolerance)
    for key in ("logit_scale", "logit_bias"):
        found, expected = getattr(model, key), getattr(ours, key)
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found.reshape(1), expected)
    return model


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_pretrained_weights_are_evaluated_trained_and_exported(case: str, tmp_path: Path) -> None:
    kind, changes = case.split()[0], CASES[case]
    name, _, state = make_weights(kind, tmp_path)
    weights = tmp_path / "weights.pt"
    torch.save(state, weights)
    path = recipe(
        tmp_path,
        model={"name": name, "pretrained": str(weights), **changes.get("model", {})},
        loss=changes.get("loss", {"name": "disco"}),
        optim={"lr": 1e-3, "warmup_steps": 0, **changes.get("optim", {})},
        eval={"labeled": {"emoji": EMOJI}, "label_key": "{json[caption]}"},
        steps=2,
    )
    before = evaluate(tmp_path / "before.json", name, "--weights", weights, "--config", path)
    run_ranks(run_recipe, 2, path)
    run = tmp_path / "runs" / "tiny"
    scales = [record["scale"] for record in records(run) if "scale" in record]
    assert scales[0] == pytest.approx(SCALE)
    # The pretrained scale is above model.max_scale. It must not be clamped, and it must not rise.
    assert len(scales) == 2
    assert SCALE * 0.99 < scales[1] <= SCALE * 1.00001
    after = evaluate(tmp_path / "after.json", run)
    assert before.keys() == after.keys()
    folders = {form: tmp_path / form for form in ("open_clip", "transformers")}
    for form, folder in folders.items():
        assert main(["export", str(run), "--to", str(folder), "--format", form]) == 0
    model = check_exports(run, folders["open_clip"], folders["transformers"])
    exported = evaluate(tmp_path / "exported.json", folders["open_clip"], "--config", path)
    assert exported["sets"] == after["sets"]
    same = {
        key
        for key, value in model.state_dict().items()
        if torch.equal(value, state.get(key, value))
    }
    locked = {key for key in state if key.startswith("visual.")}
    assert locked <= same if changes.get("model") else not locked & same
    if changes.get("loss", {}).get("name") == "siglip":
        assert model.logit_bias.item() == pytest.approx(BIAS, abs=0.01)
    else:
        assert model.logit_bias is None


def write_captions(path: Path, count: int) -> None:
    rows = []
    for number in range(count):
        noise(40 + 9 * number, 40).save(path.parent / f"{path.stem}-{number}.png")
        rows.append(f"{path.stem}-{number}.png\t{string.ascii_lowercase[number:][:9]}\n")
    path.write_text("filepath\ttitle\n" + "".join(rows))


def test_the_page_leads_from_a_folder_of_the_hub_to_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "fine_tuning.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    name, hub, _ = make_weights("siglip2", tmp_path)
    settings = ModelSettings(name=name)
    save_for_hf(
        hub,
        build_tokenizer(settings, hub),
        json.loads(Path(name).read_text()),
        tmp_path / "siglip2",
    )
    Path(name).unlink()
    write_captions(tmp_path / "train.csv", 16)
    write_captions(tmp_path / "held_out.csv", 6)
    small = {"global_batch": 8, "micro_batch": 2, "runs": str(tmp_path / "runs")}
    tree = yaml.safe_load(blocks["yaml"]) | small
    tree["optim"] |= {"warmup_steps": 1, "lr": 1e-3}
    tree["data"]["workers"] = 0
    tree["log"] = {"every_steps": 1}
    tree["deepspeed"] = {"base": tree["deepspeed"], "torch_autocast": {"enabled": False}}
    monkeypatch.chdir(tmp_path)
    Path("fine_tune.yaml").write_text(yaml.safe_dump(tree))
    for line in blocks[""].splitlines():
        words = shlex.split(line)
        if words[0] == "torchrun":
            assert words[3:] == ["-m", "disco_ds", "train", "--config", "fine_tune.yaml"]
            run_ranks(run_recipe, 2, tmp_path / "fine_tune.yaml")
        else:
            assert words[0] == "disco-ds"
            assert main(words[1:]) == 0, line
    before, after = (
        json.loads(Path(f"{when}.json").read_text())["sets"][0] for when in ("before", "after")
    )
    assert before.keys() == after.keys()
    assert before["num_images"] == 6
    run = Path("runs/fine_tune")
    found = records(run)
    last = [record for record in found if "eval/held_out_i2t_r1" in record][-1]
    for name in ("i2t_r1", "i2t_r5", "t2i_r1", "t2i_r5"):
        assert last[f"eval/held_out_{name}"] == after[name], name
    first = next(record for record in found if "scale" in record)
    assert first["scale"] == pytest.approx(SCALE)
    assert first["bias"] == pytest.approx(BIAS, abs=0.01)
    model = check_exports(run, Path("mine"), Path("mine_hf"))
    assert model.logit_bias.item() == pytest.approx(BIAS, abs=0.1)
