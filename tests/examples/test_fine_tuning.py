"""Fine-tuning as docs/training.md shows it: weights are evaluated, trained, evaluated again and exported."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers

from disco_ds.cli.main import main
from disco_ds.config import ModelSettings, load_config
from disco_ds.models.clip import build_model
from disco_ds.training.build import build
from disco_ds.training.loop import finish, train
from helpers.architectures import architecture
from helpers.dist import run_ranks
from helpers.launched import records
from helpers.tiny_run import recipe

SCALE, BIAS = 117.0, -12.5
EMOJI = "bundled:emoji/unseen"
CASES: dict[str, dict[str, Any]] = {
    "clip": {"optim": {"image": {"lr_factor": 0.5, "layer_decay": 0.8}}},
    "siglip": {"loss": {"name": "siglip"}, "model": {"lock_image": True}},
    "siglip2": {"loss": {"name": "siglip"}},
    "siglip with InfoNCE": {"loss": {"name": "disco_fused"}},
}


def write_weights(folder: Path, kind: str) -> tuple[str, Path, dict[str, Any]]:
    """Write a model config and pretrained weights, and return their paths and the weights."""
    name, weights = folder / f"{kind}.json", folder / "weights.pt"
    name.write_text(json.dumps(architecture(kind, folder)))
    torch.manual_seed(0)
    model = build_model(
        ModelSettings(name=str(name)), initial_bias=BIAS if "siglip" in kind else None
    )
    torch.nn.init.constant_(model.logit_scale, math.log(SCALE))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    torch.save(state, weights)
    return str(name), weights, state


def run_recipe(path: Path) -> None:
    with ExitStack() as stack:
        run = build(load_config(path), None, stack)
        train(run)
        finish(run)


def evaluate(to: Path, *words: object) -> dict[str, Any]:
    assert main(["eval", *map(str, words), "--json", str(to)]) == 0
    return json.loads(to.read_text())


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_pretrained_weights_are_evaluated_trained_and_exported(case: str, tmp_path: Path) -> None:
    kind, changes = case.split()[0], CASES[case]
    name, weights, state = write_weights(tmp_path, kind)
    path = recipe(
        tmp_path,
        model={"name": name, "pretrained": str(weights), **changes.get("model", {})},
        loss=changes.get("loss", {"name": "disco"}),
        optim={"lr": 1e-3, "warmup_steps": 0, **changes.get("optim", {})},
        eval={"labeled": {"emoji": EMOJI}, "label_key": "{json[caption]}"},
        steps=2,
    )
    before = evaluate(tmp_path / "before.json", name, "--weights", weights, "--config", path)
    with torch.enable_grad():
        run_ranks(run_recipe, 2, path)
    run = tmp_path / "runs" / "tiny"
    scales = [record["scale"] for record in records(run) if "scale" in record]
    assert scales[0] == pytest.approx(SCALE)
    # The scale is above model.max_scale. It is not pulled down to it, and it does not rise.
    assert len(scales) == 2
    assert SCALE * 0.99 < scales[1] <= SCALE * 1.00001
    after = evaluate(tmp_path / "after.json", run)
    assert before.keys() == after.keys()
    folders = {form: tmp_path / form for form in ("open_clip", "transformers")}
    for form, folder in folders.items():
        assert main(["export", str(run), "--to", str(folder), "--format", form]) == 0
    model = open_clip.create_model(f"local-dir:{folders['open_clip']}").eval()
    same = [
        key
        for key, value in model.state_dict().items()
        if torch.equal(value, state.get(key, value))
    ]
    locked = {key for key in state if key.startswith("visual.")}
    assert locked <= set(same) if changes.get("model") else not locked & set(same)
    if changes.get("loss", {}).get("name") == "siglip":
        assert model.logit_bias.item() == pytest.approx(BIAS, abs=0.01)
    theirs = transformers.AutoModel.from_pretrained(folders["transformers"]).eval()
    images, tokens = torch.randn(2, 3, 32, 32), torch.randint(1, 9, (2, 12))
    # The text towers of CLIP end a text at its highest token.
    tokens[:, -1] = model.vocab_size - 1 if kind == "clip" else 1
    for mine, found in (
        (model.encode_image(images), theirs.get_image_features(pixel_values=images)),
        (model.encode_text(tokens), theirs.get_text_features(input_ids=tokens)),
    ):
        features = getattr(found, "pooler_output", found)
        torch.testing.assert_close(features, mine, rtol=0, atol=1e-5 * mine.abs().max().item())
