"""Early signs of trouble: spikes of loss and gradient norm, the logit scale at its bound, collapsing features.

Pure rules on numbers that all ranks have alike, and the state they need, which checkpoints keep. What they stand on:
- Spikes. PaLM (Chowdhery et al. 2022, section 5.1) had some twenty loss spikes in spite of clipping, went on from a
  checkpoint about 100 steps before and skipped 200 to 500 batches; the same batches did no harm elsewhere. In CLIP's
  training loss spikes follow within 8 steps after gradients that AdamW's second moment underestimates (Wortsman et al.
  2023, arXiv 2304.13013), so the norm may tell earlier. Median and MAD rather than mean and standard
  deviation, because outliers hardly move them (Leys et al. 2013). That the MAD is that of changes from step to step, so
  that the fall of a loss is not taken for noise, is ours, and so are the window and the thresholds: the bundled
  quickstart stays below them.
- The scale. CLIP (Radford et al. 2021, section 2.5) holds it at 100 at most, because training was unstable otherwise.
  At the bound the temperature no longer learns: normal late in a run, a sign of trouble early.
- Collapse. Features that all point one way, or lie in few dimensions (Jing et al. 2022, arXiv 2110.09348). The mean
  cosine between samples shows the first. The effective rank shows both: exp of the entropy of the normalised singular
  values (Roy and Vetterli 2007); RankMe (Garrido et al. 2023) found that it goes with accuracy downstream. Values
  depend on the sample's size, so they are compared with the same run's best alone. That half of it is too little is
  our choice, and that the warm-up and the first WINDOW steps do not count: there the features draw together in healthy
  runs too.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from disco_ds.distributed import comm

SAMPLE = 128
"""Rows of the global batch whose features are looked at."""
WINDOW, HISTORY = 64, 24
"""Steps that a value is compared with, and the fewest that tell."""
DEVIATIONS = 8.0
"""How far above the median a spike is, in standard deviations as the MAD of the steps' changes estimates them."""
LOSS_RISE, NORM_FACTOR = 0.1, 4.0
"""The least rise of a spike of the loss over the median, as a part of it, and least factor of one of the norm."""
AT_BOUND = 0.98
"""Part of the bound at which the scale has reached it: bf16 weights round ln(100) to 98.9."""
TINY = 1e-30
"""In place of a norm of 0, which has no logarithm."""
KEPT = 0.5
"""Part of the run's best spread and effective rank, below which features collapse."""
logger = logging.getLogger(__name__)


