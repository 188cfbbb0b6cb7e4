"""Rebuild the bundled emoji data set, byte for byte, from seven pinned npm packages.

It draws the emoji of six vendors at 64 x 64 pixels. The caption of each image is the Unicode label of the emoji.
Duplicates and blank images are removed. The other images are split into train, validation and unseen, and written to
tar shards with manifests. ATTRIBUTION.md names the authors and licenses. Training does not need this tool, because the
package contains the shards. The tool needs resvg-py and, without --packages, npm.

    python -m tools.make.emoji [--packages DIR] [--out DIR]
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from PIL import Image
from tqdm import tqdm

SIZE = 64
NUM_UNSEEN = 155
NUM_SHARDS = {"train": 24, "validation": 4, "unseen": 4}
DRAWN_WITH = {"resvg-py": "0.5.0", "pillow": "13.0.0"}
LABELS = ("emojibase-data", "17.0.0")
HELD_OUT = "fluent-emoji-flat"
# Vendor -> version of @iconify-json/<vendor>. If several vendors have the same drawing of an emoji, only the first
# vendor in this order contributes it.
VENDORS = {
    "noto": "1.2.9",
    "noto-v1": "1.2.5",
    "twemoji": "1.2.5",
    "emojione": "1.2.3",
    "fxemoji": "1.2.2",
    HELD_OUT: "1.2.6",
}


def read_table(text: str) -> dict[str, str]:
    """Parse pairs `label = icon name`, separated by semicolons. The name "-" means that there is no icon."""
    return dict(pair.strip().split(" = ") for pair in text.split(";"))


# Label -> icon name, for vendors whose packages do not map code points to icons. These icons cannot be found by the
# current label, because CLDR has renamed the emoji or because the label matches an icon of something else.
OLDER_NAMES = read_table("""bullseye = direct-hit; cricket = -; enraged face = pouting-face; robot = robot-face;
    face with crossed-out eyes = dizzy-face; flag: Türkiye = flag-for-turkey; keycap: # = keycap-pound;
    heart exclamation = heavy-heart-exclamation; keycap: * = keycap-asterisk; UP! button = up-text-button;
    men holding hands = two-men-holding-hands; person in suit levitating = man-in-suit-levitating;
    person with skullcap = man-with-chinese-cap; person with veil = bride-with-veil; water pistol = -;
    person: blond hair = blond-haired-person; red exclamation mark = exclamation-mark;
    red question mark = question-mark; smiling face with open hands = hugging-face;
    woman and man holding hands = man-and-woman-holding-hands; women holding hands = two-women-holding-hands""")
# Label -> icon name of fxemoji, where the Unicode name would find a different drawing. For example, fxemoji's icon
# "cat" shows a cat's face, and its icon "pistol" shows a gun.
FXEMOJI_NAMES = read_table("""cat = catside; cat face = cat; dog = dogside; dog face = dog; dragon = dragonside;
    dragon face = dragonhead; keyboard = wiredkeyboard; kiss = couplekiss; kissing face = kiss;
    laptop = oldpersonalcomputer; leopard = leopardside; mouse = mouseside; mouse face = mouse; pig = pigside;
    pig face = pig; rabbit = bunnyside; rabbit face = bunny; tiger = tigerside; tiger face = tiger; water pistol = -""")
ATTRIBUTION_HEAD = """# Attribution of the bundled emoji images

The images are drawings by the vendors below, each under its own licence. They were changed: the vector drawings were
rasterised to 64 x 64 pixels on white and reduced to 64 colours; skin tones, duplicates and blank images were left out.
Each sample's JSON names its vendor and licence (SPDX). Captions, keywords and groups come from emojibase-data (MIT);
they were put into lower case. Neither the vendors nor emojibase endorse this project.
The text of the Apache License 2.0 is the LICENSE of this project, that of the MIT License stands at the end.
`tools/make/emoji.py` rebuilds the files, this one included, and says how.

| vendor | work | author | licence | npm package |
|---|---|---|---|---|"""
ATTRIBUTION_MIT = """## MIT License

