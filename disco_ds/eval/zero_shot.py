"""Zero-shot classification: assign each image to the class with the nearest text."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.eval.encode import Encoder, ImageSet, gather_rows
from disco_ds.eval.results import Example, Result

NUM_EXAMPLES = 24
"""Maximum number of example images in the result. They are spaced evenly over the set."""


@dataclass(frozen=True)
class LabeledSet(ImageSet):
    """Images with labels, for zero-shot classification."""

    classes: dict[str, str]
    """Label -> class name. The names of all labels are possible answers."""
    templates: tuple[str, ...]
    """Prompts with {} in place of the class name."""

    def evaluate(self, encoder: Encoder) -> Result:
        """Compute the accuracy. Collective.

        The values are top1 and top5, recall (top-1 accuracy of each class, averaged over the classes),
        and chance (top-1 accuracy of a random guess). Classes that are as near as the true class
        are ranked before it.
        """
        names = list(self.classes.values())
        class_of = {label: number for number, label in enumerate(self.classes)}
        texts = encoder.encode_classes(names, self.templates)
        # For each image: its class, and the rank of its class, counted from 1, among all classes.
        outcomes = list[Tensor]()
        examples = dict[int, Example]()
        every = math.ceil(self.source.num_samples / NUM_EXAMPLES)
        for features, samples in encoder.encode_images(self):
            numbers = [class_of[label] for _, label, _ in samples]
            target = torch.tensor(numbers, dtype=torch.int64, device=features.device)
            scores = features @ texts.T
            own = scores.gather(1, target[:, None])
            outcomes.append(torch.stack([target, (scores >= own).sum(dim=1)], 1))
            best = scores.topk(min(3, len(names)), dim=1).indices.tolist()
            for (image, label, index), nearest in zip(samples, best, strict=True):
                # Examples are chosen by sample id, so that they do not depend on the number of ranks.
                if index % every == 0:
                    pixels = image.permute(1, 2, 0).numpy()
                    best_names = [names[number] for number in nearest]
                    examples[index] = Example(pixels, self.classes[label], best_names)
        classes, ranks = gather_rows(torch.cat(outcomes)).cpu().T
        top1, top5 = (ranks <= 1).double(), (ranks <= 5).double()
        # Classes without a readable image have no recall; they remain possible predictions.
        recalls = [top1[classes == number].mean() for number in classes.unique()]
        values = {
            "top1": top1.mean().item(),
            "top5": top5.mean().item(),
            "recall": torch.stack(recalls).mean().item(),
            "chance": 1 / len(names),
        }
        counts = {
            "num_classes": len(names),
            "num_images": len(top1),
            "num_broken": self.source.num_samples - len(top1),
        }
        shown = sorted(item for part in comm.gather_objects(examples) for item in part.items())
        return Result("zero-shot", self.name, values, counts, [example for _, example in shown])
