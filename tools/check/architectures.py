"""Train, evaluate and export small versions of open_clip's architectures.

    python -m tools.check.architectures                            eight architectures, 10 minutes on two CPU cores
    python -m tools.check.architectures ViT-B-32 convnext_base     only these architectures
    PYTHONPATH=open_clip/src python -m tools.check.architectures   use open_clip from a checkout, for example of 4.2

Each architecture is trained for one step of four emoji at ZeRO 1, evaluated on the bundled set emoji/unseen, and
exported for open_clip and for transformers. The text tower has two layers, and so has the image tower if its config
contains a single number of layers. A tokenizer from the Hugging Face hub is replaced by a small local one, and the
vocabulary by that tokenizer's. Otherwise the config is open_clip's.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import open_clip
import transformers
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

ARCHITECTURES = (
    "ViT-B-32",
    "ViT-B-16-SigLIP",
    "ViT-B-16-SigLIP2",
    "EVA02-B-16",
    "convnext_base",
    "RN50",
    "MobileCLIP-S1",
    "coca_ViT-B-32",
)
LAYERS = 2
WORDS = ("<pad>", "<eos>", "<unk>", "a", "red", "face", "cat")
RECIPE = {
    "name": "run",
    "global_batch": 4,
    "micro_batch": 2,
    "steps": 1,
    "data": {
        "shards": "bundled:emoji/train",
        "image_key": "png",
        "captions": {"{json[caption]}": 1},
        "workers": 0,
    },
    "optim": {"lr": 1.0e-4, "warmup_steps": 0},
    "eval": {
        "every_steps": 0,
        "labeled": {"emoji": "bundled:emoji/unseen"},
        "label_key": "{json[caption]}",
    },
    "deepspeed": {"base": "zero1", "torch_autocast": {"enabled": False}},
}


def write_tokenizer(folder: Path) -> str:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


def write_config(name: str, folder: Path) -> Path:
    """Write the config of an architecture with fewer layers and, if needed, a local tokenizer. Return its path."""
    config = copy.deepcopy(open_clip.get_model_config(name))
    text, vision = config["text_cfg"], config["vision_cfg"]
    text["layers"] = LAYERS
    if isinstance(vision.get("layers"), int):
        vision["layers"] = LAYERS
    if "hf_tokenizer_name" in text:
        text |= {
            "hf_tokenizer_name": write_tokenizer(folder / "tokenizer"),
            "vocab_size": len(WORDS),
        }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


def run(folder: Path, *words: object) -> str:
    """Run a disco-ds command in a folder. Return "ok", or its exit code and the last line of its error output."""
    command = [sys.executable, "-m", "disco_ds", *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if not done.returncode:
        return "ok"
    lines = done.stderr.strip().splitlines()
    return f"exit code {done.returncode}: {lines[-1] if lines else ''}"


def try_architecture(name: str, folder: Path) -> dict[str, str]:
    config = write_config(name, folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    loss = "siglip" if "SigLIP" in name else "disco_fused"
    words = ("--config", "recipe.yaml", f"model.name={config}", f"loss.name={loss}")
    found = {"train": run(folder, "train", *words)}
    if found["train"] == "ok":
        found["eval"] = run(folder, "eval", "runs/run")
        for form in ("open_clip", "transformers"):
            found[form] = run(folder, "export", "runs/run", "--to", form, "--format", form)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=ARCHITECTURES)
    args = parser.parse_args()
    print(f"open_clip {open_clip.__version__}")
    for name in args.names:
        with tempfile.TemporaryDirectory() as folder:
            for command, result in try_architecture(name, Path(folder)).items():
                print(f"{name:18} {command:13} {result}", flush=True)


if __name__ == "__main__":
    main()