Copyright (c) Microsoft Corporation (fluent-emoji-flat)
"""


@dataclass(frozen=True)
class Sample:
    """One image with its caption. `png` is the content of the PNG file; the other fields are written to a JSON file."""

    png: bytes
    vendor: str
    licence: str
    label: str
    caption: str
    keywords: str
    group: str
    subgroup: str
    hexcode: str

    def order(self) -> str:
        """Return the hash that orders the samples, the same on every machine."""
        return hashlib.sha256(f"{self.vendor}/{self.hexcode}".encode()).hexdigest()

    def members(self, key: str) -> dict[str, bytes]:
        """Return the names and contents of the three files that a shard contains for this sample."""
        fields = {name: value for name, value in vars(self).items() if name != "png"}
        fields |= {"key": key, "width": SIZE, "height": SIZE}
        text = json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return {
            f"{key}.json": text.encode(),
            f"{key}.png": self.png,
            f"{key}.txt": self.caption.encode(),
        }


def read_package(folder: Path, name: str, version: str) -> dict[str, bytes]:
    """Read a packed npm package.

    Returns:
        The JSON files that this tool uses and the license: path inside the package -> content.

    Raises:
        ValueError: If the file is missing or contains a different package.
    """
    path = folder / f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"
    if not path.exists():
        raise ValueError(
            f"no {path.name} in {folder}; create it with `npm pack {name}@{version}`, or omit --packages"
        )
    pattern = re.compile(r"package/((en/data|meta/[\w-]+|\w+)\.json|LICENSE)")
    with tarfile.open(path) as tar:
        opened = (
            (member.name, tar.extractfile(member))
            for member in tar
            if pattern.fullmatch(member.name)
        )
        files = {inside.removeprefix("package/"): file.read() for inside, file in opened if file}
    found = json.loads(files["package.json"])
    if (found["name"], found["version"]) != (name, version):
        raise ValueError(
            f"{path} contains {found['name']} {found['version']}, expected {name} {version}"
        )
    return files


def plain(text: str) -> str:
    """Return the text in lower case with straight quotation marks."""
    return text.lower().translate(str.maketrans("\u2019\u201c\u201d", '\'""'))


def slug(label: str) -> str:
    """Return the icon name that most vendors' packages use for the emoji with this label."""
    text = (
        unicodedata.normalize("NFKD", label.lower().replace("&", "and"))
        .encode("ascii", "ignore")
        .decode()
    )
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def without_selector(hexcode: str) -> str:
    """Return a hexcode in upper case without the variation selector FE0F, which only some vendors include."""
    return hexcode.upper().replace("-FE0F", "")


def find_icon(
    icons: dict[str, Any], chars: dict[str, str], entry: dict[str, Any], unicode_name: str
) -> str | None:
    """Find a vendor's icon of an emoji, by its code points or by a present or past name.

    Args:
        icons: The vendor's icons.json.
        chars: Hexcode without variation selector -> icon name; empty for some vendors.
        entry: The emoji, an entry of emojibase-data.
        unicode_name: Name of the emoji in the Unicode standard.

    Returns:
        The name of the icon, or None if the vendor has no icon of the emoji.
    """
    label, is_fxemoji = entry["label"], icons["prefix"] == "fxemoji"
    told = chars.get(without_selector(entry["hexcode"])) or (
        FXEMOJI_NAMES if is_fxemoji else OLDER_NAMES
    ).get(label)
    if told:
        names = [told]
    elif is_fxemoji:
        names = [slug(name).replace("-", "") for name in (unicode_name, label)]
    else:
        older = slug(re.sub(r"\bcat\b", "cat face", re.sub(r" \(.+\)", "", label)))
        flag = older.removeprefix("flag-")
        names = [slug(label), older, f"flag-for-{flag}", f"flag-for-flag-{flag}"]
    known = icons["icons"].keys() | icons.get("aliases", {}).keys()
    return next((name for name in names if name in known), None)


