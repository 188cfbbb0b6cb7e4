"""The teacher of a run, whose features are soft targets for the loss. docs/teachers.md shows its use."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.config.recipe import TeacherSettings
from disco_ds.data import MicroBatch
from disco_ds.data.stored import StoredEmbeddings
from disco_ds.eval.model import in_precision
from disco_ds.losses import Teacher
from disco_ds.models.clip import Texts, read_preprocessing

PROBES = ["a photo of a cat", "Zwei Katzen, 100% schwarz!", "\u732b" * 50, "word " * 200]
"""Two tokenizers count as the same if they return the same tokens for these texts."""


class FrozenTeacher:
    """Computes a frozen model's features of a micro-batch.

    Args:
        model: A model from build_model in fp32, on this rank's device. It is converted to the precision of the run.
        tokenizer: The model's tokenizer.
        precision: Precision of the run: autocast, bf16, fp16 or fp32. The logit scale and the logit bias stay in fp32.
        description: For the log: the model's name, and which parts of its towers use this package's faster versions or
            are compiled.
        identity: The values that must stay the same when the run is resumed.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        precision: str,
        description: str,
        identity: dict[str, Any],
    ):
        self.scale = model.logit_scale.detach().float().exp()
        self.bias = None if model.logit_bias is None else model.logit_bias.detach().float()
        self.model = in_precision(model, precision).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.description, self.identity = description, identity
        self.size = tuple(read_preprocessing(model).size)

    @torch.no_grad()
    def __call__(self, image: Tensor, text: Texts, batch: MicroBatch) -> list[Teacher]:
        """Compute the features of a micro-batch.

        Args:
            image: [m, 3, H, W], the augmented images of m samples that the student sees. They are uint8 from 0 to 255,
                or floats from 0 to 1. This method resizes them, and the model normalizes them.
            text: The student's tokens.
            batch: The micro-batch. It contains teacher_text, the teacher's tokens, if the teacher's tokenizer differs
                from the student's.
        """
        if image.shape[2:] != self.size:
            pixels = image / 255 if image.dtype == torch.uint8 else image
            image = F.interpolate(pixels, self.size, mode="bicubic", antialias=True).clamp_(0, 1)
        if "teacher_text" in batch:
            text = Texts(batch["teacher_text"], None)
        rows, texts, *_ = self.model(image=image, **text._asdict())
        return [Teacher(rows, texts, self.scale, self.bias)]


class StoredTeacher:
    """Returns features of one or several teachers that were computed before training and stored with the samples.

    Args:
        settings: Settings of the teachers (TeacherSettings).
        stored: Names of the fields of a sample that contain the embeddings, and the embeddings' width.
        device: The device of the teachers' scale and bias.
    """

    description = "stored embeddings"

    def __init__(self, settings: TeacherSettings, stored: StoredEmbeddings, device: torch.device):
        self.stored = stored
        self.widths = list(settings.widths or (stored.width,))
        self.scales = [torch.tensor([scale], device=device) for scale in settings.scales]
        bias = settings.bias
        self.bias = None if bias is None else torch.tensor([bias], device=device)
        self.identity = settings.model_dump(mode="json", exclude={"model", "pretrained"})
        self.identity |= {"widths": self.widths}

    def __call__(self, image: Tensor, text: Texts, batch: MicroBatch) -> list[Teacher]:
        """Return each teacher's features of a micro-batch, as unit rows. Only `batch` is used."""
        images = batch["image_embedding"].split(self.widths, 1)
        texts = batch["text_embedding"].split(self.widths, 1)
        return [
            Teacher(F.normalize(image), F.normalize(text), scale, self.bias)
            for image, text, scale in zip(images, texts, self.scales, strict=True)
        ]


RunTeacher = FrozenTeacher | StoredTeacher


def are_equal(tokenizer: Any, other: Any) -> bool:
    """Return whether two tokenizers return the same tokens for PROBES."""
    return torch.equal(tokenizer(PROBES), other(PROBES))
