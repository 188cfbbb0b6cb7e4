"""`disco-ds from-open-clip` with the command lines of open_clip's README and scripts, and with single flags."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from disco_ds.cli.from_open_clip import parse_flags, translate
from disco_ds.cli.main import main
from disco_ds.config import Config, load_config
from disco_ds.config.recipe_yaml import parse
from disco_ds.data import load_sources
from disco_ds.eval import load_sets
from helpers.paths import ROOT
from helpers.shards import encode, noise

ONE_GPU = """python -m open_clip_train.main --save-frequency 1 --zeroshot-frequency 1 --report-to tensorboard
    --train-data="/path/to/train_data.csv" --val-data="/path/to/validation_data.csv" --csv-img-key filepath
    --csv-caption-key title --imagenet-val=data/imagenet/val/ --warmup 10000 --batch-size=128 --lr=1e-3 --wd=0.1
    --epochs=30 --workers=8 --model RN50"""
FOUR_GPUS = """torchrun --nproc_per_node 4 -m training.main --train-data '/data/cc12m/cc12m-train-{0000..2175}.tar'
    --train-num-samples 10968539 --dataset-type webdataset --batch-size 320 --precision amp --workers 4
    --imagenet-val /data/imagenet/validation/"""
SLURM = """srun --cpu_bind=v --accel-bind=gn python -u src/open_clip_train/main.py --save-frequency 1
    --report-to tensorboard --train-data="/data/LAION-400M/{00000..41455}.tar" --warmup 2000 --batch-size=256
    --epochs=32 --workers=8 --model ViT-B-32 --name "ViT-B-32-Vanilla" --seed 0 --local-loss --gather-with-grad"""
SCRIPT = """torchrun --nproc_per_node 8 -m open_clip_train.main --save-frequency 1 --save-most-recent
    --zeroshot-frequency 1 --train-data '/path/to/laion' --dataset-type webdataset --lr "2.048e-3" --beta1 0.9
    --beta2 0.95 --warmup 782 --wd 0.2 --batch-size 4096 --aug-cfg scale='(0.4, 1.0)'
    color_jitter='(0.32, 0.32, 0.32, 0.08)' color_jitter_prob=0.8 gray_scale_prob=0.2 --epochs=7 --workers=6
    --model ViT-H-14-CLIPA --precision 'amp_bf16' --local-loss --gather-with-grad --force-image-size 224
    --grad-checkpointing --log-every-n-steps 32 --seed 0 --logs ./logs/ --imagenet-val '/path/to/ImageNet/val'
    --name 'name' --report-to "wandb" --wandb-project-name "project_name" """
COOLDOWN = "--epochs 4 --warmup 5 --epochs-cooldown 1"
JITTER = "color_jitter=(0.1,0.2,0.3,0.4)"


def load(line: str, ranks: int, folder: Path) -> tuple[Config, str]:
    """Return the settings of the recipe for a line's flags, and the text of the recipe."""
    text = translate(parse_flags(shlex.split(line)), ranks)
    (folder / "recipe.yaml").write_text(text)
    return load_config(folder / "recipe.yaml"), text


