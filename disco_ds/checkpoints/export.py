"""Export trained weights for open_clip (as a folder in its Hugging Face layout) or transformers.

timm recognizes an image tower of disco_ds only after the tower's module is imported. The exported
README.md says so and contains the import line.

Two families can be converted to transformers: CLIP with open_clip's vision and text transformers, and SigLIP with
timm's vision transformer. If the original and the converted model compute different features for a random batch, the
model is refused. This check also catches architectures that the code below does not handle.
"""

import copy
import re
import shutil
import string
from pathlib import Path
from typing import Any, Literal

import open_clip
import timm
import torch
from open_clip.push_to_hf_hub import save_config_for_hf
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer, get_clean_fn
from open_clip.transformer import QuickGELU
from PIL import Image
from safetensors.torch import save_file
from timm.layers.activations import GELUTanh
from torch import Tensor, nn

from disco_ds.checkpoints.weights import MODEL_CONFIG, TENSORS, Weights, build_from, read_weights
from disco_ds.config import Tree
from disco_ds.models.clip import build_tokenizer, read_preprocessing, unit_rows
from disco_ds.models.param_groups import SCALES
from disco_ds.names import explain_errors

Layout = Literal["open_clip", "transformers"]

HEAD = """---
library_name: {library}
pipeline_tag: zero-shot-image-classification
tags:
- clip
---
# {name}

A CLIP model trained with disco_ds. Its weights come from {origin}. Run the code below in the folder that contains this
one.
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
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

model = AutoModel.from_pretrained("{folder}")
prepare, tokenize = AutoImageProcessor.from_pretrained("{folder}"), AutoTokenizer.from_pretrained("{folder}")
image = prepare(Image.open("photo.jpg"), return_tensors="pt")
text = tokenize(["a cat", "a dog"], padding="max_length", truncation=True, return_tensors="pt")
output = model(**image, **text)
features = output.image_embeds, output.text_embeds  # unit rows
```
""",
}
"""Sections of an export's README.md about loading the export, keyed by layout."""
_TOLERANCE = 1e-5
"""Maximum difference between the features of the original and the converted model, relative to the largest feature."""
_NAMES = (
    (r"^visual\.(trunk\.)?", "vision_model."),
    (r"^(text\.)?(?=transformer|token_emb|positional_emb|ln_final|text_proj)", "text_model."),
    (r"\.(transformer\.res)?blocks\.", ".encoder.layers."),
    (r"\.attn\.(in_proj_|qkv\.)", ".self_attn.qkv_proj."),
    (r"\.attn\.(out_)?proj\.", ".self_attn.out_proj."),
    (r"\.(ln_|norm)([12])\.", r".layer_norm\2."),
    (r"\.c_fc\.", ".fc1."),
    (r"\.c_proj\.", ".fc2."),
    (r"\.attn_pool\.latent$", ".head.probe"),
    (r"\.attn_pool\.(q|kv)\.", ".head.attention.in_proj_"),
    (r"\.attn_pool\.proj\.", ".head.attention.out_proj."),
    (r"\.attn_pool\.norm\.", ".head.layernorm."),
    (r"\.attn_pool\.mlp\.", ".head.mlp."),
    (r"\.(conv1|patch_embed\.proj)\.", ".embeddings.patch_embedding."),
    (r"\.(positional_embedding|pos_embed)$", ".embeddings.position_embedding.weight"),
    (r"\.(class_embedding$|token_embedding\.)", r".embeddings.\1"),
    (r"\.ln_pre\.", ".pre_layrnorm."),
    (r"\.(ln_post|norm)\.", ".post_layernorm."),
    (r"\.ln_final\.", ".final_layer_norm."),
    (r"^vision_model\.proj$", "visual_projection.weight"),
    (r"^text_model\.text_projection$", "text_projection.weight"),
    (r"^text_model\.text_projection\.", "text_model.head."),
)
"""Replacements that turn open_clip's and timm's tensor names into transformers' names: (pattern, replacement).

They are applied in order."""


