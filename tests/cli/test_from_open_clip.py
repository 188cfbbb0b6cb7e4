"""`disco-ds from-open-clip` with the command lines of open_clip's README and scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from open_clip_train.params import get_default_params, parse_args

from disco_ds.cli.from_open_clip import count_ranks, translate
from disco_ds.cli.main import main
from disco_ds.config import load_config
from disco_ds.config.open_clip_flags import read_words

ONE_GPU = """python -m training.main \\
    --save-frequency 1 \\
    --zeroshot-frequency 1 \\
    --report-to tensorboard \\
    --train-data="/path/to/train_data.csv"  \\
    --val-data="/path/to/validation_data.csv"  \\
    --csv-img-key filepath \\
    --csv-caption-key title \\
    --imagenet-val=data/imagenet/val/ \\
    --warmup 10000 \\
    --batch-size=128 \\
    --lr=1e-3 \\
    --wd=0.1 \\
    --epochs=30 \\
    --workers=8 \\
    --model RN50
"""
FOUR_GPUS = """cd open_clip/src
torchrun --nproc_per_node 4 -m training.main \\
    --train-data '/data/cc12m/cc12m-train-{0000..2175}.tar' \\
    --train-num-samples 10968539 \\
    --dataset-type webdataset \\
    --batch-size 320 \\
    --precision amp \\
    --workers 4 \\
    --imagenet-val /data/imagenet/validation/
"""
SLURM = """#!/bin/bash -x
#SBATCH --nodes=32
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=6
export MASTER_PORT=12802
srun --cpu_bind=v --accel-bind=gn python -u src/training/main.py \\
    --save-frequency 1 \\
    --report-to tensorboard \\
    --train-data="/data/LAION-400M/{00000..41455}.tar" \\
    --warmup 2000 \\
    --batch-size=256 \\
    --epochs=32 \\
    --workers=8 \\
    --model ViT-B-32 \\
    --name "ViT-B-32-Vanilla" \\
    --seed 0 \\
    --local-loss \\
    --gather-with-grad
"""
SCRIPT = """# 64k batchsize for 2.048e-3 lr
TORCH_CUDNN_V8_API_ENABLED=1 torchrun --nproc_per_node 8 -m open_clip_train.main \\
    --save-frequency 1 --save-most-recent --zeroshot-frequency 1 \\
    --train-data '/path/to/laion' --dataset-type webdataset \\
    --lr "2.048e-3" --beta1 0.9 --beta2 0.95 --warmup 782 --wd 0.2 --batch-size 4096 \\
    --aug-cfg scale='(0.4, 1.0)' color_jitter='(0.32, 0.32, 0.32, 0.08)' color_jitter_prob=0.8 gray_scale_prob=0.2 \\
    --epochs=7 --workers=6 --model ViT-H-14-CLIPA --precision 'amp_bf16' --local-loss --gather-with-grad \\
    --force-image-size 224 --grad-checkpointing --log-every-n-steps 32 --seed 0 --logs ./logs/ \\
    --imagenet-val '/path/to/ImageNet/val' --name 'name' --report-to "wandb" --wandb-project-name "project_name"