def setting(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


@pytest.mark.parametrize(
    ("line", "ranks", "expected"),
    [
        (ONE_GPU, 1, {"epochs": 30, "global_batch": 128, "optim.eps": 1e-8, "optim.lr": 1e-3}),
        (
            FOUR_GPUS,
            4,
            {
                "samples": 32 * 10968539,
                "global_batch": 1280,
                "checkpoint.every_steps": 8570,
                "eval.every_steps": 17139,
            },
        ),
        (SLURM, 128, {"epochs": 32, "global_batch": 32768, "name": "ViT-B-32-Vanilla"}),
        (
            SCRIPT,
            8,
            {
                "global_batch": 32768,
                "optim.betas": (0.9, 0.95),
                "data.crop_scale": (0.4, 1.0),
                "data.augment.color_jitter": (0.32, 0.32, 0.32, 0.08),
                "data.augment.color_jitter_prob": 0.8,
                "data.augment.gray_scale_prob": 0.2,
                "model.image_size": 224,
                "model.activation_checkpointing": True,
                "log.wandb.project": "project_name",
            },
        ),
    ],
    ids=["one-gpu", "four-gpus", "slurm", "script"],
)
def test_recipe_of_a_line_of_open_clip_starts(
    line: str,
    ranks: int,
    expected: dict[str, object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["from-open-clip", "--ranks", str(ranks), "--", *shlex.split(line)]) == 0
    path = tmp_path / "recipe.yaml"
    path.write_text(capsys.readouterr().out)
    config = load_config(path)
    assert {key: setting(config, key) for key in expected} == expected
    words = ["train", "--config", str(path), "--dry-run", "log.wandb.project=null"]
    assert main(words) == 0
    assert "warning: no " not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--name 'run#3' --lr 1e-3", {"name": "run_3", "optim.lr": 1e-3}),
        ("--csv-separator ';' --model ViT-B-16", {"model.name": "ViT-B-16"}),
        ("--name 2024_01", {"name": "2024_01"}),
        ("--report-to wandb --wandb-project-name 2024_01", {"log.wandb.project": "2024_01"}),
        ("--batch-size 100 --accum-freq 2", {"global_batch": 800, "micro_batch": 100}),
        ("--train-data a::b", {"data.sources": ["a", "b"]}),
        ("--train-data 'pipe:cat {0..3}.tar'", {"data.remote.pipe": True}),
        ("--force-image-size 224 224", {"model.image_size": 224}),
        ("--image-interpolation random", {"model.interpolation": None}),
        ("--image-interpolation bilinear", {"model.interpolation": "bilinear"}),
        ("--pretrained ''", {"model.pretrained": None}),
        ("--model local-dir:w --pretrained openai", {"model.name": "w", "model.pretrained": Path("w")}),
        ("--pretrained-image", {"model.pretrained_image": Path("timm")}),
        ("--lock-image --lock-image-unlocked-groups 2 --lock-text-unlocked-layers 0", {"model.unlocked_layers": 2}),
        ("--lock-text --lock-text-unlocked-layers 3 --lock-image-unlocked-groups 2", {"model.unlocked_layers": 3}),
        ("--lock-image-unlocked-groups 2", {"model.unlocked_layers": 0}),
        # open_clip uses color_jitter only with color_jitter_prob.
        (f"--aug-cfg '{JITTER}'", {"data.augment.color_jitter": (0, 0, 0, 0)}),
        ("--aug-cfg use_timm=True color_jitter=0.4", {"data.augment.color_jitter": (0, 0, 0, 0)}),
        ("--aug-cfg use_timm=False 'scale=(0.4, 1.0)'", {"data.crop_scale": (0.4, 1.0)}),
        ("--skip-scheduler --warmup 5", {"optim.schedule": "constant", "optim.warmup_steps": 0}),
        ("--lr-scheduler const", {"optim.schedule": "constant", "optim.warmup_steps": 10000}),
        (COOLDOWN, {"optim.schedule": "cosine", "optim.cooldown_steps": 0}),
        (
            f"--train-num-samples 1000000 --lr-scheduler const-cooldown {COOLDOWN}",
            {"samples": 4_000_000, "optim.schedule": "cooldown", "optim.cooldown_steps": 3907},
        ),
        (f"--train-data a.csv --lr-scheduler const-cooldown {COOLDOWN}", {"optim.schedule": "constant"}),
        # open_clip's warmup may be longer than the run.
        ("--train-num-samples 1000000 --epochs 1", {"optim.warmup_steps": 3906}),
        ("--save-frequency 0", {"checkpoint.every_epochs": 0, "checkpoint.every_steps": 0}),
        ("--train-data a.csv --train-num-samples 9", {"epochs": 32, "samples": None}),
        (
            "--train-data a.tsv --val-data b.csv --csv-caption-key text --csv-img-key file",
            {"data.image_key": "file", "data.captions": {"{text}": 1}, "eval.caption_key": "{text}"},
        ),
        ("--val-data '/d/{000..009}.tar'", {"eval.validation": {}}),
        (
            "--train-data '' --dataset-type synthetic --train-num-samples 4096",
            {"data.source": "synthetic", "data.num_samples": 4096, "samples": 32 * 4096},
        ),
        (
            "--distill-model ViT-L-14 --distill-pretrained openai",
            {"teacher.model": "ViT-L-14", "teacher.pretrained": Path("openai"), "teacher.weight": 0.5},
        ),
        ("--siglip", {"loss.name": "siglip"}),
        ("--precision fp32", {"deepspeed.torch_autocast.enabled": False}),
        ("--precision pure_bf16", {"deepspeed.torch_autocast.enabled": False, "deepspeed.bf16.enabled": True}),
        ("--delete-previous-checkpoint", {"checkpoint.keep_last": 1}),
        ("--opt timm/lion --lr 1e-4", {"optim.name": "adamw", "optim.betas": (0.9, 0.98)}),
    ],
)  # fmt: skip
def test_flags_become_these_settings(
    flags: str, expected: dict[str, object], tmp_path: Path
) -> None:
    config, _ = load(f"--train-data x {flags}", 4, tmp_path)
    if "data.sources" in expected:
        expected["data.sources"] = tuple(s for s in setting(config, "data.sources"))
        assert [source.shards for source in config.data.sources or ()] == ["a", "b"]
    assert {key: setting(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("no_reshard", "offload", "base"),
    [(False, False, "zero3"), (True, False, "zero2"), (True, True, "zero3_offload")],
)
def test_fsdp_of_open_clip_4_becomes_a_zero_stage(
    no_reshard: bool, offload: bool, base: str
) -> None:
    flags = parse_flags(["--train-data", "x"])
    flags |= {"fsdp": True, "fsdp_no_reshard_after_forward": no_reshard}
    recipe = parse(translate(flags | {"fsdp_offload_cpu": offload}, 1), "the recipe")
    assert recipe["deepspeed"] == {"base": base}
    recipe = parse(translate(parse_flags(["--train-data", "x"]), 1), "the recipe")
    assert recipe["deepspeed"] == {"base": "zero1"}


def test_flag_without_counterpart_becomes_a_comment(tmp_path: Path) -> None:
    line = (
        "--local-loss --opt timm/adan --debug --image-interpolation random --val-data '{0..9}.tar'"
    )
    line += " --train-num-samples 640 --aug-cfg re_prob=0.2 --force-image-size 224 336"
    with pytest.raises(ValueError, match=r"model.image_size must be a valid integer"):
        load(f"--train-data x {line}", 1, tmp_path)
    _, text = load(f"--train-data x {line.rpartition(' --')[0]} --epochs-cooldown 2", 1, tmp_path)
    comments = [line for line in text.splitlines() if line.startswith("# ")]
    for words in (
        "--warmup 10000: optim.warmup_steps; ",
        "--local-loss: not needed",
        "--precision amp: deepspeed; bf16 autocast",
        "--opt timm/adan: optim.name; adamw",
        "--debug: not available",
        "--image-interpolation random: model.interpolation; bicubic",
        "--val-data {0..9}.tar: eval.validation; ",
        "--aug-cfg {'re_prob': 0.2}: ",
        "--epochs-cooldown 2: optim.cooldown_steps; ",
    ):
        assert any(comment.startswith(f"# {words}") for comment in comments), words


def test_columns_of_a_csv_are_used_for_training_and_validation(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(encode(noise(32, 32)))
    rows = [f"{number}.png,picture {number}" for number in range(4)]
    for name in ("train.csv", "val.csv"):
        (tmp_path / name).write_text("\n".join(["file,text", *rows]))
    flags = (
        f"--train-data {tmp_path / 'train.csv'} --val-data {tmp_path / 'val.csv'} --batch-size 4"
    )
    flags += " --csv-img-key file --csv-caption-key text --csv-separator ,"
    config, _ = load(flags, 1, tmp_path)
    (source,) = load_sources(config.data)
    assert source.num_samples == 4
    (images,) = load_sets(config.eval, config.data)
    assert images.name == "val"


def test_values_that_are_our_defaults_have_no_line(tmp_path: Path) -> None:
    flags = "--wd 0.2 --beta1 0.9 --beta2 0.98 --eps 1e-6 --seed 0 --model ViT-B-32 --warmup 2000"
    _, text = load(f"--train-data x {flags}", 1, tmp_path)
    assert yaml.safe_load(text) == {
        "name": "ViT-B-32",
        "global_batch": 64,
        "micro_batch": 64,
        "epochs": 32.0,
        "data": {"shards": "x", "workers": 4},
        "optim": {"lr": 5e-4},
        "checkpoint": {"every_epochs": 1.0},
        "log": {"every_steps": 100},
        "eval": {"every_epochs": 1.0},
        "deepspeed": {"base": "zero1"},
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--imagenet-val val --model RN50", "no --train-data; to evaluate a model, use disco-ds eval"),
        ("--train-data x --batch-size many", "argument --batch-size: invalid int value: 'many'"),
        ("--train-data x --new-flag 3", "open_clip [34].* unrecognized arguments: --new-flag 3"),
        ("--train-data x --aug-cfg scale", "--aug-cfg takes KEY=VALUE"),
        ("--train-data x --aug-cfg 'scale=(0.4'", "--aug-cfg takes KEY=VALUE"),
        ("--train-data x --model hf-hub:a/b", "`hf download a/b --local-dir FOLDER`, and pass --model"),
        ("--train-data x --lock-image --lock-text", "remove one of them"),
    ],
)  # fmt: skip
def test_line_that_cannot_be_translated_is_refused_in_one_line(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=words):
        translate(parse_flags(shlex.split(line)), 1)
    assert main(["from-open-clip", "--ranks", "1", "--", *shlex.split(line)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_example_of_the_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "from_open_clip.md").read_text(encoding="utf-8")
    command, recipe = (
        page.split("```yaml\n")[0].rpartition("```\ndisco-ds ")[2].replace("\\\n", ""),
        page.split("```yaml\n")[1],
    )
    words = shlex.split(command.partition("\n```")[0].partition(" > ")[0])
    assert main(words) == 0
    assert capsys.readouterr().out == recipe.partition("```")[0]


def test_run_without_checkpoint_or_evaluation_before_its_end_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = ["checkpoint.every_steps=2000", "eval.every_steps=1250"]
    assert main(["train", "--config", "quickstart", "--dry-run", *overrides]) == 0
    printed = capsys.readouterr().err
    for words in ("no checkpoint", overrides[0], "no eval is due", overrides[1]):
        assert words in printed