def export_run(
    run: str | Path,
    to: str | Path,
    layout: Layout = "open_clip",
    ema: bool = False,
) -> Path:
    """Export the weights of a run folder, a checkpoint folder or an export into a new folder.

    Memory: up to 14 bytes per parameter, of which 4 are memory-mapped files.

    Args:
        run: The run folder, checkpoint folder or export to read.
        to: The new folder.
        layout: "open_clip" for a folder that open_clip loads as "local-dir:FOLDER", or "transformers" for a folder
            that AutoModel.from_pretrained loads as a CLIPModel or SiglipModel. Only disco_ds can load a custom model.
        ema: Whether to export the moving average of the weights (optim.ema) instead of the last weights.

    Returns:
        The new folder.

    Raises:
        ValueError: If the new folder already exists, the weights cannot be read, or the layout is unknown. Nothing is
            left behind.
        OSError: If the files cannot be written.

    Example: disco_ds.export_run("runs/first", "exports/first")
    """
    to = Path(to)
    if layout not in USES:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(USES)}")
    if to.exists():
        raise ValueError(f"{to} exists already; choose a new folder")
    weights = read_weights(run, ema)
    model: Any = build_from(weights)
    tokenizer = build_tokenizer(weights.settings, model)
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
    try:
        partial.mkdir(parents=True)
        if layout == "transformers":
            converted = convert(model, weights.name)
            converted.save_pretrained(partial)
            write_processor(partial, model, tokenizer, converted)
        else:
            _check_image_size(model, weights.architecture)
            _write_open_clip(partial, weights, model, tokenizer)
        readme = _render_readme(to.name, weights, layout)
        (partial / "README.md").write_text(readme, encoding="utf-8")
        # safetensors creates files that only their owner may read.
        for path in partial.glob("*.safetensors"):
            path.chmod((partial / "README.md").stat().st_mode)
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
            raise ValueError(
                f"open_clip builds {name} for images of {known.input_size[1]} x {known.input_size[2]} and cannot load "
                f"weights for {height} x {width}: choose layout transformers (--format transformers)"
            )


def _write_open_clip(folder: Path, weights: Weights, model: nn.Module, tokenizer: Any) -> None:
    # safetensors refuses tensors that share memory.
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for name in tensors.keys() & SCALES:
        tensors[name] = tensors[name].reshape(())
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    save_config_for_hf(model, folder / MODEL_CONFIG, weights.architecture)
    if "factory" in weights.architecture:
        return
    if hasattr(tokenizer, "save_pretrained"):  # open_clip's built-in tokenizer has no files
        tokenizer.save_pretrained(folder)
    found = type(open_clip.get_tokenizer(f"local-dir:{folder}"))
    if not isinstance(tokenizer, found):
        raise ValueError(
            f"open_clip chose a {type(tokenizer).__name__} for model {weights.name} by its name, but would choose a "
            f"{found.__name__} for the exported folder: set text_cfg.hf_tokenizer_name in the model config"
        )


def _render_readme(folder: str, weights: Weights, layout: Layout) -> str:
    """Return the text of README.md. For an image tower of disco_ds, it includes the import that timm needs."""
    architecture = weights.architecture
    body, library, module, first = USES[layout], str(layout), "", ""
    if "factory" in architecture:
        body, library = CUSTOM, "disco_ds"
    elif timm.is_model(name := architecture["vision_cfg"].get("timm_model_name", "")):
        module = timm.model_entrypoint(name).__module__
        if not module.startswith("timm"):
            body, first = NOTE + body, f"import {module}\n"
    return (HEAD + body).format(
        folder=folder,
        name=weights.name,
        origin=weights.origin.name,
        library=library,
        factory=architecture.get("factory"),
        module=module,
        first=first,
    )


# transformers


