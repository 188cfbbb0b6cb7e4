"""Evaluation sets in common layouts."""

from pathlib import Path

from helpers.shards import encode, noise, write_tar

WNIDS = {"n01440764": "tench", "n01443537": "goldfish", "n01484850": "great white shark"}


TEMPLATES = ["a photo of a {c}.", "{}, drawn"]


def write_folder(folder: Path) -> Path:
    """Write three classes in ImageNet's layout: one without images, and some with unusual or broken images."""
    for wnid in WNIDS:
        (folder / wnid).mkdir(parents=True)
    first, second, _ = (folder / wnid for wnid in WNIDS)
    noise(90, 41).save(first / "wide.JPEG")
    noise(33, 80).convert("L").save(first / "gray.png")
    noise(40, 40).convert("RGBA").save(first / "alpha.png")
    noise(50, 37).save(second / "a.webp")
    noise(64, 64).save(second / "b.bmp")
    (second / "broken.jpg").write_bytes(encode(noise(40, 40), "JPEG")[:-300])
    (second / "notes.txt").write_text("not an image")
    return folder


def write_benchmark(folder: Path, captions: list[list[str]] | None) -> Path:
    """Write two shards in clip_benchmark's webdataset layout, with labels 0 to 2 or with captions."""
    (folder / "test").mkdir(parents=True)
    members: list[list[tuple[str, bytes]]] = [[], []]
    for number in range(len(captions) if captions else 7):
        text = ("txt", "\n".join(captions[number])) if captions else ("cls", str(number % 3))
        part = members[number % 2]
        part += [
            (f"s{number}.{text[0]}", text[1].encode()),
            (f"s{number}.webp", encode(noise(40 + number, 50), "WEBP")),
        ]
    for number, part in enumerate(members):
        write_tar(folder / "test" / f"{number}.tar", part)
    (folder / "test" / "nshards.txt").write_text("2\n")
    if captions:
        (folder / "dataset_type.txt").write_text("retrieval")
    else:
        (folder / "classnames.txt").write_text("red\ngreen\nblue\nnever seen\n")
        (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))
    return folder


CAPTIONS = [
    [f"image {n}", f"number {n} again", "the same words everywhere"][: 1 + n % 3] for n in range(11)
]
