"""Export trained weights for open_clip (as a folder in its Hugging Face layout) or transformers.

timm recognizes an image tower of disco_ds only after the tower's module is imported. The exported
README.md says so and contains the import line.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import open_clip
import timm
from open_clip.push_to_hf_hub import save_config_for_hf
from safetensors.torch import save_file
from torch import nn

from disco_ds.checkpoints.transformers_export import check_as_user, convert, write_processor
from disco_ds.checkpoints.weights import MODEL_CONFIG, TENSORS, Weights, build_from, read_weights
from disco_ds.config import Tree
from disco_ds.distributed.comm import DTYPES
from disco_ds.models.clip import build_tokenizer
from disco_ds.models.param_groups import SCALES

Layout = Literal["open_clip", "transformers"]

HEAD = """---
library_name: open_clip
pipeline_tag: zero-shot-image-classification
tags:
- clip
---
# {name}

A CLIP model trained with disco_ds. Its weights come from {origin} and are stored in {dtype}. Run the code below in the
folder that contains this one.
"""
"""Beginning of an export's README.md. Its YAML header makes the file a Hugging Face model card."""
NOTE = """
(timm does not recognize this model's image tower until `{module}` is imported. disco_ds must be
installed where the model is loaded, and imported first, as shown below. For the same reason, run clip_benchmark as
`python -c "import {module}; from clip_benchmark.cli import main; main()"`.)
"""
"""Paragraph of an export's README.md about a model with an image tower of disco_ds."""
CUSTOM = """
The model is built by `{factory}`, which must be importable where the model is loaded:
```python
from disco_ds.checkpoints.weights import build_from, read_weights

model = build_from(read_weights("{folder}"))  # model.tokenizer, model.visual.preprocess_cfg
```
"""
"""Section of an export's README.md about loading a custom model."""
USES = {
    "open_clip": """
```python
{first}import open_clip

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:{folder}")
tokenizer = open_clip.get_tokenizer("local-dir:{folder}")
```
```sh
clip_benchmark eval --model "local-dir:{folder}" --output RESULT.json \\
    --task zeroshot_classification --dataset wds/NAME --dataset_root SET
```
""",
    "transformers": """
```python
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

model = AutoModel.from_pretrained("{folder}")
images, texts = AutoImageProcessor.from_pretrained("{folder}"), AutoTokenizer.from_pretrained("{folder}")
tokens = texts(["a photo"], padding="max_length", truncation=True, return_tensors="pt")
features = model.get_text_features(**tokens)
```
""",
}
"""Sections of an export's README.md about loading the export, keyed by layout."""


def export_run(
    run: str | Path,
    to: str | Path,
    layout: Layout = "open_clip",
    dtype: str = "fp32",
    ema: bool = False,
) -> Path:
    """Export the weights of a run folder, a checkpoint folder or an export into a new folder.

    Memory: up to 14 bytes per parameter, of which 4 are memory-mapped files.

    Args:
        run: The run folder, checkpoint folder or export to read.
        to: The new folder.
        layout: "open_clip" for a folder that open_clip loads as "local-dir:FOLDER", or "transformers" for a folder
            that AutoModel.from_pretrained loads as a CLIPModel or SiglipModel. Only disco_ds can load a custom model.
        dtype: fp32, bf16 or fp16. logit_scale and logit_bias are always fp32, because 16 bits would
            change them.
        ema: Whether to export the moving average of the weights (optim.ema) instead of the last weights.

    Returns:
        The new folder.

    Raises:
        ValueError: If the new folder already exists, the weights cannot be read, a value does not fit
            the dtype, or the layout or dtype is unknown. Nothing is left behind.
        OSError: If the files cannot be written.

    Example: disco_ds.export_run("runs/first", "exports/first")
    """
    to = Path(to)
    if layout not in USES:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(USES)}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if to.exists():
        raise ValueError(f"{to} exists already; choose a new folder")
    weights = read_weights(run, ema)
    model: Any = build_from(weights)
    exported = model
    tokenizer = build_tokenizer(weights.settings, model)
    if layout == "transformers":
        exported = convert(model, weights.name)
        check_as_user(exported, model, tokenizer)
    else:
        _check_image_size(model, weights.architecture)
    _cast(exported, dtype)
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
    try:
        partial.mkdir(parents=True)
        if layout == "transformers":
            exported.save_pretrained(partial)
            write_processor(partial, model, tokenizer)
        else:
            _write_open_clip(partial, weights, exported, tokenizer)
        facts = {
            "folder": to.name,
            "name": weights.name,
            "origin": weights.origin.name,
            "dtype": dtype,
        }
        readme = _render_readme(layout, weights.architecture, facts)
        (partial / "README.md").write_text(readme, encoding="utf-8")
        partial.rename(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # exists only after an error
    return to


def _check_image_size(model: Any, architecture: Tree) -> None:
    """Refuse an image size that open_clip cannot restore, because it builds timm towers at their default size."""
    name = architecture.get("vision_cfg", {}).get("timm_model_name")
    if name and hasattr(model.visual.trunk, "set_input_size"):
        known = timm.get_pretrained_cfg(name)  # None for a tower that a user has registered
        height, width = model.visual.image_size
        if known and known.input_size[1:] != (height, width):
            _, *default = known.input_size
            raise ValueError(
                f"open_clip builds {name} for images of {default[0]} x {default[1]} and cannot load weights for "
                f"{height} x {width}: choose layout transformers (--format transformers)"
            )


def _cast(model: nn.Module, dtype: str) -> None:
    """Convert the parameters, except the logit scale and bias, to the dtype in place. Buffers are unchanged."""
    for name, parameter in model.named_parameters():
        if name not in SCALES:
            parameter.data = parameter.data.to(DTYPES[dtype])
            if not parameter.isfinite().all():
                raise ValueError(
                    f"{name} has values that are not finite in {dtype}; export fp32, unless training has diverged"
                )


def _write_open_clip(folder: Path, weights: Weights, model: nn.Module, tokenizer: Any) -> None:
    # safetensors refuses tensors that share memory.
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for name in tensors.keys() & SCALES:
        tensors[name] = tensors[name].reshape(())
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    save_config_for_hf(model, folder / MODEL_CONFIG, weights.architecture)
    # safetensors creates a file that only its owner may read, so copy the permissions of the config file.
    (folder / TENSORS).chmod((folder / MODEL_CONFIG).stat().st_mode)
    if "factory" in weights.architecture:
        return
    if hasattr(tokenizer, "save_pretrained"):  # open_clip's built-in tokenizer has no files
        tokenizer.save_pretrained(folder)
    found = type(open_clip.get_tokenizer(f"local-dir:{folder}"))
    if found is not type(tokenizer):
        raise ValueError(
            f"open_clip chose a {type(tokenizer).__name__} for model {weights.name} by its name, but would choose a "
            f"{found.__name__} for the exported folder: set text_cfg.hf_tokenizer_name in the model config"
        )


def _render_readme(layout: Layout, architecture: Tree, facts: Tree) -> str:
    """Return the text of README.md. For an image tower of disco_ds, it includes the import that timm needs."""
    if "factory" in architecture:
        return (HEAD + CUSTOM).format(**facts, factory=architecture["factory"])
    use = USES[layout]
    name = architecture["vision_cfg"].get("timm_model_name", "")
    module = timm.model_entrypoint(name).__module__ if timm.is_model(name) else "timm"
    if module.startswith("timm"):
        return (HEAD + use).format(**facts, first="")
    return (HEAD + NOTE + use).format(**facts, module=module, first=f"import {module}\n")
