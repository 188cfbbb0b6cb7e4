"""The model that a run trains: its features, locked towers, and options of the section `model`."""

import json
import math
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from disco_ds.config import ModelSettings
from disco_ds.models.clip import read_text_size
from helpers.models import build, one_batch, write_resnet
from helpers.towers import CONTEXT, TINY, VOCABULARY, write_tiny


def loss_of(model: nn.Module, image: Tensor, text: Tensor) -> Tensor:
    rows, columns, scale, _ = model(image, text)
    return F.cross_entropy(scale * rows @ columns.T, torch.arange(len(rows)))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    loss_of(model, *one_batch()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


# Features


def test_forward_gives_unit_rows_for_what_is_asked(tiny: str) -> None:
    model = build(tiny).eval()
    image, text = one_batch()
    both = model(image, text)
    for rows in both[:2]:
        assert rows.shape == (4, 16)
        assert rows.dtype == torch.float32
        torch.testing.assert_close(rows.norm(dim=-1), torch.ones(4))
    only_image, only_text, neither = model(image, None), model(None, text), model()
    assert torch.equal(only_image[0], both[0])
    assert torch.equal(only_text[1], both[1])
    assert [value is None for value in only_image] == [False, True, False, True]
    assert [value is None for value in only_text] == [True, False, False, True]
    assert [value is None for value in neither] == [True, True, False, True]
    for features in (both, only_image, only_text, neither):
        assert torch.equal(features[2], both[2])
        assert features[2].requires_grad


def test_images_on_the_cpu_are_contiguous(tiny: str) -> None:
    """On channels_last images, the backward of strided 1x1 convolutions in oneDNN 3.12 corrupts memory."""
    model: Any = build(tiny)
    seen: list[Tensor] = []
    model.visual.conv1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(one_batch()[0].to(memory_format=torch.channels_last))
    assert seen[0].is_contiguous()


def test_forward_of_bytes_equals_floats_in_0_1(tiny: str) -> None:
    model = build(tiny).eval()
    image = one_batch()[0]
    torch.testing.assert_close(model(image)[0], model(image.float() / 255)[0], rtol=1e-5, atol=1e-6)
    assert not torch.equal(model(image)[0], model(image.float())[0])


class Passes(TorchDispatchMode):
    """Records operations that create a tensor of at least `numel` elements, until the first convolution."""

    def __init__(self, numel: int):
        super().__init__()
        self.numel, self.names, self.begun = numel, list[str](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.begun |= func.overloadpacket is torch.ops.aten.convolution
        if not self.begun and isinstance(out, Tensor) and out.numel() >= self.numel:
            self.names.append(f"{func.overloadpacket.__name__} {out.dtype}")
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_become_the_towers_input_in_one_pass(tiny: str, dtype: torch.dtype) -> None:
    model = build(tiny, towers="open_clip").eval()
    image = one_batch()[0]
    with (
        Passes(image.numel()) as passes,
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        model(image)
    assert passes.begun
    assert passes.names == [f"empty {dtype}", f"addcmul {dtype}"]


def test_forward_under_autocast_keeps_fp32_unit_rows(tiny: str) -> None:
    model = build(tiny).eval()
    with torch.autocast("cpu", torch.bfloat16):
        rows, columns, scale, _ = model(*one_batch())
    for value in (rows, columns, scale):
        assert value.dtype == torch.float32
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(4), rtol=0, atol=1e-6)


def test_forward_of_a_bf16_model_takes_bytes(tiny: str) -> None:
    model = build(tiny).eval().to(torch.bfloat16)
    rows, columns, scale, _ = model(*one_batch())
    assert {rows.dtype, columns.dtype, scale.dtype} == {torch.float32}
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(4), rtol=0, atol=1e-6)


def test_scale_and_bias_are_vectors_of_one(tiny: str) -> None:
    model = build(tiny, initial_scale=20.0, initial_bias=-10.0)
    assert model.logit_scale.shape == (1,)
    assert model.logit_scale.item() == pytest.approx(math.log(20.0))
    _, _, scale, bias = model()
    assert scale.shape == bias.shape == (1,)
    assert scale.item() == pytest.approx(20.0)
    assert bias.item() == -10.0
    assert build(tiny)()[2].item() == pytest.approx(1 / 0.07)
    assert build(tiny)()[3] is None


def test_scale_that_is_not_learned_is_frozen(tiny: str) -> None:
    assert "logit_scale" in trained(build(tiny))
    fixed = build(tiny, learns_scale=False)
    assert "logit_scale" not in trained(fixed)
    assert len(trained(fixed)) == len(trained(build(tiny))) - 1


def test_read_text_size_of_both_kinds_of_tower(tiny: str, tmp_path: Path) -> None:
    assert read_text_size(build(tiny)) == (CONTEXT, VOCABULARY)
    path = tmp_path / "custom.json"
    path.write_text(json.dumps(TINY | {"custom_text": True}))
    custom = build(str(path))
    assert isinstance(custom, open_clip.CustomTextCLIP)
    assert read_text_size(custom) == (CONTEXT, VOCABULARY)


# Locked towers


def write_hugging_face(folder: Path) -> str:
    config = transformers.RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    transformers.RobertaModel(config).save_pretrained(folder / "tower")
    path = folder / "roberta.json"
    text = {
        "hf_model_name": str(folder / "tower"),
        "context_length": CONTEXT,
        "hf_proj_type": "mlp",
    }
    path.write_text(json.dumps(TINY | {"text_cfg": text}))
    return str(path)


@pytest.mark.parametrize("kind", ["tiny", "custom_text", "quickstart", "resnet", "hugging_face"])
@pytest.mark.parametrize("tower", ["image", "text", "text of two views"])
def test_lock_freezes_exactly_that_tower(tower: str, kind: str, tmp_path: Path) -> None:
    writers = {"tiny": write_tiny, "resnet": write_resnet, "hugging_face": write_hugging_face}
    name = writers.get(kind, lambda _: kind)(tmp_path)
    if kind == "custom_text":
        path = tmp_path / "custom.json"
        path.write_text(json.dumps(TINY | {"custom_text": True}))
        name = str(path)
    lock = {"two_views": True} if tower == "text of two views" else {f"lock_{tower}": True}
    model = build(name, **lock)
    names = {name for name, _ in model.named_parameters()}
    image = {name for name in names if name.startswith("visual.")}
    text = names - image - {"logit_scale"}
    assert image
    assert text
    if kind not in ("custom_text", "hugging_face"):
        assert {
            "text_projection",
            "positional_embedding",
            "token_embedding.weight",
            "ln_final.weight",
        } <= text
    assert trained(model) == (text if tower == "image" else image) | {"logit_scale"}


def test_lock_image_freezes_batch_statistics_too(tmp_path: Path) -> None:
    model = build(write_resnet(tmp_path), lock_image=True).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(one_batch()[0])
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


def test_lock_both_towers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.lock_image and model\.lock_text"):
        ModelSettings(lock_image=True, lock_text=True)


# Options


def test_token_embedding_std_is_that_of_the_embedding_alone(tiny: str) -> None:
    plain, wide = build(tiny), build(tiny, token_embedding_std=0.5)
    assert plain.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert wide.token_embedding.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert wide.positional_embedding.std().item() == pytest.approx(
        plain.positional_embedding.std().item(), rel=0.2
    )


def test_activation_checkpointing_changes_no_gradient(tiny: str) -> None:
    plain = gradients(build(tiny).train())
    model = build(tiny, activation_checkpointing=True).train()
    calls = count_blocks(model)
    again = gradients(model)
    assert sorted(calls) == 4 * ["transformer"] + 4 * ["visual.transformer"], (
        "each of the two blocks per tower must run twice"
    )
    assert set(plain) == set(again)
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-7, msg=name)


