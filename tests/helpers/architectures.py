"""Small models of the architectures that can be exported for transformers, and a tokenizer in a local folder."""

import string
from pathlib import Path
from typing import Any

import transformers
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

TEXT = {"context_length": 12, "vocab_size": 49_408, "width": 32, "heads": 2, "layers": 2}
VISION = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
TIMM = {
    "image_size": 32,
    "timm_pool": "map",
    "timm_proj": "none",
}
WORDS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "\u2581",
    *string.ascii_letters,
    *string.punctuation,
]


def write_tokenizer(folder: Path, kind: str) -> str:
    """Save a small tokenizer of the class that SigLIP (T5) or SigLIP 2 (Gemma) uses. Return the folder."""
    if kind == "siglip":
        scores = [(word, -float(i)) for i, word in enumerate(WORDS)]
        tokenizer: Any = transformers.T5Tokenizer(vocab=scores, eos_token="<eos>", extra_ids=0)
    else:
        vocabulary = {word: i for i, word in enumerate(WORDS)}
        tokenizer = transformers.GemmaTokenizer(vocab=vocabulary, merges=[], padding_side="right")
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_words(folder: Path, words: list[str], pad: str = "[PAD]") -> str:
    """Save a tokenizer of whole words. The id of its end token, [SEP], is smaller than all ids of words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: i for i, word in enumerate(special + words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": pad}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.save_pretrained(folder)
    return str(folder)


def architecture(kind: str, folder: Path, length: int = 12) -> dict[str, Any]:
    text: dict[str, Any] = {**TEXT, "context_length": length}
    clip = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": text}
    if kind == "clip":
        return clip
    if kind == "quick_gelu":
        return {**clip, "quick_gelu": True, "custom_text": True}
    if kind == "resnet":
        vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
        return {**clip, "vision_cfg": {**vision, "head_width": 16}}
    if kind == "layer_scale":
        return {**clip, "vision_cfg": {**VISION, "ls_init_value": 0.1}}
    if kind == "convnext":
        return {**clip, "vision_cfg": {"image_size": 32, "timm_model_name": "test_convnext"}}
    text |= {
        "vocab_size": len(WORDS),
        "width": 64,
        "hf_tokenizer_name": write_tokenizer(folder / "tokenizer", kind),
        "tokenizer_kwargs": {"clean": "canonicalize"},
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
        "act_kwargs": {"approximate": "tanh"} if kind == "siglip2" else {},
    }
    if kind == "siglip_bpe":
        text |= {"vocab_size": 49_408, "hf_tokenizer_name": None, "tokenizer_kwargs": {}}
        kind = "siglip"
    vision = {**TIMM, "timm_model_name": f"tiny_{kind}"}
    return {"embed_dim": 64, "custom_text": True, "vision_cfg": vision, "text_cfg": text}


@register_model
def tiny_siglip(**options: Any) -> VisionTransformer:
    """Build a small tower like timm's vit_base_patch16_siglip_224."""
    size = {"patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
    return VisionTransformer(
        32,
        **size,
        num_classes=0,
        class_token=False,
        global_pool="map",
        act_layer=options.get("act"),
    )


@register_model
def tiny_siglip2(**_: Any) -> VisionTransformer:
    """Build a small tower like timm's vit_giantopt_patch16_siglip_256."""
    return tiny_siglip(act="gelu_tanh")
