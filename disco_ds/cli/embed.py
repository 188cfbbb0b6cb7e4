"""`disco-ds embed`: store a teacher's embeddings with the samples of a data set."""

from __future__ import annotations

import argparse
import os
from typing import Any

from disco_ds.config import load_config
from disco_ds.data.embed import IMAGE, TEXT, Embedder
from disco_ds.eval.model import in_precision, load_model, read_input_spec
from disco_ds.models.pretrained import hash_weights
from disco_ds.runs.messages import set_up_logging


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: this rank's shards are complete.

    Raises:
        ValueError: If the settings or the model are invalid, or if the folder given by --to has shards of another
            teacher, other data or other settings. In this case, nothing is written.
        DataError: If too many samples are broken.
        OSError: If a shard cannot be read or written.
    """
    first = set_up_logging()
    config = load_config(args.config, args.overrides)
    model, tokenizer = load_model(args.model, args.pretrained)
    identity = {"model": args.model, "weights": hash_weights(model)}
    clip: Any = model
    scale, bias = clip.logit_scale.exp().item(), clip.logit_bias
    model = in_precision(model.requires_grad_(False), config.precision)
    spec = read_input_spec(model, tokenizer)
    embedder = Embedder(config.data, spec, model, identity, args.views, args.batch)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    embedder.write(args.to, rank, size)
    if first:
        known = "" if bias is None else f", bias: {bias.item():.6g}"
        print(
            f"train on {args.to} with\nteacher: {{image: {IMAGE}, text: {TEXT}, scale: {scale:.6g}{known}}}"
        )
    return 0
