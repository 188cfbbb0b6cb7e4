"""The faster tower modules have the same outputs, gradients and parameters as open_clip's modules that they replace."""

import copy
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from open_clip.hf_model import HFTextEncoder
from open_clip.transformer import TextTransformer, VisionTransformer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.utils import parametrize

from disco_ds.config import ModelSettings, render_ds_config
from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.models.clip import Texts, build_model, read_preprocessing
from disco_ds.models.fast.attention import Block, Patches, sequence_attention
from disco_ds.models.fast.replace import describe_parts, replace_parts
from disco_ds.models.fast.texts import MAX_ROWS, find_counter, fits_kernels, pack
from disco_ds.models.flops import count_flops
from disco_ds.training.engine import build_engine, set_lr
from helpers.dist import run_ranks
from helpers.step import train_step
from helpers.towers import CONTEXT, TINY, VOCABULARY, distance, masters, tiny_config

CPU = torch.device("cpu")
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "CLIP": ({}, {}, True),
    "layer scale": ({"ls_init_value": 0.1}, {"ls_init_value": 0.1}, True),
    "own text tower": ({}, {"pool_type": "eos", "eos_id": VOCABULARY - 1}, True),
    "bias after the text": ({}, {"proj_type": "linear", "proj_bias": True}, True),
    "mean of the patches": ({"pool_type": "avg", "no_ln_pre": True}, {}, True),
    "attentional pool": ({"attentional_pool": True, "attn_pooler_heads": 2}, {}, True),
    "norms in the blocks": ({"scale_attn": True, "scale_fc": True}, {"scale_attn": True}, True),
    "head scales": ({"scale_heads": True}, {"scale_heads": True}, False),
    "norm of q and k": ({"qk_norm": True}, {"qk_norm": True}, False),
    "SigLIP": ({}, {"no_causal_mask": True, "pool_type": "last"}, False),
    "class token": ({}, {"embed_cls": True}, False),
    "timm": ({"timm_model_name": "test_vit", "image_size": 160}, {}, True),
}
"""Name of a case -> changes of the image tower's config, changes of the text tower's, whether texts are packed."""


def write(folder: Path, name: str) -> str:
    vision, text, _ = MODELS[name]
    config = copy.deepcopy(TINY) | {
        "custom_text": name in ("own text tower", "SigLIP", "class token")
    }
    config["vision_cfg"] |= vision
    config["text_cfg"] |= text
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return str(path)


