"""`disco-ds plan`: traces compared with measured steps, ZeRO's memory compared with an engine, `--fit`, the output."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip.hf_model import HFTextEncoder
from open_clip.transformer import VisionTransformer
from timm.models import register_model
from torch import Tensor, nn
from torch.profiler import profile

from disco_ds.cli.commands import describe_run
from disco_ds.cli.main import main
from disco_ds.config import Config, ModelSettings, OptimSettings, load_config, render_ds_config
from disco_ds.losses import build_loss
from disco_ds.models.clip import build_model
from disco_ds.models.gpus import find_gpu
from disco_ds.models.two_towers import TwoTowers
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.memory import GIB, plan_memory
from disco_ds.plan.overview import list_changes, plan_run
from disco_ds.plan.speed import _count_engine, hide, plan_speed, tower_rate
from disco_ds.plan.towers import Allocations, trace
from disco_ds.training.engine import build_engine, set_lr
from helpers.dist import run_ranks
from helpers.shards import write_shards
from helpers.step import train_step
from helpers.towers import BPE_SIZE, TINY, batches, prepare, tiny_config, write_tiny
from tools.check.memory import measure_towers

CPU = torch.device("cpu")
AUTOCAST: dict[str, Any] = {
    "zero_optimization": {"stage": 1},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
}
NOTHING = Assumptions(slack=0, context_gib=0)


def tiny(folder: Path, **changes: Any) -> Config:
    return tiny_config(
        write_tiny(folder), changes.pop("deepspeed", {"zero_optimization": {"stage": 1}}), **changes
    )


# The towers


@pytest.mark.slow
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "autocast"])
def test_trace_agrees_with_a_measured_step(kind: str, saves: bool, tmp_path: Path) -> None:
    # Under autocast, use open_clip's towers: on a CPU, the backward of packed attention copies 16-bit values to fp32,
    # which the kernel of a GPU does not.
    config = tiny(
        tmp_path,
        model__activation_checkpointing=saves,
        model__towers="open_clip" if kind == "autocast" else "auto",
        deepspeed=AUTOCAST if kind == "autocast" else {},
    )
    measured = measure_towers(config, 64, CPU)
    traced, found = trace(config, 64, like_gpu=False), measured
    # Under autocast, compare only passes with a graph. Without one, pixels are the largest part, and a CPU converts
    # them to fp32 copies, which a GPU does not.
    names = ("replay", "forward", "held", "backward")
    for name in names[2:] if kind == "autocast" else names:
        print(
            f"{kind}, checkpointing {saves}, {name}: {getattr(traced, name) / getattr(found, name) - 1:+.1%}"
        )
        assert getattr(traced, name) == pytest.approx(getattr(found, name), rel=0.05), name
    assert traced.held < traced.backward
    assert traced.replay < traced.held or saves


@pytest.mark.slow
@pytest.mark.parametrize("saves", [False, True])
def test_activations_grow_in_proportion_to_the_micro_batch(saves: bool, tmp_path: Path) -> None:
    config = tiny(tmp_path, model__activation_checkpointing=saves, deepspeed=AUTOCAST)
    first, second, third = (trace(config, m) for m in (256, 512, 1024))
    between = first.interpolate(third, 1 / 3)
    for name, value in vars(second).items():
        # The tile indices of packed texts, 4 bytes each, do not grow in proportion.
        assert value - 64 <= getattr(between, name) <= 1.01 * value, name


@pytest.mark.slow
def test_trace_counts_what_autocast_does_on_a_gpu(tmp_path: Path) -> None:
    config = tiny(tmp_path, deepspeed=AUTOCAST)
    assert trace(config, 64).held > 1.05 * trace(config, 64, like_gpu=False).held, (
        "on a GPU, autocast makes norms keep a copy of their input"
    )


@pytest.mark.slow
def test_trace_leaves_nothing_fake_behind(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    trace(config, 8)
    image, *_ = build_model(config.model)(image=batches(1, 4)[0]["image"])
    assert type(image.detach()) is Tensor
    assert torch.get_default_dtype() == torch.float32


@register_model
def plan_undecided(pretrained: bool = False, **keywords: Any) -> nn.Module:
    """Build a tower whose shapes depend on the values of its input, so that it cannot be traced."""

    class Undecided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x.flatten(1).sum(1) > 0].flatten(1)[:, :16].repeat(int(x.sum().item()), 1)

    return Undecided()


@pytest.mark.slow
def test_model_that_cannot_be_traced_is_named(tmp_path: Path) -> None:
    path = tmp_path / "undecided.json"
    vision = {
        "timm_model_name": "plan_undecided",
        "image_size": 32,
        "timm_pool": "",
        "timm_proj": "",
    }
    text = json.loads(Path(write_tiny(tmp_path)).read_text())["text_cfg"]
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    with pytest.raises(ValueError, match=r"undecided\.json cannot be traced: "):
        trace(tiny_config(str(path), {}), 8)


# What DeepSpeed holds


def resident(config: Config) -> int:
    """Return the bytes of the tensors that an engine holds after a step, without gradients."""
    size = torch.distributed.get_world_size()
    with Allocations([]) as memory:
        engine = build_engine(
            build_model(config.model), config.optim, render_ds_config(config, size)
        )
        set_lr(engine, 1e-3)
        train_step(engine, build_loss("disco"), batches(2, config.micro_batch), prepare, 100.0)
        engine.zero_grad()
    return memory.current


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_planned_states_are_what_an_engine_holds(stage: int, tmp_path: Path) -> None:
    ds_config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000}}
    wide = {"width": 256, "head_width": 32}
    changes = {"optim__name": "adamw", "global_batch": 16, "micro_batch": 4}
    config = tiny_config(write_tiny(tmp_path, **wide), ds_config, **changes)
    found = run_ranks(resident, 2, config)[0]
    parts = plan_memory(config, 2, trace(config, 4), NOTHING).moments["forward"]
    assert parts["parameters"] + parts["optimizer"] == pytest.approx(found, rel=0.1)


def peak_of_backward(config: Config) -> int:
    """Return the peak of the bytes that the second backward allocates.

    The loss is the sum of all parameters, so backward needs no activations.
    """
    engine = build_engine(
        build_model(config.model),
        config.optim,
        render_ds_config(config, torch.distributed.get_world_size()),
    )
    image, text, _ = prepare(batches(1, config.micro_batch)[0])
    for _ in range(2):
        engine(image, text)
        surrogate = sum(parameter.sum() for parameter in engine.module.parameters())
        with profile(profile_memory=True) as profiler:
            engine.backward(surrogate, scale_wrt_gas=False)
        engine.step()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    return max(
        itertools.accumulate(
            event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
        )
    )


def peaks_of_backward(configs: list[Config]) -> list[int]:
    return [peak_of_backward(config) for config in configs]


@pytest.mark.slow
def test_planned_gradients_and_buckets_are_what_backward_takes(tmp_path: Path) -> None:
    model, bucket = write_tiny(tmp_path, width=256, head_width=32), {"reduce_bucket_size": 300_000}
    changes = {"optim__name": "adamw", "global_batch": 8, "micro_batch": 4}
    configs = [
        tiny_config(
            model,
            {"zero_optimization": {"stage": stage, "overlap_comm": overlaps, **bucket}},
            **changes,
        )
        for stage, overlaps in itertools.product((1, 2), (False, True))
    ]
    found = run_ranks(peaks_of_backward, 2, configs)[0]
    for config, peak in zip(configs, found, strict=True):
        parts = plan_memory(config, 2, trace(config, 4), NOTHING).moments["backward"]
        planned = parts["gradients"] + parts["communication"]
        assert 0.85 * peak < planned < 1.15 * peak, (config.deepspeed, planned / peak)


def test_stages_share_out_what_they_promise(tmp_path: Path) -> None:
    config = tiny(tmp_path, optim__name="adamw", global_batch=64, micro_batch=4)
    towers = trace(config, 4)

    def parts(stage: int, **zero: Any) -> dict[str, int]:
        ds_config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **zero}}
        return plan_memory(
            config.model_copy(update={"deepspeed": ds_config}), 8, towers, NOTHING
        ).moments["backward"]

    whole, share = 4 * towers.trained, 4 * -(-towers.trained // 8)
    assert [parts(stage)["optimizer"] for stage in range(4)] == [2 * whole, *[3 * share] * 3]
    assert [parts(stage)["gradients"] for stage in range(4)] == [
        whole,
        whole,
        2 * share + 4 * towers.largest,
        share,
    ]
    assert parts(3)["parameters"] == share + whole
    assert parts(2, offload_optimizer={"device": "cpu"})["optimizer"] == 0
    assert [parts(stage)["communication"] for stage in (1, 2)] == [4000, 8000]
    assert parts(1, overlap_comm=True)["communication"] == 12000
    assert parts(2, overlap_comm=True)["communication"] == 3 * 4 * towers.largest
    assert (
        parts(2, overlap_comm=True, reduce_bucket_size=100_000)["communication"] == 800_000 + whole
    )
    with pytest.raises(ValueError, match=r"offload to nvme is refused"):
        parts(3, offload_optimizer={"device": "nvme", "nvme_path": "/x"})


def test_states_of_every_optimizer_are_known(tmp_path: Path) -> None:
    config = tiny(tmp_path, deepspeed={})
    towers = trace(config, 4)
    for name, numbers in {"adamw": 2, "lamb": 2, "lion": 1, "muon": 2, "sgd": 1}.items():
        for ema in (None, {"decay": 0.9}):
            optim = OptimSettings.model_validate({"name": name, "ema": ema})
            chosen = config.model_copy(update={"optim": optim})
            held = plan_memory(chosen, 1, towers, NOTHING).moments["update"]["optimizer"]
            assert held == 4 * (numbers + (ema is not None)) * towers.trained, name
    optim = OptimSettings(factory="torch.optim:NAdam")
    chosen = config.model_copy(update={"optim": optim})
    held = plan_memory(chosen, 1, towers, NOTHING).moments["update"]["optimizer"]
    assert held == 4 * 2 * towers.trained


def test_host_holds_images_as_the_recipe_says(tmp_path: Path) -> None:
    """The batch has 4,096 samples on 2 ranks. The bytes are those of one rank."""
    config = tiny(tmp_path, global_batch=4096, micro_batch=16, data__workers=3, data__prefetch=5)
    towers = trace(config, 16)
    image = towers.sample  # bytes of an image and its caption

    def host(pixels: str) -> dict[str, int]:
        return plan_memory(
            config.model_copy(update={"image_staging": pixels}), 2, towers, Assumptions()
        ).host

    def buffers(num: int) -> dict[str, int]:
        return {"pixels, in buffers": num * 16 * image}

    assert host("device") == buffers(1 + 5)
    assert host("host") == buffers(128 + 5)


# What fits


def command(folder: Path, *arguments: str) -> list[str]:
    path = folder / "recipe.yaml"
    path.write_text(
        f"{{name: small, global_batch: 256, micro_batch: 64, samples: 1000000000, data: {{source: synthetic}}, "
        f"model: {{name: {write_tiny(folder)}}}, "
        "deepspeed: {base: zero1, zero_optimization: {reduce_bucket_size: 1000}}}"
    )
    return [
        "disco-ds",
        "plan",
        "--config",
        str(path),
        "--ranks",
        "4",
        "--context-gib",
        "0.01",
        *arguments,
    ]


def run(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", argv)
    return main()


@pytest.mark.slow
def test_fit_writes_a_recipe_that_fits_and_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fitted"
    argv = command(
        tmp_path,
        "--gpu-memory",
        "0.1",
        "--fit",
        str(folder),
        "--batch",
        "largest",
        "--host-memory",
        "2",
        "samples=5000000",
    )
    assert run(argv, monkeypatch) == 0
    assert "\nfits: 0." in capsys.readouterr().out
    config = load_config(folder / "recipe.yaml")
    assert config.deepspeed["zero_optimization"]["reduce_bucket_size"] == 1000
    assert f"global batch {config.global_batch:,} = 4 ranks" in describe_run(config, 4)
    assumed = Assumptions(context_gib=0.01)
    towers = trace(config, config.micro_batch)
    assert plan_memory(config, 4, towers, assumed).total <= 0.1 * GIB
    more = config.model_copy(update={"global_batch": 2 * config.global_batch})
    memory = plan_memory(more, 4, towers, assumed)
    assert memory.total > 0.1 * GIB or 4 * sum(memory.host.values()) > 2 * GIB, (
        "twice the batch must not fit"
    )
    assert run(argv, monkeypatch) == 2
    assert "already exists" in capsys.readouterr().err


def test_faster_settings_for_the_batch_are_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ["global_batch=8192", "micro_batch=64", "model.activation_checkpointing=true"]
    argv = command(tmp_path, *slow)
    assert run(argv, monkeypatch) == 0
    out = capsys.readouterr().out
    # 2,048 samples per rank fit into one micro-batch, which needs no second forward pass.
    assert "\nfaster: micro_batch=2048 model.activation_checkpointing=false: 0." in out
    assert "\n122,070 steps, " in out
    assert " hours on 4 GPUs" in out
    folder = tmp_path / "fitted"
    assert run([*argv, "--fit", str(folder)], monkeypatch) == 0
    assert "faster: " not in capsys.readouterr().out
    config = load_config(folder / "recipe.yaml")
    assert (config.global_batch, config.micro_batch) == (8192, 2048)
    fitted = ["disco-ds", "plan", "--config", str(folder / "recipe.yaml"), "--context-gib", "0.01"]
    assert run(fitted, monkeypatch) == 0
    assert "no other micro-batch" in capsys.readouterr().out


def test_batch_that_no_tried_size_divides_keeps_its_micro_batch(tmp_path: Path) -> None:
    config = tiny(tmp_path, deepspeed=AUTOCAST, global_batch=4099, micro_batch=4099)  # a prime
    assert plan_run(config, 1, search="same").config.micro_batch == 4099


def test_fastest_settings_fit_and_may_change_the_zero_stage(tmp_path: Path) -> None:
    config = tiny(tmp_path, deepspeed=AUTOCAST, global_batch=8192, micro_batch=64)
    assumed = Assumptions(context_gib=0.01)
    plans = {gib: plan_run(config, 4, str(gib), assumed, "same") for gib in (1, 0.27)}
    assert all(plan.fits for plan in plans.values())
    assert list_changes(config, plans[1].config) == ["micro_batch=2048"]
    assert plans[0.27].config.micro_batch < 2048
    with pytest.raises(ValueError, match=r"nothing fits in 0\.001 GiB: micro-batches of 64"):
        plan_run(config, 4, "0.001", assumed, "same")


def test_higher_zero_stage_is_not_called_faster_if_a_lower_one_fits() -> None:
    """Without latencies, ZeRO 3 seems faster than ZeRO 1, because all passes hide its communication."""
    shape = ["ranks=16", "global_batch=4096", "micro_batch=256", "deepspeed=zero1"]
    config = load_config("vit_b_32_196k", [*shape, "model.activation_checkpointing=false"])
    assert list_changes(config, plan_run(config, 16, "H100-80G", search="same").config) == []


def test_largest_batch_is_at_most_the_run(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", [200, 312]).folder
    data = {"source": "shards", "shards": str(shards), "image_key": "png"}
    changes = {"steps": None, "epochs": 2.0, "data": data}
    config = tiny_config(write_tiny(tmp_path, BPE_SIZE), AUTOCAST, **changes)
    plan = plan_run(config, 4, "H200", search="largest")
    assert 900 < plan.config.global_batch <= 1024


def test_plan_counts_the_samples_of_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_shards(tmp_path / "shards", [200, 312]).folder
    data = f"data={{shards: {folder}, image_key: png}}"
    argv = command(tmp_path, "samples=null", "epochs=100", "optim.warmup_steps=10", data)
    write_tiny(tmp_path, BPE_SIZE)
    assert run(argv, monkeypatch) == 0
    out = capsys.readouterr().out
    assert "200 steps, " in out
    assert re.search(r"the data workers must deliver [\d,]+ images/s on each host", out)


def test_plan_says_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = command(
        tmp_path,
        "--gpu-memory",
        "0.02",
        "global_batch=32768",
        "loss.name=clip",
    )
    assert run(argv, monkeypatch) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT: 2" in out
    assert "largest part: loss, 20.0" in out


def test_each_stage_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = "stages=[{until: 64000, global_batch: 256}, {until: 653824, global_batch: 32768}]"
    given = ["steps=null", "samples=null", "optim.warmup_steps=0", "loss.name=clip", stages]
    assert run(command(tmp_path, "--gpu-memory", "1", *given), monkeypatch) == 1
    first, second = capsys.readouterr().out.split("until 653,824 samples:\n")
    assert "fits: 0" in first
    assert "DOES NOT FIT: 2" in second
    assert run(command(tmp_path, "--fit", "fitted", *given), monkeypatch) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu-memory", "A100-40"], "RTX-3090; did you mean A100-40G?"),
        (["--gpu-memory", "-1"], "positive number of GiB"),
        (["micro_batch=48"], "not a multiple of ranks x micro_batch"),
        pytest.param(
            ["--gpu-memory", "0.001", "--fit", "x", "--batch", "largest"],
            "nothing fits in 0.001 GiB: micro-batches of 64",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["loss.name=sogclr", "data={shards: /x}"], "--data-samples N", marks=pytest.mark.slow
        ),
        (["model.name=nothing"], "unknown model 'nothing'"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(command(tmp_path, *arguments), monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


@pytest.mark.slow
def test_time_is_flops_and_bytes_over_the_rates(tmp_path: Path) -> None:
    config = tiny(
        tmp_path, deepspeed=AUTOCAST, global_batch=64, micro_batch=4, loss__name="disco_fused"
    )
    towers, gpu = trace(config, 4), find_gpu("A100-40G")
    assumed = Assumptions(efficiency=0.5, bandwidth=1.0, per_host=4)
    speed = plan_speed(config, 8, towers, gpu, assumed)
    assert speed is not None
    assert speed.towers_s == pytest.approx((towers.replay_flops + 2 * towers.flops) / 156e12)
    assert speed.loss_s == pytest.approx(4 * 2 * 8 * 64 * 16 / (0.5 * 312e12))
    assert speed.comm_s == pytest.approx(speed.comm_bytes / 1e9)
    assert speed.comm_bytes == pytest.approx(
        7 / 8 * (64 * 16 * (2 + 4) + 3 * 4 * towers.trained), rel=1e-6
    )
    assert plan_speed(config, 8, towers, find_gpu("40"), assumed) is None


def test_backward_hides_all_but_the_last_bucket() -> None:
    assert hide(6.0, 100.0, 3) == pytest.approx(4.0)
    assert hide(6.0, 100.0, 1) == 0.0
    # The first of 3 buckets is ready after a third of the window.
    assert hide(90.0, 30.0, 3) == pytest.approx(20.0)


def test_only_overlapped_reductions_are_hidden(tmp_path: Path) -> None:
    towers = {m: trace(tiny(tmp_path, global_batch=64, micro_batch=m), m) for m in (4, 8)}

    def hidden(stage: int, m: int, **zero: Any) -> float:
        zero |= {"stage": stage, "reduce_bucket_size": 1000}
        config = tiny(
            tmp_path, deepspeed={"zero_optimization": zero}, global_batch=64, micro_batch=m
        )
        slow = Assumptions(efficiency=1e-6)
        speed = plan_speed(config, 8, towers[m], find_gpu("H200"), slow)
        assert speed is not None
        assert speed.step_s == speed.towers_s + speed.loss_s + speed.comm_s - speed.hidden_s
        return speed.hidden_s

    assert hidden(0, 8) == hidden(1, 4) == hidden(1, 8, overlap_comm=False) == 0
    assert hidden(0, 8, overlap_comm=True) == 0
    assert 0 < hidden(1, 8) == hidden(1, 4, overlap_comm=True) == hidden(2, 8)
    assert hidden(2, 4, overlap_comm=True) == pytest.approx(2 * hidden(1, 8))
    assert hidden(3, 8) > hidden(1, 8)


def build_with_roberta() -> TwoTowers:
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    visual = VisionTransformer(32, 8, 32, 1, 2, 2.0, output_dim=16)
    text = HFTextEncoder("", 16, config=config, pooler_type="mean_pooler", proj_type="linear")
    return TwoTowers(visual, text, lambda texts: torch.ones(len(texts), 36), 36, 60, 32)


def test_short_texts_are_planned_only_where_a_gpu_packs_them(tmp_path: Path) -> None:
    """In fp32 and with heads that are too wide for the kernels, texts are padded.

    Towers of Hugging Face cut all texts to the longest one, which is usually long.
    """
    short = Assumptions(text_tokens=2.0)
    roberta = {
        "model__name": ModelSettings().name,
        "model__factory": f"{__name__}:build_with_roberta",
    }
    views = {"model__two_views": True, "data__augment__zoom": 0.1}
    wide = tmp_path / "wide.json"
    text_cfg = TINY["text_cfg"] | {"width": 512, "heads": 2}
    wide.write_text(json.dumps(TINY | {"text_cfg": text_cfg}))
    for precision, changes, is_packed in (
        (AUTOCAST, {}, True),
        ({}, {}, False),
        (AUTOCAST, {"model__name": str(wide)}, False),
        (AUTOCAST, views, False),
        (AUTOCAST, roberta, False),
    ):
        config = tiny(tmp_path, deepspeed=precision, **changes)
        padded, found = plan_run(config), plan_run(config, assumed=short)
        assert padded.speed is not None
        assert found.speed is not None
        assert (found.speed.towers_s < padded.speed.towers_s) == is_packed
        assert (found.memory.total < padded.memory.total) == is_packed
        assert found.assumed.text_tokens == (2.0 if is_packed else None)


def test_time_depends_on_the_mean_length_of_texts_and_memory_on_longer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path, deepspeed=AUTOCAST)
    spread = trace(config, 16, text_tokens=4.0)
    monkeypatch.setattr("disco_ds.plan.towers.ERRORS", 0)
    equal = trace(config, 16, text_tokens=4.0)
    assert (spread.flops, spread.replay_flops) == (equal.flops, equal.replay_flops)
    assert spread.held > equal.held


def test_plan_says_where_the_rate_comes_from(tmp_path: Path) -> None:
    def source(gpu: str, precision: dict[str, Any] = AUTOCAST, **changes: Any) -> str:
        config = tiny_config(changes.pop("name", "ViT-L-14"), precision, **changes)
        return tower_rate(config, find_gpu(gpu))[1]

    assert source("H200") == "measured for ViT-L-14, compiled, on H200"
    assert "ViT-L-14, not compiled, on" in source("H200", model__compile=False)
    assert source("A100-40G").startswith("a guess for this GPU: measured for ViT-L-14")
    assert source("H200", {}).startswith("a guess from ViT-B-32")
    assert source("H200", name="RN50").startswith("a guess from ViT-B-32")
    assert source("H200", model__towers="open_clip") == "a guess"
    config = tiny(tmp_path, deepspeed=AUTOCAST)
    towers = trace(config, 16)
    given = plan_speed(config, 1, towers, find_gpu("H200"), Assumptions(efficiency=0.5))
    assert given is not None
    assert (given.rate, given.source) == (0.5, "given")


def test_gradients_of_16_bit_parameters_travel_in_fp32(tmp_path: Path) -> None:
    config = tiny(tmp_path, optim__name="adamw", global_batch=64, micro_batch=4)
    towers, K = trace(config, 4), 2
    P = towers.trained

    def of(stage: int) -> Config:
        zero = {"stage": stage, "reduce_bucket_size": 1000}
        ds_config = {"bf16": {"enabled": True}, "zero_optimization": zero}
        return config.model_copy(update={"deepspeed": ds_config})

    rendered = [render_ds_config(of(stage), 8) for stage in (1, 2, 3)]
    counts = [sum(_count_engine(each, 8, K, towers)) / (7 / 8 * P) for each in rendered]
    assert counts == pytest.approx([10, 8 * K + 2, 2 * (3 * K - 1) + 4 * K], rel=1e-5)
    for stage in (1, 2):
        # A bucket of 1,000 elements and its flat copy, both in bf16, and a copy in fp32.
        parts = plan_memory(of(stage), 8, towers, NOTHING).moments["backward"]
        assert parts["communication"] == 2000 + 2000 + 4000


# DisCo-CLIP's Table 3


@pytest.mark.slow
def test_verdicts_and_slope_of_the_papers_table_3() -> None:
    """Plan for 64 and 8 A100-40G. Fitting constant + b (slope + k B) to the paper's rows gives 5.2 MB per sample."""
    recipe = load_config("vit_b_32_196k", ["ranks=null"])

    def plan(loss: str, ranks: int, batch: int) -> int:
        update = {"global_batch": batch, "micro_batch": batch // ranks}
        config = recipe.model_copy(
            update=update | {"loss": recipe.loss.model_copy(update={"name": loss})}
        )
        return plan_memory(config, ranks, trace(config, config.micro_batch)).total

    limit = find_gpu("A100-40G").gib * GIB
    assert plan("clip", 64, 32768) <= limit
    assert plan("clip", 64, 65536) > limit
    assert all(
        plan("disco", *setting) <= limit for setting in ((64, 32768), (64, 196608), (8, 32768))
    )
    first, second = (trace(recipe, m).backward for m in (512, 4096))
    assert (second - first) / (4096 - 512) == pytest.approx(5.2e6, rel=0.15)
