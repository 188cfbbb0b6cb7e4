"""Draw a sheet of images from a data set, with their captions.

    python tools/contact_sheet.py bundled:emoji/train --out sheet.png
    python tools/contact_sheet.py bundled:emoji/{train,validation,unseen} --group '{json[vendor]}' --out docs/emoji.png

The images are selected only by their position, evenly spaced. The n samples of a group are numbered from 0 in the order
of the shards, and the samples i * n // count are shown for i = 0 ... count - 1. With --shift k, the k-th sample after
each of them is shown instead; after the last sample of the group, counting continues with the first.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from torchvision.transforms.functional import to_pil_image

from disco_ds.config import DataSettings
from disco_ds.data import ImageSpec, Manifest, load_manifest, read_all, read_labels, resolve_shards

COLUMNS, WIDTH, LINES, LINE = 12, 120, 3, 14
"""Images per row; minimum width of a cell in pixels; maximum lines of a caption; height of a line in pixels."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", nargs="+", help="folders of shards, or bundled:<set>")
    parser.add_argument("--out", type=Path, required=True, help="the PNG to write")
    parser.add_argument("--count", type=int, default=12, help="images per group (default: 12)")
    parser.add_argument(
        "--shift",
        type=int,
        default=0,
        help="show the sample SHIFT positions after each selected one (default: 0)",
    )
    parser.add_argument(
        "--group", default="all", help="template to group the samples by, e.g. {json[vendor]}"
    )
    parser.add_argument(
        "--caption", default="{txt}", help="template of the caption (default: {txt})"
    )
    parser.add_argument(
        "--image-key", default="jpg;jpeg;png;webp", help="extension of the image's member"
    )
    parser.add_argument(
        "--size", type=int, default=64, help="side of an image in pixels (default: 64)"
    )
    return parser.parse_args()


def choose(manifest: Manifest, args: argparse.Namespace) -> dict[int, str]:
    """Choose the samples to show. Return a dictionary: sample id -> title of the sample's group."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(read_labels(manifest, args.group)):
        groups[group or "no group"].append(index)
    chosen = {}
    for group, ids in sorted(groups.items()):
        count = min(args.count, len(ids))
        title = (
            f"{group}: {count} of {len(ids):,}"
            if args.group != "all"
            else f"{count} of {len(ids):,}"
        )
        chosen |= {
            ids[(i * len(ids) // count + args.shift) % len(ids)]: title for i in range(count)
        }
    return chosen


def read_blocks(shards: str, args: argparse.Namespace) -> dict[str, list[tuple[Image.Image, str]]]:
    """Read the samples to show. Return the title of each group with its images and captions."""
    manifest = load_manifest(resolve_shards(shards))
    chosen = choose(manifest, args)
    settings = DataSettings(shards=shards, image_key=args.image_key)
    blocks: dict[str, list[tuple[Image.Image, str]]] = {title: [] for title in chosen.values()}
    for image, caption, index in read_all(
        manifest, settings, ImageSpec((args.size, args.size)), 0, 1, args.caption
    ):
        if index in chosen:
            blocks[chosen[index]].append((to_pil_image(image), caption))
    return {f"{shards}, {title}": block for title, block in blocks.items()}


def draw(blocks: dict[str, list[tuple[Image.Image, str]]], size: int) -> Image.Image:
    """Draw all blocks, one below the other. Captions are cut after LINES lines."""
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    small, bold = (
        ImageFont.truetype(str(fonts / name), 11)
        for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")
    )
    width, height = max(WIDTH, size + 8), size + LINES * LINE + 12
    rows = [-(-len(block) // COLUMNS) for block in blocks.values()]
    sheet = Image.new("RGB", (COLUMNS * width, sum(rows) * height + len(blocks) * 24), "white")
    pen, top = ImageDraw.Draw(sheet), 0
    for (title, block), count in zip(blocks.items(), rows, strict=True):
        pen.rectangle((0, top, sheet.width, top + 19), fill="#e6e6e6")
        pen.text((6, top + 3), title, "black", bold)
        top += 24
        for place, (image, caption) in enumerate(block):
            left, line = place % COLUMNS * width, top + place // COLUMNS * height
            sheet.paste(image, (left + (width - size) // 2, line))
            words = textwrap.wrap(
                " ".join(caption.split()), int(width / 6.5), max_lines=LINES, placeholder=" …"
            )
            for number, text in enumerate(words):
                pen.text(
                    (left + width // 2, line + size + 3 + number * LINE),
                    text,
                    "black",
                    small,
                    anchor="ma",
                )
        top += count * height
    return sheet


def main() -> int:
    args = parse_args()
    blocks: dict[str, list[tuple[Image.Image, str]]] = {}
    try:
        for shards in args.shards:
            blocks |= read_blocks(shards, args)
        draw(blocks, args.size).save(args.out, optimize=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {sum(map(len, blocks.values()))} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