def convert(model: Any, name: str) -> Any:
    """Convert a model to the transformers model that has the same outputs.

    Args:
        model: A model that open_clip built, in fp32 on the CPU.
        name: Name of the model for error messages.

    Raises:
        ValueError: If transformers has no equivalent architecture, or is not installed.
    """
    text = getattr(model, "text", model)
    visual = getattr(model.visual, "trunk", model.visual)
    towers = f"{type(visual).__name__} and {type(text).__name__}"
    with explain_errors(
        f"model {name} ({towers}) has parts that transformers' CLIPModel and SiglipModel lack"
    ):
        converted = _build(model, text)
        tensors = _rename(model.state_dict())
        # CLIPModel cannot store a bias, so drop it. SiglipModel needs a bias, so use 0 if the model has none.
        # Neither changes the ranking of the scores.
        bias = tensors.pop("logit_bias", torch.zeros(1))
        if hasattr(converted, "logit_bias"):
            tensors["logit_bias"] = bias
        converted.load_state_dict(tensors)
        difference = _compare(model.eval(), text, converted.eval())
        if difference > _TOLERANCE:
            raise RuntimeError(f"the converted model's features differ by {difference:.1g}")
    return converted


def write_processor(folder: Path, model: Any, tokenizer: Any, converted: Any) -> None:
    """Write the image processor and the tokenizer for the model that `convert` returned.

    Raises:
        ValueError: If transformers has no equivalent image processing or tokenizer.
    """
    import transformers

    look = read_preprocessing(model)
    height, width = look.size
    common = {
        "image_mean": list(look.mean),
        "image_std": list(look.std),
        "resample": Image.Resampling[look.interpolation.upper()].value,
    }
    if look.resize_mode == "longest":
        raise ValueError(
            "transformers cannot resize images by their longest side: choose another format"
        )
    size = {"height": height, "width": width}
    if look.resize_mode == "squash":
        images = transformers.SiglipImageProcessor(size=size, **common)
    else:
        images = transformers.CLIPImageProcessor(
            size={"shortest_edge": min(look.size)}, crop_size=size, **common
        )
    images.save_pretrained(folder)
    if isinstance(tokenizer, SimpleTokenizer) and hasattr(converted, "logit_bias"):
        raise ValueError(
            "open_clip's tokenizer pads texts with 0, but transformers with the end token, to which SigLIP attends: "
            "choose another format"
        )
    _convert_tokenizer(tokenizer).save_pretrained(folder)


def _convert_tokenizer(tokenizer: Any) -> Any:
    import transformers

    if isinstance(tokenizer, HFTokenizer):
        converted = copy.deepcopy(tokenizer.tokenizer)
        # Return no attention mask, as in open_clip, because SigLIP attends to padding.
        converted.model_input_names = ["input_ids"]
        if tokenizer.clean_fn is get_clean_fn("canonicalize"):
            converted = _canonicalize(converted)
    elif isinstance(tokenizer, SimpleTokenizer):
        words = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
        vocabulary = {
            words.get(token, token): number for token, number in tokenizer.encoder.items()
        }
        merges = sorted(tokenizer.bpe_ranks, key=tokenizer.bpe_ranks.__getitem__)
        converted = transformers.CLIPTokenizer(vocab=vocabulary, merges=merges)
    else:
        raise ValueError(f"transformers has no tokenizer like {type(tokenizer).__name__}")
    converted.model_max_length = tokenizer.context_length
    return converted


def _canonicalize(tokenizer: Any) -> Any:
    """Return a tokenizer that also cleans texts as open_clip does for SigLIP: lowercase, without punctuation."""
    import transformers
    from tokenizers import Regex, normalizers

    backend = tokenizer.backend_tokenizer
    steps = [
        normalizers.Replace("_", " "),
        normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), ""),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Strip(),
    ]
    if backend.normalizer:
        steps.append(backend.normalizer)
    backend.normalizer = normalizers.Sequence(steps)
    # Use the generic class. Others, such as T5Tokenizer, replace the normalizer when they are loaded.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=tokenizer.model_input_names,
        padding_side=tokenizer.padding_side,
        **tokenizer.special_tokens_map,
    )