def count_blocks(model: Any) -> list[str]:
    """Return a list to which every forward pass of a transformer block adds the name of its tower."""
    calls: list[str] = []
    for tower in ("visual.transformer", "transformer"):
        for block in model.get_submodule(tower).resblocks:
            block.ln_1.register_forward_hook(lambda *_, tower=tower: calls.append(tower))
    return calls


def test_patch_dropout_drops_in_training_only(tiny: str) -> None:
    model = build(tiny, patch_dropout=0.75)
    tokens: list[int] = []
    model.visual.transformer.register_forward_pre_hook(
        lambda _, inputs: tokens.append(inputs[0].shape[1])
    )
    image = one_batch()[0]
    model.train()(image)
    model.eval()(image)
    assert tokens == [1 + 4, 1 + 16]


@pytest.mark.slow
def test_compile_changes_no_feature_and_no_key(tiny: str) -> None:
    plain, compiled = build(tiny).eval(), build(tiny, compile=True).eval()
    assert list(plain.state_dict()) == list(compiled.state_dict())
    for a, b in zip(plain(*one_batch())[:3], compiled(*one_batch())[:3], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    for tower in (compiled.visual.transformer, compiled.transformer):
        assert all(block._compiled_call_impl is not None for block in tower.resblocks)


def test_convnet_checkpoints_its_activations_and_refuses_patch_dropout() -> None:
    plain, saving = (build("quickstart", activation_checkpointing=flag) for flag in (False, True))
    assert saving.visual.trunk.checkpointing
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    for model in (plain, saving):
        model(image=pixels)[0].square().sum(0).max().backward()
    for mine, other in zip(plain.visual.parameters(), saving.visual.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    with pytest.raises(ValueError, match="patch_drop_rate"):
        build("quickstart", patch_dropout=0.5)
