"""Exports trained weights for open_clip into a new folder: in open_clip's (and Hugging Face's) layout, as .pt, or both.

timm knows an image tower of disco_ds only after its module is imported. The README.md written beside the weights says
so, with the line that imports it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal, get_args

import open_clip
import timm
import torch
from open_clip.push_to_hf_hub import save_config_for_hf
from safetensors.torch import save_file
from torch import Tensor, nn

from disco_ds.checkpoints.weights import CONFIG, TENSORS, Weights, build_from, read_weights
from disco_ds.models.clip import build_tokenizer

Layout = Literal["open_clip", "pt", "both"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FILE = "weights.pt"

HEAD = """---
library_name: open_clip
pipeline_tag: zero-shot-image-classification
tags:
- clip
---
# {name}

A CLIP model trained with disco_ds: {count:,} values in {dtype}, from {origin}. In the folder above this one:
"""
NOTE = """
(Its image tower is known to timm once `{module}` is imported, and only then: disco_ds must be installed
where the model is loaded, and imported first, as below.)
"""
OWN = """
The model is built by `{factory}`, which must be importable where it is loaded:
```python
from disco_ds.checkpoints.weights import build_from, read_weights

model = build_from(read_weights("{folder}/weights.pt"))  # model.tokenizer, model.visual.preprocess_cfg
```
"""
"""How to load a model of the user's own."""
USES = {
    "open_clip": """
```python
{first}import open_clip

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:{folder}")
tokenizer = open_clip.get_tokenizer("local-dir:{folder}")
```
```sh
{benchmark} eval --model "local-dir:{folder}" --output RESULT.json \\
    --task zeroshot_classification --dataset wds/NAME --dataset_root SET
```
""",
    "pt": """
```python
{first}import open_clip

open_clip.add_model_config("{folder}/{name}.json")
model, _, preprocess = open_clip.create_model_and_transforms("{name}", pretrained="{folder}/weights.pt")
tokenizer = open_clip.get_tokenizer("{name}")
```
""",
}
"""How to load each layout, for README.md, whose head makes it a model card."""


def export_run(
    run: str | Path, to: str | Path, layout: Layout = "both", dtype: str = "fp32"
) -> Path:
    """Write the weights of a run folder, a checkpoint folder or an export into the new folder `to`.

    Memory: up to 14 bytes per parameter, 4 of them mapped files.

    Args:    layout: open_clip: for "local-dir:FOLDER"; pt: for create_model(name, pretrained=FILE); both; dtype: fp32,
             bf16 or fp16, of the parameters but logit_scale and logit_bias, which 16 bits would move.
    Returns: the folder.
    Raises:  ValueError if it exists already, or the weights cannot be read or held, or for another layout or dtype;
             nothing is then left behind. OSError where it cannot be written.

    Example: disco_ds.export_run("runs/first", "exports/first", layout="pt")
    """
    source, to = Path(run), Path(to)
    if layout not in get_args(Layout):
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(get_args(Layout))}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if to.exists():
        raise ValueError(f"{to} exists already; choose a new folder, an export never overwrites")
    weights = read_weights(source)
    if "factory" in weights.architecture and layout != "pt":
        raise ValueError(
            f"open_clip cannot build {weights.architecture['factory']}: choose layout pt (--format pt)"
        )
    model = build_from(weights)
    tensors = _convert(model, dtype)
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    try:
        partial.mkdir(parents=True)
        if layout != "pt":
            _write_folder(partial, weights, model, tensors)
        if layout != "open_clip":
            _write_file(partial, weights, model, tensors)
        count = sum(tensor.numel() for tensor in tensors.values())
        facts = {
            "folder": to.name,
            "name": weights.name,
            "origin": weights.origin.name,
            "count": count,
            "dtype": dtype,
        }
        (partial / "README.md").write_text(
            _describe(layout, weights.architecture, facts), encoding="utf-8"
        )
        partial.rename(to)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return to


def _convert(model: nn.Module, dtype: str) -> dict[str, Tensor]:
    """open_clip's state dict: logit_scale and logit_bias 0-d and in fp32, buffers as they are."""
    tensors = model.state_dict()
    for name, parameter in model.named_parameters():
        if name in ("logit_scale", "logit_bias"):
            tensors[name] = parameter.detach().reshape(())
            continue
        tensors[name] = parameter.detach().to(DTYPES[dtype])
        if not tensors[name].isfinite().all():
            raise ValueError(f"{name} has values that {dtype} cannot hold; export fp32")
    return tensors


def _write_folder(
    folder: Path, weights: Weights, model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    save_config_for_hf(model, folder / CONFIG, weights.architecture)
    (folder / TENSORS).chmod(
        (folder / CONFIG).stat().st_mode
    )  # safetensors lets the owner alone read it
    tokenizer = build_tokenizer(weights.settings, model)
    if hasattr(tokenizer, "save_pretrained"):  # open_clip's own is not in files
        tokenizer.save_pretrained(folder)
    found = type(open_clip.get_tokenizer(f"local-dir:{folder}"))
    if found is not type(tokenizer):
        raise ValueError(
            f"model {weights.name} has a {type(tokenizer).__name__} because of its name, and would have a "
            f"{found.__name__} when loaded from a folder: export layout pt, or set text_cfg.hf_tokenizer_name"
        )


def _write_file(
    folder: Path, weights: Weights, model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    about = {"name": weights.name, "model_cfg": weights.architecture}
    preprocess_cfg = open_clip.get_model_preprocess_cfg(model)
    torch.save({"state_dict": tensors, **about, "preprocess_cfg": preprocess_cfg}, folder / FILE)
    if "factory" not in weights.architecture:  # else there is nothing that open_clip could build
        (folder / f"{weights.name}.json").write_text(
            json.dumps(weights.architecture, indent=2) + "\n", encoding="utf-8"
        )


def _describe(layout: Layout, architecture: dict[str, Any], facts: dict[str, Any]) -> str:
    """The text of README.md, with the import without which timm cannot build an image tower of disco_ds."""
    if "factory" in architecture:
        return (HEAD + OWN).format(**facts, factory=architecture["factory"])
    name = str(architecture["vision_cfg"].get("timm_model_name", "")).split(".")[0]
    module = timm.model_entrypoint(name).__module__ if timm.is_model(name) else "timm"
    uses = "".join(text for kind, text in USES.items() if layout in (kind, "both"))
    if module.split(".")[0] == "timm":
        return (HEAD + uses).format(**facts, first="", benchmark="clip_benchmark")
    benchmark = f'python -c "import {module}; from clip_benchmark.cli import main; main()"'
    return (HEAD + NOTE + uses).format(
        **facts, module=module, first=f"import {module}\n", benchmark=benchmark
    )
