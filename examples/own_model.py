"""A model with two custom towers: a vision transformer from timm and a BERT from transformers.

    PYTHONPATH=examples disco-ds train --config examples/own_model.yaml

The recipe's model.factory names `build`. Nothing is downloaded. To combine pretrained towers, use
timm.create_model(..., pretrained=True) and AutoModel.from_pretrained instead.
"""

import torch
from open_clip import SimpleTokenizer
from timm.models.vision_transformer import VisionTransformer
from transformers import BertConfig, BertModel

from disco_ds import TwoTowers

LENGTH = 20


class TextTower(torch.nn.Module):
    """A BERT whose last hidden states are averaged and projected to the width of the features."""

    def __init__(self, vocabulary: int, width: int, layers: int, features: int, dropout: float):
        super().__init__()
        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            intermediate_size=4 * width,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            attn_implementation="eager",
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.projection = torch.nn.Linear(width, features, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = (tokens != 0).long()  # SimpleTokenizer pads with 0
        hidden = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(hidden.dtype)
        return self.projection((hidden * weights).sum(1) / weights.sum(1))


def build(
    width: int = 128, layers: int = 2, features: int = 128, dropout: float = 0.1
) -> TwoTowers:
    """Build the model; the recipe's model.options are the arguments."""
    tokenizer = SimpleTokenizer(context_length=LENGTH)
    return TwoTowers(
        visual=VisionTransformer(
            img_size=32,
            patch_size=4,
            embed_dim=width,
            depth=layers,
            num_heads=width // 32,
            num_classes=features,
        ),
        text=TextTower(tokenizer.vocab_size, width, layers, features, dropout),
        tokenizer=tokenizer,
        context_length=LENGTH,
        vocab_size=tokenizer.vocab_size,
        image_size=32,
    )