def build(path: str, towers: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return build_model(ModelSettings(name=path, towers=towers, **settings))


def captions(lengths: list[int], seed: int = 0) -> Tensor:
    """Return random texts of these lengths. Their last token is the largest one, and zeros follow."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1, VOCABULARY - 1, (len(lengths), CONTEXT), generator=generator)
    for row, length in zip(text, lengths, strict=True):
        row[length - 1] = VOCABULARY - 1
        row[length:] = 0
    return text


def gradients(model: Any, image: Tensor, text: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """Return the features, and the gradients by parameter name of a weighted sum of the features."""
    model.zero_grad()
    features = model(image, text, **inputs)[:2]
    weights = torch.linspace(-1, 2, features[0].numel(), dtype=torch.float64).view_as(features[0])
    sum((x * weights.flip(i)).sum() for i, x in enumerate(features)).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"image": features[0].detach(), "text": features[1].detach()}


@pytest.mark.parametrize("name", MODELS)
def test_towers_equal_those_of_open_clip_in_float64(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("disco_ds.models.clip.unit_rows", lambda x: F.normalize(x, dim=-1))
    path = write(tmp_path, name)
    ours, theirs = (build(path, towers).double() for towers in ("auto", "open_clip"))
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    size = read_preprocessing(ours).size
    image = torch.randint(0, 256, (6, 3, *size), dtype=torch.uint8)
    text = captions([1, 2, 12, 7, 7, 3])
    expected = gradients(theirs, image, text)
    found = gradients(ours, image, text)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).norm() <= 1e-12 * value.norm() + 1e-14, key
    kinds = {type(module) for module in ours.modules()}
    packed = MODELS[name][2]
    assert ("packed texts" in describe_parts(ours, CPU, False)) == packed
    assert (find_counter(ours) is not None) == packed
    assert Patches in kinds
    assert (Block in kinds) == (name not in ("head scales", "norm of q and k"))
    assert find_counter(theirs) is None
    assert not {Block, Patches} & {type(module) for module in theirs.modules()}


def test_patches_crop_and_add_the_bias_as_a_convolution_does() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 5, (4, 2), stride=(4, 2)).double()
    holder = nn.Module()
    holder.visual = nn.Module()
    holder.visual.proj = copy.deepcopy(layer)
    replace_parts(holder)
    assert type(holder.visual.proj) is Patches
    image = torch.randn(2, 3, 10, 7, dtype=torch.float64)
    torch.testing.assert_close(holder.visual.proj(image), layer(image), rtol=1e-13, atol=1e-13)


class Halved:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        # nn.MultiheadAttention returns (output, weights). The attention of open_clip 4 returns only the output.
        return (0.5 * out[0], None) if isinstance(out, tuple) else 0.5 * out


class Prefix(TextTransformer):
    def build_causal_mask(self) -> Tensor:
        mask = super().build_causal_mask()
        mask[:, :4] = 0
        return mask


def change_towers(change: str) -> nn.Module:
    """Build two towers from open_clip's parts, and change one of them."""
    sizes = {"width": 32, "heads": 2, "layers": 2, "mlp_ratio": 2.0, "output_dim": 16}
    kind = Prefix if change == "another mask" else TextTransformer
    model = nn.Module()
    model.two_views = False
    model.visual = visual = VisionTransformer(32, 8, **sizes)
    model.text = text = kind(CONTEXT, VOCABULARY, **sizes)
    block = text.transformer.resblocks[0]
    if change == "one transformer for both towers":
        visual.transformer = text.transformer
    elif change == "one list of blocks for each tower":
        visual.transformer.resblocks = nn.ModuleList(text.transformer.resblocks)
    elif change == "one block for all layers":
        text.transformer.resblocks = nn.ModuleList([block, block, block])
    elif change == "a subclass of the attention":
        block.attn.__class__ = type("Changed", (Halved, type(block.attn)), {})
    elif change == "parametrized weights":
        parametrize.register_parametrization(block.attn, "in_proj_weight", nn.Tanh())
    return model.double()


@pytest.mark.parametrize(
    ("change", "is_packed"),
    [
        ("one transformer for both towers", True),
        ("one list of blocks for each tower", True),
        ("one block for all layers", True),
        ("a subclass of the attention", False),
        ("parametrized weights", False),
        ("another mask", False),
    ],
)
def test_custom_towers_of_open_clips_parts_stay_the_same_function(
    change: str, is_packed: bool
) -> None:
    torch.manual_seed(0)
    model = change_towers(change)
    image = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    text = captions([1, 12, 7, 5])
    expected = model.visual(image), model.text(text)
    replace_parts(model)
    assert (find_counter(model) is not None) == is_packed
    for found, side in zip((model.visual(image), model.text(text)), expected, strict=True):
        torch.testing.assert_close(found, side, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("pooler", ["mean_pooler", "cls_pooler"])
def test_texts_of_hugging_face_are_cut_to_the_longest(pooler: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    theirs = HFTextEncoder("", 8, config=config, pooler_type=pooler, proj_type="linear").double()
    holder = nn.Module()
    holder.visual, holder.text = nn.Identity(), copy.deepcopy(theirs)
    replace_parts(holder)
    text = torch.randint(2, VOCABULARY, (4, 36))
    for row, length in zip(text, (3, 11, 5, 1), strict=True):
        row[length:] = 1
    seen = []
    holder.text.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    results = []
    for tower in (theirs.eval(), holder.text.eval()):
        out = tower(text)
        (out * torch.arange(8)).sum().backward()
        grads = [p.grad for p in tower.parameters() if p.grad is not None]
        results.append([out.detach(), *grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    count = find_counter(holder)
    assert count is not None
    assert count(text).tolist() == [3, 11, 5, 1]
    assert seen == [16], "the length must be the next multiple of 8 after the longest text"


def test_packed_texts_are_sorted_and_every_tile_has_whole_texts() -> None:
    lengths = np.array([5, 1, 100, 3, 64, 64, 2, 77, 128, 1])
    text = torch.arange(10 * 130).view(10, 130)
    tokens, positions, last, packing = pack(text, lengths)
    assert len(tokens) % 2 == 0, "spare tokens at the start must make the number of tokens even"
    for i, length in enumerate(lengths):
        rows = slice(int(last[i]) - length + 1, int(last[i]) + 1)
        assert tokens[rows].tolist() == text[i, :length].tolist()
        assert positions[rows].tolist() == list(range(length))
        assert len(packing.segments[rows].unique()) == 1
    assert packing.groups.tolist()[-2:] == [128, 1]
    tiles = packing.tiles.tolist()
    assert tiles[0] == 0
    assert tiles[-1] == len(tokens)
    assert max(np.diff(tiles)) <= MAX_ROWS
    ends = set(torch.nonzero(packing.segments.diff())[:, 0].add(1).tolist()) | {0, len(tokens)}
    assert ends >= set(tiles), "no text may be divided between tiles"


def test_counted_lengths_are_the_ones_that_may_be_given(tmp_path: Path) -> None:
    model = build(write(tmp_path, "CLIP"), "auto")
    text = captions([1, 2, 12, 7])
    text[1, 5] = VOCABULARY - 1  # the largest token occurs twice: the first one counts
    count = find_counter(model)
    assert count is not None
    lengths = count(text)
    assert lengths.tolist() == [1, 2, 12, 7]
    image = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    given, counted = (gradients(model, image, text, **x) for x in ({"lengths": lengths}, {}))
    assert all(torch.equal(given[name], counted[name]) for name in given)


def test_log_says_what_a_gpu_runs_in_fp32_and_without_texts(tmp_path: Path) -> None:
    path = write(tmp_path, "CLIP")
    views = build(path, "auto", two_views=True)
    assert find_counter(views) is None
    assert not [part for part in describe_parts(views, CPU, False) if "texts" in part]
    on_gpu = describe_parts(build(path, "auto"), torch.device("cuda"), False)
    assert not {"packed texts", "image attention by Triton"} & set(on_gpu)


def test_heads_that_are_wider_than_a_tile_are_not_packed_on_a_gpu(tmp_path: Path) -> None:
    MODELS["wide heads"] = ({}, {"width": 512, "heads": 2}, True)
    model = build(write(tmp_path, "wide heads"), "auto")
    assert not fits_kernels(model, torch.device("cuda"), is_half=True)
    assert fits_kernels(model, CPU, is_half=True)


def test_no_text_has_no_features(tmp_path: Path) -> None:
    for name in ("CLIP", "own text tower"):
        model = build(write(tmp_path, name), "auto")
        features = model(text=captions([1])[:0])[1]
        assert features.shape == (0, 16)
        features.sum().backward()


def test_operations_are_those_of_the_tokens(tmp_path: Path) -> None:
    ours, theirs = (build(write(tmp_path, "CLIP"), towers) for towers in ("auto", "open_clip"))
    image = count_flops(ours, 1) - (count_flops(ours, 2) - count_flops(ours, 1))
    per_token = count_flops(ours, 2) - count_flops(ours, 1)
    assert count_flops(ours, 9) == image + 9 * per_token
    attention = 3 * 2 * 4 * CONTEXT**2 * 32  # two layers, forward and backward, two products
    assert count_flops(theirs) == count_flops(ours) + attention
    assert count_flops(theirs, 1) == count_flops(theirs)


def step(path: str, towers: str, K: int, precision: str, **changes: Any) -> dict[str, Tensor]:
    """Take three steps of 12 samples in K micro-batches on every rank. Return the changes of the master weights."""
    zero = {"zero_optimization": {"stage": changes.pop("zero", 1)}}
    if precision == "autocast":
        zero["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    config = tiny_config(
        path,
        zero,
        global_batch=12 * comm.size(),
        micro_batch=12 // K,
        model__towers=towers,
        optim__name="adamw",
        **changes,
    )
    torch.manual_seed(0)
    engine = build_engine(
        build_model(config.model), config.optim, render_ds_config(config, comm.size())
    )
    engine.train()
    set_lr(engine, 1e-3)
    before = masters(engine)
    count = find_counter(engine.module)
    for seed in range(3):
        generator = torch.Generator().manual_seed(10 * seed + comm.rank())
        lengths = torch.randint(1, CONTEXT + 1, (12,), generator=generator).tolist()
        text = captions(lengths, seed)
        size = read_preprocessing(engine.module).size
        image = torch.randint(0, 256, (12, 3, *size), dtype=torch.uint8, generator=generator)
        parts = list(zip(image.chunk(K), text.chunk(K), torch.arange(12).chunk(K), strict=True))
        torch.manual_seed(seed)
        train_step(
            engine,
            build_loss("disco_fused"),
            parts,
            lambda part: (part[0], Texts(part[1], count(part[1])) if count else part[1], part[2]),
            max_scale=100.0,
        )
    after = masters(engine)
    engine.destroy()
    return {name: after[name] - before[name] for name in before}


ALL_STEPS = list(itertools.product((1, 2, 3), (1, 3), (False, True)))
"""All combinations of ZeRO stage, number of micro-batches K, and activation checkpointing."""


def updates(
    path: str, cases: Sequence[tuple[int, int, bool]], compiled: bool = False
) -> dict[str, float]:
    found = {}
    for zero, K, checkpointing in cases:
        settings = {"model__activation_checkpointing": checkpointing, "zero": zero}
        expected = step(path, "open_clip", K, "fp32", **settings)
        settings |= {"model__compile": compiled}
        ours = step(path, "auto", K, "fp32", **settings)
        found[f"ZeRO {zero}, K {K}, checkpointing {checkpointing}"] = distance(ours, expected)
    return found


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(1, 3, False), (2, 1, True), (3, 3, True)], id="some"),
        pytest.param(ALL_STEPS, id="all", marks=pytest.mark.slow),
    ],
)
def test_updates_of_two_ranks_equal_those_of_open_clips_towers(
    cases: Sequence[tuple[int, int, bool]], tmp_path: Path
) -> None:
    for found in run_ranks(updates, 2, write(tmp_path, "CLIP"), cases, timeout_s=300):
        assert len(found) == len(cases)
        assert max(found.values()) < 2e-3, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CLIP", "timm"])
def test_updates_of_compiled_blocks_equal_those_of_open_clips_towers(
    name: str, tmp_path: Path
) -> None:
    compiled = [(1, 3, False), (1, 3, True)]
    (found,) = run_ranks(updates, 1, write(tmp_path, name), compiled, True, timeout_s=500)
    assert max(found.values()) < 2e-3, found


@pytest.mark.slow
def test_all_blocks_and_numbers_of_tokens_share_one_graph(tmp_path: Path) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = build(write(tmp_path, "CLIP"), "auto", compile=True)
    eager = build(write(tmp_path, "CLIP"), "open_clip")
    for seed, lengths in enumerate(
        ([*range(1, 13)] + [7] * 4, [1, 2, 3, 4] * 4, [12] * 16, [5, 9] * 8)
    ):
        image = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
        text = captions(lengths, seed)
        found, expected = (gradients(each, image, text) for each in (model, eager))
        assert distance(found, expected) < 1e-5
    assert counters["stats"]["unique_graphs"] == 2, "each tower must have one graph"
    assert not counters["graph_break"]


def drop_paths(path: str) -> tuple[float, float]:
    changes = {"zero": 1, "model__compile": True}
    plain, again = (
        step(path, "auto", 3, "fp32", **changes, model__activation_checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    fixed = step(path.replace("drops", "timm"), "auto", 3, "fp32", **changes)
    return distance(again, plain), distance(fixed, plain)


@pytest.mark.slow
def test_checkpointing_around_compiled_blocks_repeats_their_random_draws(tmp_path: Path) -> None:
    MODELS["drops"] = (MODELS["timm"][0] | {"timm_drop_path": 0.5}, {}, True)
    path = write(tmp_path, "drops")
    write(tmp_path, "timm")
    ((same, other),) = run_ranks(drop_paths, 1, path, timeout_s=500)
    assert same < 1e-4 < 1e-2 < other, (same, other)


def test_compiling_a_whole_tower_with_checkpointing_is_refused(tmp_path: Path) -> None:
    vision = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 16}
    config = copy.deepcopy(TINY)
    config["vision_cfg"] |= vision
    path = tmp_path / "resnet.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"compile=true is refused.*image tower.*checkpointing"):
        build(str(path), "auto", compile=True, activation_checkpointing=True)


LENGTHS: list[tuple[Any, ...]] = [
    ([50, 50], 2, 64, False, True),
    ([1, 1], 2, 40, True, True),
    (np.random.default_rng(0).integers(1, 129, 9).tolist(), 2, 64, True, False),
    ([17] * 3, 1, 32, False, True),
    ([77, 77], 1, 104, True, True),
    ([128], 1, 128, True, True),
    ([1, 2, 3, 60, 64, 127], 1, 80, True, False),
]
"""(lengths of texts, heads, head width, causal, whether the texts are in a plain batch instead of packed)."""


def kernels(cases: list[tuple[Any, ...]]) -> list[str]:
    """Compare the Triton kernels, run by Triton's interpreter, with float64. Their output memory begins as NaN."""
    from disco_ds.models.fast import tile_kernels

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    failures = []
    torch.manual_seed(0)
    for lengths, H, D, causal, equal in cases:
        tiles = segments = None
        if not equal:
            *_, packing = pack(torch.zeros(len(lengths), 128, dtype=torch.long), np.array(lengths))
            lengths = [n for n, count in packing.groups.view(-1, 2).tolist() for _ in range(count)]
            tiles, segments = packing.tiles, packing.segments
        x = torch.randn(sum(lengths), 3, H, D, dtype=torch.float64, requires_grad=True)
        parts = []
        for part in x.split(lengths):
            q, k, v = part.permute(1, 2, 0, 3)
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)
            parts.append(out[0].transpose(0, 1).flatten(1))
        true = torch.cat(parts)
        weights = torch.randn_like(true)
        true.backward(weights)
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
            inputs = x.detach().to(dtype), tiles, segments
            length = lengths[0] if tiles is None else MAX_ROWS
            out = tile_kernels.attend(*inputs, length, causal)
            grad = tile_kernels.backpropagate(weights.to(dtype), *inputs, length, causal)
            for name, a, b in (("out", out, true), ("grad", grad, x.grad)):
                error = ((a.double() - b).norm() / b.norm()).item()
                if not error < tolerance:  # also if it is NaN
                    failures.append(f"{name} of {lengths}, {H} x {D}, {dtype}: {error}")
    return failures


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(LENGTHS[:3], id="some"),
        pytest.param(LENGTHS[3:], id="others", marks=pytest.mark.slow),
    ],
)
def test_kernels_equal_float64(monkeypatch, cases: list[tuple[Any, ...]]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (failures,) = run_ranks(kernels, 1, cases, method="spawn", timeout_s=300)
    assert not failures, "\n".join(failures)


def test_operators_can_be_traced_and_differentiated() -> None:
    torch.manual_seed(0)
    text = torch.zeros(3, 9, dtype=torch.long)
    *_, packing = pack(text, np.array([2, 9, 4]))
    qkv = torch.randn(len(packing.segments), 3, 2, 4, dtype=torch.float64, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(sequence_attention, (qkv, 0, True, *packing), test_utils=tests)
    assert torch.autograd.gradcheck(lambda x: sequence_attention(x, 0, True, *packing), qkv)
    with torch.device("meta"):
        x = torch.empty(100, 3, 4, 8, requires_grad=True)
        assert sequence_attention(x, 50, False).shape == (100, 32)
