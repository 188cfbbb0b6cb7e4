"""A tiny open_clip model, its batches, and the single-process gradient that every engine must reproduce."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.config import Config, check_config
from disco_ds.models.clip import build_model

IMAGE_SIZE, CONTEXT, VOCABULARY = 32, 12, 100
BPE_SIZE = 49_408  # vocabulary size of open_clip's tokenizer
TINY: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {
        "image_size": IMAGE_SIZE,
        "layers": 2,
        "width": 32,
        "head_width": 16,
        "patch_size": 8,
    },
    "text_cfg": {
        "context_length": CONTEXT,
        "vocab_size": VOCABULARY,
        "width": 32,
        "heads": 2,
        "layers": 2,
    },
}
Batch = dict[str, Tensor]


def write_tiny(folder: Path, vocab_size: int = VOCABULARY, **vision: Any) -> str:
    """Write the config of the tiny model and return its path. `vision` changes settings of its image tower."""
    path = folder / "tiny.json"
    text_cfg = TINY["text_cfg"] | {"vocab_size": vocab_size}
    path.write_text(
        json.dumps(TINY | {"vision_cfg": TINY["vision_cfg"] | vision, "text_cfg": text_cfg})
    )
    return str(path)


def tiny_config(model: str, ds_config: dict[str, Any], **changes: Any) -> Config:
    """Return the settings of a run of the tiny model.

    Args:
        model: Path of the model's config.
        ds_config: Settings for DeepSpeed.
        changes: Other settings. A dot in a name is written as two underscores.
    """
    tree: dict[str, Any] = {
        "name": "tiny",
        "global_batch": 16,
        "micro_batch": 16,
        "steps": 10,
        "model": {"name": model},
        "data": {"source": "synthetic", "workers": 0},
        "optim": {
            "name": "sgd",
            "momentum": 0.0,
            "weight_decay": 0.0,
            "lr": 1.0,
            "warmup_steps": 0,
        },
        "log": {"tensorboard": False},
        "deepspeed": ds_config,
    }
    for key, value in changes.items():
        node = tree
        *parents, last = key.split("__")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return check_config(tree, "test")


def batches(count: int, size: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    shape = (size, 3, IMAGE_SIZE, IMAGE_SIZE)
    return [
        {
            "image": torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8),
            "text": torch.randint(1, VOCABULARY, (size, CONTEXT), generator=generator),
            "index": torch.arange(number * size, (number + 1) * size),
            "group_id": torch.arange(number * size, (number + 1) * size) % 11,
        }
        for number in range(count)
    ]


def prepare(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch["image"], batch["text"], batch["index"]


def prepare_groups(batch: Batch) -> tuple[Tensor, ...]:
    return *prepare(batch), batch["group_id"]


def build_towers(config: Config, text_dropout: float = 0.0) -> nn.Module:
    """Build the model. If `text_dropout` is not 0, append a dropout layer to its text tower, which has none."""
    torch.manual_seed(config.seed)
    model: Any = build_model(
        config.model, initial_bias=-3.0 if config.loss.name == "siglip" else None
    )
    if text_dropout:
        model.ln_final = nn.Sequential(model.ln_final, nn.Dropout(text_dropout))
    return model


def reference(
    config: Config,
    chunks: list[Batch],
    states: list[Tensor],
    cast: str = "fp32",
    text_dropout: float = 0.0,
) -> tuple[dict[str, Tensor], float]:
    """Compute the gradient of the full-batch loss with one graph in one process.

    Args:
        config: The settings.
        chunks: The micro-batches of all ranks.
        states: For each chunk, the state of the random number generator before its forward.
        cast: Precision of the towers: fp32, autocast, bf16 or fp16.
        text_dropout: Probability of the dropout layer that build_towers appends to the text tower; 0 for no layer.

    Returns:
        The gradient by parameter name, and the loss.
    """
    model = build_towers(config, text_dropout)
    model.train()
    if cast in ("bf16", "fp16"):
        model.to(torch.bfloat16 if cast == "bf16" else torch.float16)
    image, text = [], []
    after = torch.get_rng_state()
    for chunk, state in zip(chunks, states, strict=True):
        torch.set_rng_state(state)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast == "autocast"):
            features = model(chunk["image"], chunk["text"])
        image.append(features[0])
        text.append(features[1])
    torch.set_rng_state(after)
    group_id = torch.cat([chunk["group_id"] for chunk in chunks])
    same = group_id[:, None] == group_id
    I, T, (scale, bias) = torch.cat(image), torch.cat(text), features[2:4]  # noqa: E741
    loss = write_down(config.loss.name, I, T, scale, bias, same, **config.loss.options)
    # In fp16, the gradients of a mean over the batch would be subnormal. So scale the loss, as every engine does.
    factor = 256.0 if cast == "fp16" else 1.0
    (factor * loss).backward()
    return {
        name: p.grad.float() / factor for name, p in model.named_parameters() if p.grad is not None
    }, loss.item()


def write_down(
    loss: str,
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    same: Tensor | None = None,
    same_group: str = "negatives",
) -> Tensor:
    """Compute a loss by its formula, with similarity matrices of the whole batch.

    Args:
        loss: Name of the loss: siglip, nt_xent, or any InfoNCE loss.
        image: [B, D], unit rows.
        text: [B, D], unit rows.
        scale: The logit scale.
        bias: The logit bias, for siglip.
        same: [B, B], whether two samples are in the same group.
        same_group: What pairs of the same group are: "negatives", "ignored" or "positives".
    """
    labels: Tensor = torch.arange(len(image))
    logits = scale * image @ text.T
    own = torch.eye(len(image), dtype=torch.bool)
    if same is not None and same_group == "ignored":
        logits = logits.masked_fill(same & ~own, -torch.inf)
    if same is not None and same_group == "positives":
        own = same
        labels = same / same.sum(1, keepdim=True)
    if loss == "siglip":
        assert bias is not None
        return F.softplus(torch.where(own, -1, 1) * (logits + bias)).sum() / len(image)
    if loss == "nt_xent":
        views = torch.cat([image, text])
        logits = (scale * views @ views.T).masked_fill(
            torch.eye(len(views), dtype=torch.bool), -torch.inf
        )
        return F.cross_entropy(logits, torch.arange(len(views)).roll(len(image)))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def distance(got: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Return |got - true| / |true|, over all parameters together."""
    assert set(got) == set(true), set(got) ^ set(true)
    differences = {name: got[name].double() - value.double() for name, value in true.items()}
    return norm(differences) / norm(true)


def norm(gradient: dict[str, Tensor]) -> float:
    return torch.sqrt(sum(value.double().pow(2).sum() for value in gradient.values())).item()  # type: ignore[arg-type]


def masters(engine: Any) -> dict[str, Tensor]:
    """Return the complete fp32 copy of every trained parameter, at any stage and precision. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    if engine.zero_optimization_stage() > 0:
        return {name: safe_get_full_fp32_param(p).clone() for name, p in _trained(engine)}
    return {name: p.detach().clone().float() for name, p in _trained(engine)}


def on_boundary_backward(engine: Any, do: Callable[[dict[str, Tensor]], None]) -> None:
    """Before each optimizer step, call `do` with the complete gradient by parameter name. Collective."""
    from deepspeed.utils import safe_get_full_grad

    step = engine.step

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            do({name: safe_get_full_grad(p).clone().float() for name, p in _trained(engine)})
        return step(*args, **kwargs)

    engine.step = wrapped


def _trained(engine: Any) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
