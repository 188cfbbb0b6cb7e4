"""Evaluation: what all ranks find together is what one plain loop over the data finds, at every stage."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from dist import run_ranks
from test_build import recipe

from disco_ds import comm
from disco_ds.build import build
from disco_ds.config import load_config
from disco_ds.data import load_manifest, read_all, resolve_shards
from disco_ds.eval import Accuracy, classify_sets
from disco_ds.train import train


def accuracies(path: Path, stage: int) -> tuple[Accuracy, Accuracy]:
    """By all ranks, and by a plain loop on every rank; after a little training, so that it is not all zeros."""
    overrides = [
        f"deepspeed.zero_optimization.stage={stage}",
        "steps=45",
        "micro_batch=8",
        "log.every_steps=45",
        "data.crop_scale=null",
        "model={name: quickstart, token_embedding_std: 0.5}",
        f"name=stage{stage}-{comm.size()}",
        "eval={labelled: {unseen: bundled:emoji/unseen}, label_key: '{json[caption]}'}",
    ]
    with ExitStack() as stack:
        config = load_config(path, overrides)
        run = build(config, None, stack)
        train(run)
        tokenize = run.tokenizer
        found = classify_sets(run.engine, run.sets, config, run.image, tokenize)["unseen"]
        samples = list(
            read_all(
                load_manifest(resolve_shards("bundled:emoji/unseen")), config.data, run.image, 0, 1, "{json[caption]}"
            )
        )
        labels = sorted({label for _, label, _ in samples})
        with torch.no_grad():
            run.engine.eval()
            image, text, *_ = run.engine(torch.stack([picture for picture, _, _ in samples]), tokenize(labels))
        best = (image @ text.T).topk(5, dim=1).indices
        right = best == torch.tensor([labels.index(label) for _, label, _ in samples])[:, None]
        top1, top5 = right[:, 0].float().mean().item(), right.any(1).float().mean().item()
        return found, Accuracy(top1, top5, len(samples), len(labels))


@pytest.mark.parametrize(("size", "stage"), [(1, 1), (2, 3)])
def test_accuracy_of_all_ranks_is_that_of_a_plain_loop(size, stage, tmp_path):
    # 155 images and labels: neither divides by the ranks nor by the micro-batch.
    for found, plain in run_ranks(accuracies, size, recipe(tmp_path), stage):
        assert found.num_images == found.num_classes == plain.num_images == 155
        assert (found.top1, found.top5) == pytest.approx((plain.top1, plain.top5), abs=1.5 / 155)
        assert found.top5 > 1.5 * 5 * found.chance, "training must show, or the two agree on nothing"