def _build(model: Any, text: Any) -> Any:
    """Build the transformers model with the architecture of this model and its text tower."""
    import transformers

    trunk = getattr(model.visual, "trunk", None)
    patches = next(part for part in model.visual.modules() if isinstance(part, nn.Conv2d))
    vision_config = {
        "image_size": read_preprocessing(model).size[0],
        "patch_size": patches.kernel_size[0],
    }
    text_config = _describe(text.transformer.resblocks, text.ln_final) | {
        "vocab_size": text.vocab_size,
        "max_position_embeddings": len(text.positional_embedding),
    }
    if trunk is not None:
        vision_config |= _describe(trunk.blocks, trunk.norm)
        text_config["projection_size"] = text.text_projection.out_features
        config = transformers.SiglipConfig(vision_config=vision_config, text_config=text_config)
        return transformers.SiglipModel(config)
    vision_config |= _describe(model.visual.transformer.resblocks, model.visual.ln_post)
    last = text.vocab_size - 1
    text_config |= {"eos_token_id": last, "bos_token_id": last - 1, "pad_token_id": last}
    config = transformers.CLIPConfig(
        vision_config=vision_config,
        text_config=text_config,
        projection_dim=model.visual.proj.shape[1],
    )
    return transformers.CLIPModel(config)


def _describe(blocks: Any, norm: Any) -> dict[str, Any]:
    """Derive the settings of an open_clip or timm transformer from its blocks and final norm."""
    mlp = blocks[0].mlp
    first, activation = (mlp.c_fc, mlp.gelu) if hasattr(mlp, "c_fc") else (mlp.fc1, mlp.act)
    return {
        "hidden_size": first.in_features,
        "intermediate_size": first.out_features,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": blocks[0].attn.num_heads,
        "layer_norm_eps": norm.eps,
        "hidden_act": _name_activation(activation),
    }


def _name_activation(activation: nn.Module) -> str:
    if isinstance(activation, GELUTanh) or getattr(activation, "approximate", "") == "tanh":
        return "gelu_pytorch_tanh"
    # With any other activation, the features differ, so `convert` refuses the model.
    return "quick_gelu" if isinstance(activation, QuickGELU) else "gelu"


def _rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with their names and shapes in transformers."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        if at := re.fullmatch(r"(.*\.self_attn\.)qkv_proj(.*)", name):
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{at[1]}{letter}_proj{at[2]}"] = part
        elif name.endswith("position_embedding.weight"):
            renamed[name] = tensor.reshape(-1, tensor.shape[-1])
        elif name in ("visual_projection.weight", "text_projection.weight"):
            renamed[name] = tensor.T
        elif name in renamed:  # attention pooling: append the kv projection to the q projection
            renamed[name] = torch.cat([renamed[name], tensor])
        else:
            renamed[name] = tensor
    return renamed


@torch.no_grad()
def _compare(model: Any, text: Any, converted: Any) -> float:
    """Return the largest difference between the models' unit features of random inputs, relative to the largest one."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, *read_preprocessing(model).size, generator=generator)
    length = len(text.positional_embedding)
    tokens = torch.randint(1, text.vocab_size - 1, (2, length), generator=generator)
    tokens[:, -1] = text.vocab_size - 1
    output = converted(pixel_values=images, input_ids=tokens)
    pairs = (
        (model.encode_image(images), output.image_embeds),
        (model.encode_text(tokens), output.text_embeds),
    )
    differences = [
        (unit_rows(ours) - theirs).abs().max() / theirs.abs().max() for ours, theirs in pairs
    ]
    return torch.stack(differences).max().item()
