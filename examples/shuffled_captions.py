"""Stages for `data.transforms` that give 30% of the bundled training images the caption of another image.

They make wrong pairs, to see what a filter by similarity is worth (docs/data.md, "Keep the best pairs"):

    disco-ds train --config quickstart data.transforms=examples.shuffled_captions:stages
"""

import json
import random
import tarfile
from pathlib import Path
from typing import Any

import webdataset as wds

import disco_ds

SHARE = 0.3
FIELDS = ("caption", "keywords")


def stages() -> list[Any]:
    """Return one stage. Which samples get another caption, and which one, depends on the sample's key alone."""
    captions = read_captions()

    def shuffle(sample: dict[str, Any]) -> dict[str, Any]:
        draw = random.Random(sample["__key__"])
        if draw.random() < SHARE:
            fields = json.loads(sample["json"])
            fields.update(zip(FIELDS, draw.choice(captions), strict=True))
            sample["json"] = json.dumps(fields).encode()
        return sample

    return [wds.map(shuffle)]


def read_captions() -> list[tuple[str, str]]:
    """Return the caption and the keywords of every bundled training image."""
    captions = []
    for shard in sorted((Path(disco_ds.__file__).parent / "assets/emoji/train").glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                if member.name.endswith(".json"):
                    record = json.load(tar.extractfile(member))  # type: ignore[arg-type]
                    captions.append((record[FIELDS[0]], record[FIELDS[1]]))
    return captions