def make_svg(icons: dict[str, Any], name: str) -> str | None:
    """Return an icon as a complete SVG; None if the icon is hidden or uses a style sheet that the package lacks."""
    alias = icons.get("aliases", {}).get(name, {})
    icon = icons["icons"][alias.get("parent", name)]
    body = icon["body"]
    if icon.get("hidden") or (" class=" in body and "<style" not in body):
        return None
    assert alias.keys() <= {"parent", "hFlip"}, (
        f"make_svg does not support the alias {name}: {alias}"
    )
    left, top = icon.get("left", 0), icon.get("top", 0)
    width, height = (icon.get(side, icons.get(side, 16)) for side in ("width", "height"))
    if alias.get("hFlip"):
        body = f'<g transform="translate({2 * left + width} 0) scale(-1 1)">{body}</g>'
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {spaces} width="{SIZE}" height="{SIZE}" viewBox="{left} {top} {width} {height}">{body}</svg>'


def render(svg: str) -> bytes | None:
    """Render an SVG on white as a PNG with 64 x 64 pixels and at most 64 colors. Return None if nothing is visible."""
    from resvg_py import svg_to_bytes  # only this function needs it

    drawn = svg_to_bytes(svg_string=svg, background="#ffffff", skip_system_fonts=True)
    image = Image.open(io.BytesIO(bytes(drawn))).convert("RGB")
    if numpy.asarray(image).min() > 240:
        return None
    image = image.quantize(64, method=Image.Quantize.MEDIANCUT, kmeans=2, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def draw_vendor(vendor: str, files: dict[str, bytes], labels: dict[str, bytes]) -> list[Sample]:
    """Draw every emoji that this vendor has an icon of.

    Components (skin tones, hair styles and regional indicator letters) are left out.
    """
    icons, chars, info = (json.loads(files[f"{name}.json"]) for name in ("icons", "chars", "info"))
    chars = {without_selector(code): name for code, name in chars.items()}
    unicode_names, names = (
        json.loads(labels[f"meta/{name}.json"]) for name in ("unicode-names", "groups")
    )
    licence = info["license"]["spdx"]
    samples = []
    for entry in tqdm(json.loads(labels["en/data.json"]), desc=vendor, unit="emoji"):
        label, code = entry["label"], entry["hexcode"]
        group = names["groups"].get(str(entry.get("group")), "component")
        # Components only modify other emoji. They are skin tones, hair styles and regional indicator letters.
        if group == "component":
            continue
        icon = find_icon(icons, chars, entry, unicode_names.get(without_selector(code), ""))
        svg = make_svg(icons, icon) if icon else None
        if svg and (png := render(svg)):
            keywords, subgroup = (
                plain(", ".join(entry["tags"])),
                names["subgroups"][str(entry["subgroup"])],
            )
            samples.append(
                Sample(png, vendor, licence, label, plain(label), keywords, group, subgroup, code)
            )
    return samples


def drop_duplicates(samples: list[Sample]) -> list[Sample]:
    """Remove duplicate images.

    If identical images have the same label, the first one is kept. If they have different labels, none is kept.
    """
    same: dict[bytes, list[Sample]] = defaultdict(list)
    for sample in samples:
        same[Image.open(io.BytesIO(sample.png)).convert("RGB").tobytes()].append(sample)
    return [alike[0] for alike in same.values() if len({sample.label for sample in alike}) == 1]


def split(samples: list[Sample]) -> dict[str, list[Sample]]:
    """Divide the samples into the splits train, validation and unseen.

    Validation and unseen contain only images of the vendor HELD_OUT. The training split contains images of every label
    in validation, and no image of a label in unseen.
    """
    trained = {sample.label for sample in samples if sample.vendor != HELD_OUT}
    held_out = [
        sample for sample in samples if sample.vendor == HELD_OUT and sample.label in trained
    ]
    # Sort the labels by group and take every n-th one, so that each group contributes in proportion to its size.
    ordered = sorted(
        held_out, key=lambda s: (s.group, hashlib.sha256(s.label.encode()).hexdigest())
    )
    unseen = {ordered[i * len(ordered) // NUM_UNSEEN].label for i in range(NUM_UNSEEN)}
    return {
        "train": [s for s in samples if s.vendor != HELD_OUT and s.label not in unseen],
        "validation": [s for s in held_out if s.label not in unseen],
        "unseen": [s for s in held_out if s.label in unseen],
    }


def write_shards(samples: list[Sample], folder: Path, num_shards: int) -> None:
    """Replace the shards and manifest.json in a folder.

    The samples are sorted by hash. The numbers of samples in two shards differ by at most one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.tar"):
        old.unlink()
    ordered = sorted(samples, key=Sample.order)
    shards = []
    for number in range(num_shards):
        path, dealt = folder / f"{number:05d}.tar", ordered[number::num_shards]
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for index, sample in enumerate(dealt):
                for name, content in sample.members(f"{number:05d}{index:04d}").items():
                    info = tarfile.TarInfo(name)  # default metadata: mtime, uid and gid are 0
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        shards.append({"name": path.name, "samples": len(dealt), "bytes": path.stat().st_size})
    (folder / "manifest.json").write_text(
        json.dumps({"version": 1, "shards": shards}, indent=1) + "\n", "utf-8"
    )


def attribution(packages: dict[str, dict[str, bytes]], splits: dict[str, list[Sample]]) -> str:
    """Return the text of ATTRIBUTION.md: authors, licenses, changes, and the number of images per vendor and split."""
    counts = Counter(
        (name, sample.vendor) for name, samples in splits.items() for sample in samples
    )
    lines = [ATTRIBUTION_HEAD]
    for vendor, version in VENDORS.items():
        info = json.loads(packages[vendor]["info.json"])
        author, licence = info["author"], info["license"]
        edition = f", edition {info['version']}" if "version" in info else ""
        lines.append(
            f"| {vendor} | {info['name']}{edition} | {author['name']}, <{author['url']}> "
            f"| [{licence['spdx']}]({licence['url']}) | `@iconify-json/{vendor}` {version} |"
        )
    lines += [
        "",
        "## Images per vendor and split",
        "",
        "| vendor | train | validation | unseen |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {vendor} | " + " | ".join(str(counts[name, vendor]) for name in splits) + " |"
        for vendor in VENDORS
    ]
    lines += ["| all | " + " | ".join(str(len(samples)) for samples in splits.values()) + " |", ""]
    mit = packages[LABELS[0]]["LICENSE"].decode().split("\n\n", 2)
    lines += [ATTRIBUTION_MIT, mit[1] + f" ({LABELS[0]})", "", mit[2].strip(), ""]
    return "\n".join(lines)


def main() -> None:
    """Read the packages, draw the images, split them, and write the shards and ATTRIBUTION.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--packages", type=Path, help="folder with the packed npm packages (default: run npm pack)"
    )
    default = Path(__file__).resolve().parents[2] / "disco_ds" / "assets" / "emoji"
    parser.add_argument(
        "--out",
        type=Path,
        default=default,
        help="folder to write to (default: disco_ds/assets/emoji)",
    )
    args = parser.parse_args()
    if importlib.util.find_spec("resvg_py") is None:
        parser.error(f"resvg-py is not installed; pip install resvg-py=={DRAWN_WITH['resvg-py']}")
    for name, version in DRAWN_WITH.items():
        if (found := importlib.metadata.version(name)) != version:
            print(
                f"{name} is {found}, the bundled files were made with {version}: bytes may differ",
                file=sys.stderr,
            )
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.packages or Path(temporary)
        if args.packages is None:
            names = [f"@iconify-json/{vendor}@{version}" for vendor, version in VENDORS.items()] + [
                "@".join(LABELS)
            ]
            subprocess.run(
                ["npm", "pack", "--silent", "--pack-destination", temporary, *names], check=True
            )
        packages = {
            vendor: read_package(folder, f"@iconify-json/{vendor}", VENDORS[vendor])
            for vendor in VENDORS
        }
        packages[LABELS[0]] = read_package(folder, *LABELS)
    drawn = [
        s for vendor in VENDORS for s in draw_vendor(vendor, packages[vendor], packages[LABELS[0]])
    ]
    samples = drop_duplicates(drawn)
    splits = split(samples)
    for name, part in splits.items():
        write_shards(part, args.out / name, NUM_SHARDS[name])
        print(
            f"{name}: {len(part)} images, {len({s.label for s in part})} labels in {NUM_SHARDS[name]} shards"
        )
    (args.out / "ATTRIBUTION.md").write_text(attribution(packages, splits), "utf-8")
    print(
        f"{len(drawn)} drawn, {len({s.label for s in drawn})} labels, {len(drawn) - len(samples)} duplicates dropped"
    )


if __name__ == "__main__":
    main()
