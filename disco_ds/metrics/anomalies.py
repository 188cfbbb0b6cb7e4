"""Detect loss and gradient-norm spikes, and feature collapse.

The rules use only numbers that are equal on all ranks, and a state that is saved in checkpoints.
Rationale:
- Spikes. PaLM (Chowdhery et al. 2022, section 5.1) had about twenty loss spikes in spite of
  gradient clipping. It restarted from a checkpoint about 100 steps before each spike and skipped
  200 to 500 batches; the same batches caused no spike elsewhere in the run. In CLIP training, a
  loss spike follows up to 8 steps after gradients that are too large for AdamW's estimate of the
  second moment (Wortsman et al. 2023, arXiv 2304.13013), so the gradient norm may show it earlier.
  The rules use median and MAD (median absolute deviation) instead of mean and standard deviation
  because outliers hardly move them (Leys et al. 2013). Our own choices are the window, the
  thresholds, and taking the MAD of the changes between steps, so that a steadily falling loss does
  not count as noise. The bundled quickstart stays below all thresholds.
- Collapse. All features point in one direction, or they occupy few dimensions (Jing et al. 2022,
  arXiv 2110.09348). The mean cosine between samples shows the first case. The effective rank shows
  both: it is exp of the entropy of the normalized singular values (Roy and Vetterli 2007), and
  RankMe (Garrido et al. 2023) found that it correlates with downstream accuracy. Both values depend
  on the sample size, so they are compared only with the best values of the same run. We chose the
  threshold, half of the best value. We also chose to ignore the warmup and the first WINDOW steps,
  because the features move closer together there in healthy runs too.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from disco_ds.distributed import comm

SAMPLE = 128
"""Number of rows of the global batch whose features are examined."""
WINDOW = 64
"""Number of previous steps that a value is compared with."""
MIN_HISTORY = 24
"""No spike is reported before this many steps have been seen."""
MIN_DEVIATIONS = 8.0
"""A spike exceeds the median by at least this many standard deviations.

The standard deviation is estimated from the MAD of the changes between steps.
"""
MIN_LOSS_RISE = 0.1
"""A loss spike exceeds the median by at least this fraction of the median."""
MIN_NORM_FACTOR = 4.0
"""A gradient-norm spike is at least this multiple of the median."""
TINY = 1e-30
"""Replaces a gradient norm of 0, which has no logarithm."""
COLLAPSED = 0.5
"""Features count as collapsed if their spread (1 - mean cosine) or effective rank is below this fraction of its best
value in the run."""

EQUAL_FEATURES = 1e-6
"""Unit features whose elements differ by less than this are equal up to rounding."""
MAX_EQUAL_TEXTS = 0.01
"""Largest allowed fraction of different texts with equal features."""
EQUAL_TEXTS = (
    "of the captions have the same text features as another caption although their tokens differ, so the model cannot "
    "tell them apart: does text_cfg.pool_type fit the end token of the tokenizer, and text_cfg.vocab_size its tokens?"
)
"""End of an error message. The caller writes the percentage of these captions in front of it."""


class AnomalyDetector:
    """Checks the loss and the gradient norm of every step, and the features of every log record.

    The state is equal on all ranks. Only rank 0 logs warnings.

    Args:
        write_values: Writes values of a step; see MetricsLogger.write_values.
        skip: Whether batches that cause a spike are skipped.
        warmup_steps: Records up to this step, or up to step WINDOW if that is later, are not checked for collapse.
        state: State from a checkpoint, or None.
    """

    def __init__(
        self,
        write_values: Callable[[int, dict[str, float]], None],
        skip: bool,
        warmup_steps: int,
        state: dict[str, Any] | None = None,
    ):
        self.write_values = write_values
        self.skip = skip
        self.warmup_steps = warmup_steps
        empty = {"recent": {"loss": [], "grad_norm": []}, "best": {}, "known": []}
        self.state: dict[str, Any] = state or empty
        """Plain values, which JSON stores exactly.

        recent: The last WINDOW losses and gradient norms.
        best: The best spread and effective rank so far.
        known: Names of the anomalies that were present at their last check. `_update` does not report them again,
            unless `repeat` is set.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state."""
        return copy.deepcopy(self.state)

    def check_spike(self, name: str, step: int, value: float) -> bool:
        """Check the loss or gradient norm of one batch.

        The value of a spike is added to the window too. If values stay high, they stop counting as
        spikes once they fill half of the window, so a run never skips batches forever.

        Args:
            name: "loss" or "grad_norm".
            step: The step to report.
            value: The new value.

        Returns:
            True if the batch must be skipped.
        """
        recent = self.state["recent"][name]
        message = ""
        if value > find_limit(recent, by_factor=name == "grad_norm"):
            message = (
                f"{name.replace('grad_', 'gradient ')} {value:.4g} is far above the median of the "
                f"last {len(recent)} steps, {np.median(recent):.4g}"
            )
            if self.skip:
                message += "; the batch is skipped"
        recent[:] = [*recent, value][-WINDOW:]
        self._update(f"{name}_spike", step, value, message, repeat=self.skip)
        return bool(message) and self.skip

    @property
    def max_norm(self) -> float | None:
        """The highest gradient norm that is not a spike; None if batches that cause a spike are not skipped."""
        return find_limit(self.state["recent"]["grad_norm"], by_factor=True) if self.skip else None

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Check the features in a log record."""
        step = record["step"]
        if step <= max(self.warmup_steps, WINDOW):
            return
        best = self.state["best"]
        for side in ("image", "text"):
            rank, message = record[f"{side}_rank"], ""
            for name, value in (("spread", 1 - record[f"{side}_cosine"]), ("rank", rank)):
                key = f"{side}_{name}"
                best[key] = max(value, best.get(key, value))
                if value < COLLAPSED * best[key]:
                    fall = f"{name} has fallen from {best[key]:.3g} to {value:.3g}"
                    message = f"the {side} features collapse: their {fall}"
            self._update(f"{side}_collapse", step, rank, message)

    def _update(
        self, anomaly: str, step: int, value: float, message: str, repeat: bool = False
    ) -> None:
        """Report an anomaly when it begins.

        Args:
            anomaly: Name of the anomaly.
            step: The step that was checked.
            value: The value to record.
            message: The warning to log; an empty string if the anomaly is absent.
            repeat: Whether to report the anomaly at every check at which it is present.
        """
        known = self.state["known"]
        if message and (repeat or anomaly not in known):
            self.write_values(step, {f"anomaly/{anomaly}": value})
            comm.warn(f"step {step}: {message}")
        if anomaly in known:
            known.remove(anomaly)
        if message:
            known.append(anomaly)


