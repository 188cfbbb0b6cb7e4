"""The validation loss on all ranks equals that of a plain loop. Also: image folders named after their classes."""

import logging
from pathlib import Path

import pytest
import torch
from open_clip import SimpleTokenizer
from PIL import Image
from torch.nn import functional as F

from disco_ds.config import DataSettings, EvalSettings, ModelSettings
from disco_ds.data import ImageSpec, load_manifest, read_all, resolve_shards
from disco_ds.distributed import comm
from disco_ds.eval import Encoder, Result, evaluate_sets, load_sets, record
from disco_ds.models.clip import build_model, build_tokenizer
from helpers.dist import run_ranks
from helpers.shards import make_sample, write_shards
from helpers.towers import BPE_SIZE, IMAGE_SIZE, write_tiny

SHARDS, CAPTION = "bundled:emoji/unseen", "{json[caption]}"
DATA = DataSettings(shards=SHARDS, image_key="png")


def losses(model_file: str, batch: int) -> tuple[Result, list[float]]:
    """Return the result of all ranks, and the loss and accuracies that a plain loop over whole batches gives."""
    torch.manual_seed(0)
    settings = ModelSettings(name=model_file, token_embedding_std=1.0)
    model = build_model(settings, initial_scale=20.0).eval()
    tokenize, spec = build_tokenizer(settings, model), ImageSpec((IMAGE_SIZE, IMAGE_SIZE))
    sets = EvalSettings(validation={"pairs": SHARDS}, validation_batch=batch, caption_key=CAPTION)
    (found,) = evaluate_sets(Encoder(model, spec, tokenize, 16), load_sets(sets, DATA))
    samples = list(read_all(load_manifest(resolve_shards(SHARDS)), DATA, spec, 0, 1, CAPTION))
    total, hits, num = 0.0, [0, 0], 0
    with torch.no_grad():
        for start in range(0, len(samples) - min(batch, len(samples)) + 1, batch):
            part = samples[start : start + batch]
            image = model(image=torch.stack([picture for picture, _, _ in part]))[0].double()
            text = model(text=tokenize([caption for _, caption, _ in part]))[1].double()
            logits, labels = 20 * image @ text.T, torch.arange(len(part))
            total += (
                len(part)
                * float(F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels))
                / 2
            )
            for way, side in enumerate((logits, logits.T)):
                hits[way] += int((side.argmax(dim=1) == labels).sum())
            num += len(part)
    assert found.counts == {"num_pairs": num, "num_broken": 0}
    return found, [total / num, hits[0] / num, hits[1] / num]