"""


@pytest.mark.parametrize(
    "rest", ["2>&1 | tee log.txt", "> log.txt 2>&1 &", "&& echo done", "; exit"]
)
def test_what_follows_the_flags_belongs_to_the_shell(rest: str) -> None:
    line = "--train-data a.tar --batch-size 256"
    assert translate(f"{line} {rest}", 1) == translate(line, 1)


def test_distillation_becomes_a_teacher() -> None:
    line = "--train-data a.tar --distill-model ViT-L-14 --distill-pretrained openai"
    assert yaml.safe_load(translate(line, 1))["teacher"] == {
        "model": "ViT-L-14",
        "pretrained": "openai",
        "weight": 0.5,
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            ONE_GPU,
            {"epochs": 30, "global_batch": 128, "data.image_key": "filepath", "optim.eps": 1e-8},
        ),
        (
            FOUR_GPUS,
            {
                "samples": 32 * 10968539,
                "global_batch": 1280,
                "checkpoint.every_steps": 8570,
                "eval.every_steps": 17139,
            },
        ),
        (
            SLURM,
            {
                "epochs": 32,
                "global_batch": 32768,
                "name": "ViT-B-32-Vanilla",
                "optim.betas": (0.9, 0.98),
            },
        ),
        (
            SCRIPT,
            {
                "global_batch": 32768,
                "data.crop_scale": (0.4, 1.0),
                "data.augment.color_jitter": (0.32, 0.32, 0.32, 0.08),
                "model.image_size": 224,
                "model.activation_checkpointing": True,
                "log.wandb.project": "project_name",
            },
        ),
    ],
    ids=["one-gpu", "four-gpus", "slurm", "script"],
)
def test_recipe_of_a_line_of_open_clip_starts(
    line: str, expected: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["from-open-clip", line]) == 0
    path = tmp_path / "recipe.yaml"
    path.write_text(capsys.readouterr().out)
    config = load_config(path)
    for key, value in expected.items():
        found: object = config
        for name in key.split("."):
            found = getattr(found, name)
        assert found == value, key
    overrides = ["log.wandb.project=null"]
    assert main(["train", "--config", str(path), "--dry-run", *overrides]) == 0
    assert "warning: no " not in capsys.readouterr().err


def test_flag_without_counterpart_becomes_a_comment() -> None:
    text = translate(
        "--train-data x --local-loss --precision amp --opt timm/adan --new-flag 3 --debug"
    )
    comments = [line for line in text.splitlines() if line.startswith("#")]
    for flag in (
        "--local-loss:",
        "--precision amp:",
        "--opt timm/adan:",
        "--new-flag 3:",
        "--debug:",
        "add --ranks N",
    ):
        assert any(flag in comment for comment in comments), flag


def test_batch_length_and_intervals_follow_from_the_number_of_gpus(tmp_path: Path) -> None:
    line = "--train-data a::b --train-num-samples 1000000 --epochs 4 --batch-size 100 --accum-freq 2 --save-frequency 2"
    (tmp_path / "a.yaml").write_text(translate(line, ranks=5))
    config = load_config(tmp_path / "a.yaml")
    assert (config.global_batch, config.micro_batch, config.samples) == (1000, 100, 4_000_000)
    assert config.checkpoint.every_steps == 2000
    assert [source.shards for source in config.data.sources or ()] == ["a", "b"]
    # open_clip's default is 10,000 warmup steps, so it would also warm up for all 4,000 steps.
    assert config.optim.warmup_steps == 4000


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 22 -m ", 176),
        ("#SBATCH --nodes=4\nsrun torchrun --nproc-per-node=8 --nnodes $N -m ", 32),
        ("#SBATCH -N 2\n#SBATCH --gres=gpu:a100:4\nsrun python ", 8),
        ("srun -n 6 python ", 6),
        ("CUDA_VISIBLE_DEVICES=1 python3 -m ", 1),
        ("srun python ", None),
        ("", None),
    ],
)
def test_number_of_gpus_is_that_of_the_launcher(launcher: str, ranks: int | None) -> None:
    assert count_ranks(launcher) == ranks


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--train-data x --batch-size $BATCH", r"\$BATCH"),
        (
            "python -m training.main --imagenet-val val --model RN50 --pretrained a.pt",
            "disco-ds eval RN50 --weights a.pt eval.labeled.imagenet=val",
        ),
        ("--train-data x --batch-size many", "many"),
        ("--train-data 'x", "quotation"),
    ],
)
def test_line_that_cannot_be_translated_is_refused(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        translate(line)


def test_defaults_are_those_of_the_installed_open_clip() -> None:
    defaults = vars(parse_args([]))
    for name, row in read_words()["flags"].items():
        if "default" in row:
            assert row["default"] == defaults[name.replace("-", "_")], name
    assert get_default_params("RN50")["lr"] == get_default_params("ViT-B-32")["lr"]


def test_run_without_checkpoint_or_evaluation_before_its_end_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(
        [
            "train",
            "--config",
            "quickstart",
            "--dry-run",
            "checkpoint.every_steps=2000",
            "eval.every_steps=1250",
        ]
    )
    printed = capsys.readouterr().err
    for words in (
        "no checkpoint",
        "checkpoint.every_steps=2000",
        "no eval is due",
        "eval.every_steps=1250",
    ):
        assert words in printed