class Trouble:
    """Looks at every step's loss and gradient norm, and at the records. Equal on all ranks; rank 0 writes.

    Args: note: writes values of a step, see Metrics.note; skip: spikes are to be skipped; max_scale: bound of the logit
          scale, or None where it is not learned; warmup_steps: records until then say nothing of collapse; state: of
          the checkpoint, or None.
    """

    def __init__(
        self,
        note: Callable[[int, dict[str, float]], None],
        skip: bool,
        max_scale: float | None,
        warmup_steps: int,
        state: Mapping[str, Any] | None = None,
    ):
        self.note, self.skip, self.max_scale, self.warmup_steps = note, skip, max_scale, warmup_steps
        state = state or {"recent": {}, "best": {}, "known": []}
        self.recent = {name: deque(state["recent"].get(name, ()), WINDOW) for name in ("loss", "grad_norm")}
        self.best: dict[str, float] = dict(state["best"])
        self.known = set(state["known"])
        """Signs of trouble at the last look, which are not reported again."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, which JSON keeps to the bit."""
        recent = {name: list(values) for name, values in self.recent.items()}
        return {"recent": recent, "best": dict(self.best), "known": sorted(self.known)}

    def spikes(self, name: str, step: int, value: float) -> bool:
        """Look at the loss or gradient norm of the batch for this step. Returns: True if it is to be skipped.

        Every value is kept, spikes too: a level that half of the window has is no spike, so no run skips on forever.
        """
        # The value is compared with those before it, then kept with them.
        recent = self.recent[name]
        message = describe_spike(value, recent, by_factor=name == "grad_norm")
        recent.append(value)
        if message:
            message += "; the batch is skipped" if self.skip else ""
            message = f"{name.replace('grad_', 'gradient ')} {message}"
            self._report(f"{name}_spike", step, value, message, again=self.skip)
        self._forget(f"{name}_spike", message)
        return bool(message) and self.skip

    def norm_spikes(self, step: int, norm: Tensor) -> bool:
        """Look at the gradient norm, 0-d, before its update. Collective where spikes are skipped. See `spikes`."""
        # Ranks sum the norm up in other orders. A value at the threshold must not be skipped by some of them only.
        value = (comm.all_reduce_max(norm) if self.skip else norm).item()
        return math.isfinite(value) and self.spikes("grad_norm", step, value)

    def look(self, record: Mapping[str, Any]) -> None:
        """Look at the scale and the features of a record."""
        step, scale = record["step"], record["scale"]
        if self.max_scale is not None:
            high = scale >= AT_BOUND * self.max_scale
            if high:
                message = f"the logit scale, {scale:.4g}, has reached its bound model.max_scale ({self.max_scale:g})"
                self._report("scale_at_bound", step, scale, message)
            self._forget("scale_at_bound", high)
        if step <= max(self.warmup_steps, WINDOW):
            return
        for side in ("image", "text"):
            cosine, rank = record[f"{side}_cosine"], record[f"{side}_rank"]
            spread = {f"{side}_spread": 1 - cosine, f"{side}_rank": rank}
            self.best |= {key: max(value, self.best.get(key, value)) for key, value in spread.items()}
            low = any(value < KEPT * self.best[key] for key, value in spread.items())
            if low:
                most = self.best[f"{side}_rank"]
                message = (
                    f"the {side} features collapse: mean cosine {cosine:.3f} between samples (at least "
                    f"{1 - self.best[f'{side}_spread']:.3f} so far), effective rank {rank:.1f} (at most {most:.1f})"
                )
                self._report(f"{side}_collapse", step, rank, message)
            self._forget(f"{side}_collapse", low)

    def _report(self, sign: str, step: int, value: float, message: str, again: bool = False) -> None:
        """Log and note a sign, once for as long as it goes on, or `again`."""
        if sign in self.known and not again:
            return
        self.known.add(sign)
        self.note(step, {f"trouble/{sign}": value})
        if comm.rank() == 0:
            logger.warning("step %d: %s", step, message)

    def _forget(self, sign: str, there: Any) -> None:
        if not there:
            self.known.discard(sign)


def describe_spike(value: float, recent: Sequence[float], by_factor: bool) -> str:
    """What makes a value a spike among the recent ones, of steps one after another; empty if it is none.

    Args: by_factor: compare logarithms, because the noise of a gradient norm is one of factors.
    """
    if len(recent) < HISTORY:
        return ""
    *before, now = (math.log(max(x, TINY)) for x in (*recent, value)) if by_factor else (*recent, value)
    median = statistics.median(before)
    changes = [after - first for first, after in pairwise(before)]
    middle = statistics.median(changes)
    # A change is a difference of two values, with sqrt(2) times the noise of one.
    deviation = 1.4826 * statistics.median(abs(change - middle) for change in changes) / math.sqrt(2)
    least = math.log(NORM_FACTOR) if by_factor else LOSS_RISE * abs(median)
    if not now - median > max(DEVIATIONS * deviation, least):
        return ""
    return f"{value:.4g} is far above the median of the last {len(recent)} steps, {statistics.median(recent):.4g}"


def features_spread(image: Tensor, text: Tensor) -> dict[str, Tensor]:
    """Mean cosine between samples and effective rank of both sides' features, 0-d each, the same on every rank.

    Collective. Args: image, text: SAMPLE unit rows of this rank, or as many as it has; of all ranks together as many
    are taken, which are the global batch's first whatever the number of ranks.
    """
    own = max(SAMPLE // comm.size(), 1)
    sides = comm.gather(torch.stack([image[:own], text[:own]], 1).float()).unbind(1)
    values = {}
    for side, rows in zip(("image", "text"), sides, strict=True):
        n = len(rows)
        mean = rows.mean(0)
        values[f"{side}_cosine"] = (n * mean.square().sum() - 1) / max(n - 1, 1)
        values[f"{side}_rank"] = effective_rank(rows)
    return values


def effective_rank(rows: Tensor) -> Tensor:
    """exp of the entropy of the singular values' shares, 0-d. Source: Roy and Vetterli 2007, RankMe equation 1."""
    # The singular values are the roots of the eigenvalues of the [n, n] products, which are sooner there.
    singular = torch.linalg.eigvalsh(rows.double() @ rows.double().T).clamp(min=0).sqrt()
    return torch.special.entr(singular / singular.sum()).sum().exp()