SLOW = [pytest.param(1, 40, marks=pytest.mark.slow), pytest.param(2, 4096, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("size", "batch"), [(3, 40), *SLOW])
def test_validation_loss_is_that_of_a_plain_loop_at_any_number_of_ranks(
    size: int, batch: int, tmp_path: Path
) -> None:
    for found, plain in run_ranks(losses, size, write_tiny(tmp_path, BPE_SIZE), batch):
        named = min(batch, found.counts["num_pairs"])
        expected = zip(("loss", "i2t", "t2i"), plain, strict=True)
        assert record([found]) == {
            f"eval/pairs_{kind}_at_{named}": pytest.approx(value, rel=1e-5)
            for kind, value in expected
        }


def test_validation_pairs_may_be_a_csv_with_open_clips_columns(tmp_path: Path) -> None:
    """The training data are shards, whose image and caption settings do not fit the csv."""
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    rows = "".join(f"{number}.png\tpicture {number}\n" for number in range(3))
    (tmp_path / "val.csv").write_text(f"filepath\ttitle\n{rows}")
    sets = EvalSettings(
        validation={"pairs": str(tmp_path / "val.csv")}, retrieval={"r": str(tmp_path / "val.csv")}
    )
    for found in load_sets(sets, DATA):
        read = list(read_all(found.source, found.data, ImageSpec((4, 4)), 0, 1, found.text))
        assert [(int(picture[0, 0, 0]), caption) for picture, caption, _ in read] == [
            (number, f"picture {number}") for number in range(3)
        ]
    named = EvalSettings(validation={"pairs": str(tmp_path / "val.csv")}, caption_key="{text}")
    with pytest.raises(
        ValueError,
        match=r"^eval\.validation\.pairs: .* no column text; its columns: filepath, title.*eval\.caption_key",
    ):
        load_sets(named, DATA)


class ByColor(torch.nn.Module):
    """A model that matches perfectly if the red channel of an image is the number with which its caption begins."""

    def forward(
        self, image: torch.Tensor | None = None, text: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        number = image[:, 0, 0, 0] if image is not None else text  # type: ignore[index]
        return [F.one_hot(number.long(), 12).float()] * 2 + [torch.full([1], 100.0)] * 2


def evaluate_table(folder: Path) -> list[Result]:
    sets = EvalSettings(
        validation={"v": str(folder / "five.csv")}, retrieval={"r": str(folder / "five.csv")}
    )

    def tokenize(texts: list[str]) -> torch.Tensor:
        return torch.tensor([int(text.partition(" ")[0] or 0) for text in texts])

    encoder = Encoder(ByColor(), ImageSpec((4, 4)), tokenize, 4)
    return evaluate_sets(encoder, load_sets(sets, DATA))


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_rows_of_a_csv_with_the_same_path_are_one_image(tmp_path: Path, size: int) -> None:
    for number in range(12):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    rows = [
        (number, words) for words in ("", "seen", "shown", "drawn", "again") for number in range(12)
    ]
    lines = [f"{'./' * (not words)}{number}.png\t{number} {words}\n" for number, words in rows]
    # If a row has no caption, only that row is lost. An image that is missing in several rows counts once.
    lines += ["3.png\t\n", "none.png\t0\n", "none.png\t1\n", "4.png\t4\ttoo many\n"]
    (tmp_path / "five.csv").write_text("filepath\ttitle\n" + "".join(lines))
    for retrieval, validation in run_ranks(evaluate_table, size, tmp_path):
        assert retrieval.counts == {"num_images": 12, "num_texts": 60, "num_broken": 2}
        assert {retrieval.values[f"{way}_r1"] for way in ("i2t", "t2i")} == {1.0}
        assert validation.counts == {"num_pairs": 12, "num_broken": 2}
        assert validation.values["i2t_at_12"] == 1.0


def test_identical_captions_and_images_are_all_right_answers(tmp_path: Path) -> None:
    """Images 0 and 1 share a caption, images 2 and 3 their pixels. A line break does not divide a caption."""
    for number, color in enumerate((0, 1, 2, 2)):
        Image.new("RGB", (8, 8), (color, 0, 0)).save(tmp_path / f"{number}.png")
    rows = ["0.png,0 a title", "1.png,0 a title", '2.png,"2 two', 'lines"', "3.png,2 three"]
    (tmp_path / "five.csv").write_text("\n".join(["filepath,title", *rows]))
    (retrieval,) = [x for x in evaluate_table(tmp_path) if x.name == "r"]
    assert retrieval.counts == {"num_images": 4, "num_texts": 4, "num_broken": 0}
    # Image 1 is red 1, but both of its captions begin with 0: it ties with no caption of its own.
    assert retrieval.values["t2i_r1"] == 1.0
    assert retrieval.values["i2t_r1"] == 0.75


def test_caption_with_half_a_surrogate_pair_is_evaluated(tmp_path: Path) -> None:
    """JSON may contain such a text; the tokenizers of open_clip accept it."""
    caption = b'{"caption": "1 \\ud83d"}'
    write_shards(tmp_path, [2], lambda index, _: make_sample(1) | {"json": caption})
    sets = EvalSettings(retrieval={"r": str(tmp_path)}, caption_key=CAPTION)

    def tokenize(texts: list[str]) -> torch.Tensor:
        return torch.tensor([int(text[:1] or 0) for text in texts])

    encoder = Encoder(ByColor(), ImageSpec((4, 4)), tokenize, 4)
    (found,) = evaluate_sets(encoder, load_sets(sets, DATA))
    assert found.values["i2t_r1"] == 1.0


def test_labeled_csv_is_classified_and_needs_no_groups(tmp_path: Path) -> None:
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    rows = "".join(f"{number}.png,{number} word\n" for number in (0, 1, 2, 2))
    (tmp_path / "val.csv").write_text(f"filepath,category\n{rows}none.png,0 word\n0.png,\n")
    sets = EvalSettings(labeled={"x": str(tmp_path / "val.csv")}, label_key="{category}")
    data = DATA.model_copy(update={"group_by": "{product}"})

    def tokenize(texts: list[str]) -> torch.Tensor:
        return torch.tensor([int(text.partition(" ")[0] or 0) for text in texts])

    encoder = Encoder(ByColor(), ImageSpec((4, 4)), tokenize, 4)
    (found,) = evaluate_sets(encoder, load_sets(sets, data))
    assert found.counts == {"num_classes": 3, "num_images": 4, "num_broken": 2}
    assert (found.values["top1"], found.values["chance"]) == (1.0, pytest.approx(1 / 3))


class Norm(torch.nn.Module):
    """Two towers that share one batch normalization and have nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(
        self, image: torch.Tensor | None = None, text: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        rows = image.float().mean(dim=(2, 3)) if image is not None else text[:, :3].float()  # type: ignore[index]
        return [F.normalize(self.norm(rows), dim=1)] * 2 + [torch.ones(1)] * 2


def losses_with_statistics(batch: int) -> float:
    model = Norm()
    generator = torch.Generator().manual_seed(comm.rank())
    model.norm.running_mean = 100 * torch.rand(3, generator=generator)  # differs between ranks
    sets = EvalSettings(validation={"pairs": SHARDS}, validation_batch=batch, caption_key=CAPTION)
    tokenize = SimpleTokenizer(context_length=8)
    (found,) = evaluate_sets(Encoder(model, ImageSpec((8, 8)), tokenize, 16), load_sets(sets, DATA))
    return found.values[f"loss_at_{batch}"]


def test_statistics_of_batch_normalization_are_rank_0s() -> None:
    """A checkpoint contains the statistics of rank 0. So its evaluation equals the one during the run."""
    alone = losses_with_statistics(40)
    assert run_ranks(losses_with_statistics, 2, 40) == pytest.approx([alone] * 2, rel=1e-5)


def test_sub_folders_named_after_their_classes_are_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("tabby_cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "0.png")
    with caplog.at_level(logging.WARNING):
        (found,) = load_sets(EvalSettings(labeled={"pets": str(tmp_path)}), DATA)
    assert found.classes == {"dog": "dog", "tabby_cat": "tabby cat"}
    assert "eval.labeled.pets" in caplog.text
    assert "dog ... tabby_cat" in caplog.text