def find_limit(recent: Sequence[float], by_factor: bool) -> float:
    """Return the highest value that is not far above the values of the previous steps.

    Args:
        recent: The values of consecutive previous steps.
        by_factor: Whether to compare logarithms. Use this for gradient norms, whose noise is multiplicative.

    Returns:
        The limit; infinity if there are fewer than MIN_HISTORY values.
    """
    if len(recent) < MIN_HISTORY:
        return math.inf
    values = np.log(np.maximum(recent, TINY)) if by_factor else np.array(recent)
    median = np.median(values)
    changes = np.diff(values)
    mad = np.median(abs(changes - np.median(changes)))
    # A change is the difference of two values, so its noise is sqrt(2) times that of a value.
    deviation = 1.4826 * mad / math.sqrt(2)
    least = math.log(MIN_NORM_FACTOR) if by_factor else MIN_LOSS_RISE * abs(median)
    limit = median + max(MIN_DEVIATIONS * deviation, least)
    return float(np.exp(limit) if by_factor else limit)


def share_of_equal_texts(tokens: Tensor, features: Tensor) -> Tensor:
    """Return how often the text tower maps two different texts to equal features.

    Each text is compared with the previous one in the batch.

    Args:
        tokens: int64, a row for each text.
        features: Unit rows, one for each text.

    Returns:
        Of the compared pairs with different tokens, the fraction with equal features: 0-d fp32. 0 without such pairs.
    """
    differs = (tokens[1:] != tokens[:-1]).any(dim=1)
    is_equal = (features[1:] - features[:-1]).abs().amax(dim=1) < EQUAL_FEATURES
    return (differs & is_equal).sum() / differs.sum().clamp(min=1)


def features_spread(image: Tensor, text: Tensor) -> dict[str, Tensor]:
    """Compute the mean cosine between samples and the effective rank, for image features and for text features.

    Collective: every rank must call this. All ranks together contribute up to SAMPLE rows. These are the
    first rows of the global batch, for any number of ranks.

    Args:
        image: This rank's first SAMPLE unit rows, or all of them if there are fewer.
        text: The text features of the same samples, unit rows.

    Returns:
        `image_cosine`, `image_rank`, `text_cosine` and `text_rank`, 0-d, the same on every rank.
    """
    share = max(SAMPLE // comm.size(), 1)
    sides = comm.gather(torch.stack([image[:share], text[:share]], 1).float())[:SAMPLE].unbind(1)
    values = {}
    for side, rows in zip(("image", "text"), sides, strict=True):
        n = len(rows)
        values[f"{side}_cosine"] = (n * rows.mean(0).square().sum() - 1) / max(n - 1, 1)
        values[f"{side}_rank"] = effective_rank(rows)
    return values


def effective_rank(rows: Tensor) -> Tensor:
    """Compute the effective rank, 0-d: exp of the entropy of the singular values after scaling them to a sum of 1.

    Source: Roy and Vetterli 2007; RankMe, equation 1.
    """
    # The eigenvalues of the [n, n] products are the squared singular values, and faster to compute.
    rows = rows.double().contiguous()
    singular = torch.linalg.eigvalsh(rows @ rows.T).clamp(min=0).sqrt()
    return torch.special.entr(singular / singular.sum()).sum().exp()
