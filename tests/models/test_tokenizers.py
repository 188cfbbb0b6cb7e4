"""Custom tokenizers are refused if the text tower does not pool their end token, or does not mask their padding.

The faster form of open_clip's built-in tokenizer returns the same tokens.
"""

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from open_clip.tokenizer import SimpleTokenizer

from disco_ds.config import ModelSettings
from disco_ds.models.clip import build_model, build_tokenizer
from disco_ds.models.tokenizer import FastTokenizer
from helpers.architectures import write_words
from helpers.towers import TINY

WORDS = ["a", "photo", "of", "on", "in", "grass", "water", "dog", "zebra"]
TEXTS = ["a photo of a dog on grass", "a photo of a dog in water", "a photo of a dog"]


def build(folder: Path, pad: str = "[PAD]", **text_cfg: Any) -> tuple[Any, Any]:
    own = {"vocab_size": 4 + len(WORDS), "hf_tokenizer_name": write_words(folder / "t", WORDS, pad)}
    path = folder / "own.json"
    path.write_text(json.dumps(TINY | {"text_cfg": TINY["text_cfg"] | own | text_cfg}))
    settings = ModelSettings(name=str(path))
    torch.manual_seed(0)
    model = build_model(settings)
    return model, build_tokenizer(settings, model)


def test_pooling_of_another_token_than_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"own.json.*'argmax'.* token 4 .*eos_id to .*'last'"):
        build(tmp_path)
    with pytest.raises(ValueError, match=r"'eos'.* token 2 .*eos_id to "):
        build(tmp_path, pool_type="eos")


@pytest.mark.parametrize("pooling", [{"pool_type": "eos", "eos_id": 3}, {"pool_type": "last"}])
def test_the_poolings_that_the_message_names_tell_texts_apart(
    pooling: dict[str, Any], tmp_path: Path
) -> None:
    model, tokenizer = build(tmp_path, **pooling)
    features = model.eval()(text=tokenizer(TEXTS))[1]
    assert torch.pdist(features).min() > 1e-3


def write_roberta(folder: Path) -> str:
    """Save a text tower of transformers that masks token 0, and return its folder."""
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.RobertaConfig(
        vocab_size=13, intermediate_size=16, pad_token_id=0, max_position_embeddings=24, **size
    )
    transformers.RobertaModel(config).save_pretrained(folder)
    return str(folder)


def test_padding_that_the_text_tower_does_not_mask_is_refused(tmp_path: Path) -> None:
    tower = {"hf_model_name": write_roberta(tmp_path / "tower")}
    with pytest.raises(ValueError, match=r"own.json.*pads with token 1.*masks token 0"):
        build(tmp_path, pad="[UNK]", **tower)
    model, tokenizer = build(tmp_path, **tower)
    features = model.eval()(text=tokenizer(TEXTS))[1]
    without_padding = model(text=tokenizer(TEXTS[:1], context_length=9))[1]
    torch.testing.assert_close(features[:1], without_padding)


def list_captions() -> list[str]:
    """Return every ASCII character in several positions, and 10,000 random captions, half of them plain text."""
    draw = random.Random(0)
    printable = "".join(map(chr, range(32, 127)))
    parts = [
        *WORDS,
        *TEXTS,
        "it's",
        "DON'T",
        "<end_of_text>",
        "&amp;",
        "&lt",
        "a_b",
        "3.14",
        "\u2019",
        "\x1b[31m",
    ]
    captions = [
        "",
        *(text.replace("?", chr(i)) for i in range(128) for text in ("?", "A? b", "1??2")),
    ]
    for number in range(10_000):
        if number % 2:
            word = "".join(draw.choices(printable.replace("&", ""), k=draw.randrange(9)))
            captions.append(
                " ".join(draw.choices([*WORDS, word, "It's", " "], k=draw.randrange(1, 9)))
            )
        else:
            top = draw.choice([128, 256, 0x3000, 0x1FFFF])
            letters = [chr(draw.randrange(top)) for _ in range(4)]
            letters = [letter for letter in letters if not 0xD800 <= ord(letter) < 0xE000]
            captions.append("".join(draw.choices([*letters, *parts, " "], k=draw.randrange(1, 9))))
    return captions


@pytest.mark.parametrize("clean", ["lower", "whitespace", "canonicalize"])
def test_fast_tokenizer_returns_the_tokens_of_open_clip(clean: str) -> None:
    reference = SimpleTokenizer(clean=clean, context_length=24)
    fast = pickle.loads(pickle.dumps(FastTokenizer(reference)))
    captions = list_captions()
    assert torch.equal(fast(captions), reference(captions))
