"""FastCLIP and related losses, which keep an estimate of each sample's softmax denominator between batches.

The six losses are presets of one loss. They differ in objective, temperature and the schedule of gamma, the weight of
the current batch in the estimate. The tiles are computed as in `disco_fused`, but the loss and its gradient are
computed from the row and column sums by other formulas. Source: FastCLIP (arXiv 2407.01445), docs/losses.md section 6.
"""

# b local batch, B global = N b, D width, N ranks; h_ij = <I_i, T_j> - <I_i, T_i>; tau = 1 / scale
# g_i = mean of exp(h_ij / tau_i) over the B - 1 samples j other than i; u_i moving average of g_i;
# A [2, b] tensor has the values of the row anchors, then those of the column anchors.

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.losses.base import Embeddings, LossOutput, count_hits, global_metrics, register_loss
from disco_ds.losses.blocks import (
    Gathered,
    TiledLoss,
    add_pairs,
    assign_sides,
    check_shift,
    inner_product,
    overflow_shift,
    pair_cosines,
)
from disco_ds.losses.kernels.tiles import full_dtype
from disco_ds.losses.sample_state import Memory, SampleState, TauStep

GammaSchedule = Literal["constant", "cosine", "fractional"]


class FastCLIPLoss(TiledLoss):
    """The mean of tau_i (log(eps + u_i) + rho) over all image and text anchors i.

    u_i is a moving average of g_i, the softmax denominator of anchor i, and includes this batch. For the gradient,
    log(eps + u_i) is replaced by g_i / (eps + u_i), in which u_i is a constant. `fastclip_v0` omits the factor tau_i.
    rho is 0 except in presets with an option `rho`.

    Args:
        gamma: Schedule of gamma, the weight of the current batch in u. "constant": 1 in the first epoch, then
            gamma_min. "cosine": falls from 1 to gamma_min along a cosine over gamma_epochs epochs, changing once per
            epoch. "fractional": the same cosine, but gamma changes at every step. None: the preset's schedule.
        gamma_min: Final value of gamma. None: 0.2 if gamma is constant or gamma_epochs is set; otherwise
            min(1, 4.177 E^-0.7265) in a run of E epochs, from FastCLIP's authors (README of DRRho-CLIP).
        gamma_epochs: Number of epochs until gamma reaches gamma_min. None: half of the run's epochs if gamma_min is
            set; otherwise all of them.
        eps: Added to u in the logarithm.
        tau: Initial temperature. None: the preset's value.
        memory: Where the per-sample state is stored: "device" or "host".
        options: Keyword arguments of TiledLoss.
    """

    weighs_by_tau: ClassVar[bool] = True
    """Whether the term of each anchor i in the loss is multiplied by its temperature tau_i."""
    default_gamma: ClassVar[GammaSchedule] = "cosine"
    default_tau: ClassVar[float] = 0.07
    learns_scale = False
    rho: float = 0.0
    tau_step: TauStep | None = None
    """Settings for learning the temperatures of each sample. None: all samples share one temperature."""

    def __init__(
        self,
        gamma: GammaSchedule | None = None,
        gamma_min: Annotated[float, Field(gt=0, le=1)] | None = None,
        gamma_epochs: Annotated[int, Field(ge=1)] | None = None,
        eps: Annotated[float, Field(ge=0)] = 1e-14,
        tau: Annotated[float, Field(gt=0)] | None = None,
        memory: Memory = "device",
        **options: Any,
    ):
        super().__init__(**options)
        self.gamma_schedule = gamma or self.default_gamma
        self.gamma_min = gamma_min
        self.gamma_epochs: float | None = gamma_epochs
        self.eps = eps
        self.tau = self.default_tau if tau is None else tau
        self.initial_scale = 1 / self.tau
        self.memory: Memory = memory
        self.state: SampleState | None = None

    def set_num_samples(self, num_samples: int, run_samples: int) -> None:
        """Create the per-sample state.

        Raises:
            ValueError: If the samples have not been counted.
        """
        if not num_samples:
            raise ValueError(
                f"{type(self).__name__} keeps state for every sample, so data.index must not be none"
            )
        if self.gamma_schedule == "constant" or self.gamma_epochs is not None:
            self.gamma_min = self.gamma_min or 0.2
        elif self.gamma_min is not None:
            self.gamma_epochs = max(run_samples // (2 * num_samples), 1)
        else:
            self.gamma_epochs = max(run_samples / num_samples, 1.0)
            self.gamma_min = min(1.0, 4.177 * self.gamma_epochs**-0.7265)
        self.state = SampleState(num_samples, self.memory, self.tau_step, self.group)

    def current_gamma(self) -> float:
        """Return gamma for the next batch, given the number of samples committed so far."""
        state = self._state()
        epoch = state.samples / state.num_samples
        if self.gamma_schedule != "fractional":
            epoch = state.samples // state.num_samples
        assert self.gamma_min is not None
        if self.gamma_schedule == "constant":
            return 1.0 if epoch == 0 else self.gamma_min
        assert self.gamma_epochs is not None
        remaining = (1 + math.cos(math.pi * min(epoch / self.gamma_epochs, 1.0))) / 2
        return self.gamma_min + (1 - self.gamma_min) * remaining

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss and stage the new state of the batch's samples. Collective."""
        state = self._state()
        if embeddings.index is None:
            raise ValueError(
                f"{type(self).__name__} needs sample ids: pass Embeddings(..., index=ids)"
            )
        b = len(embeddings.image)
        if b * comm.size(self.group) < 2:
            raise ValueError(
                "FastCLIP compares each sample with others: global_batch must be at least 2, got 1"
            )
        # The estimates of a sample are stored on the rank that owns its id.
        held = state.fetch(embeddings.index)  # [b, 2] each: image anchors, text anchors
        rows, columns, swap = assign_sides(embeddings)
        if self.tau_step is not None:
            leaf = held["tau"].detach().requires_grad_()
            leaf.register_hook(lambda gradient: state.stage("tau_gradient", gradient))
            tau = (leaf.flip(1) if swap else leaf).T
        else:
            tau = embeddings.scale.double().reciprocal()
        log_u = (held["log_u"].flip(1) if swap else held["log_u"]).T
        gamma = self.current_gamma()
        loss, log_u, *hits = _FastCLIP.apply(rows, columns, tau, log_u, gamma, self)
        state.stage("log_u", log_u.flip(0).T if swap else log_u.T)
        if swap:
            hits.reverse()
        metrics = global_metrics(loss, hits, b, self.group) | {"gamma": torch.tensor(gamma)}
        if self.tau_step is not None:
            total = comm.all_reduce_sum(held["tau"].mean(), self.group)
            metrics["tau"] = total / comm.size(self.group)
        return LossOutput(loss, metrics)

    def commit(self) -> None:
        """Apply the per-sample state that the last forward staged."""
        self._state().commit()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of the samples that this rank owns.

        Raises:
            ValueError: If another module calls this to build its own state_dict. The result could not be loaded.
        """
        if args or kwargs:
            raise ValueError(
                f"{type(self).__name__} cannot be a part of another module's state_dict, because each rank keeps the "
                "state of different samples; save the loss.state_dict() of every rank, and pass the list of all of "
                "them to load_state_parts"
            )
        return self._state().state_dict()

    def load_state_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        """Restore the per-sample state from a checkpoint, which may come from a different number of ranks."""
        self._state().load_parts(parts)

    def _state(self) -> SampleState:
        if self.state is None:
            raise ValueError(
                f"{type(self).__name__} keeps state for every sample: call set_num_samples first"
            )
        return self.state


class _FastCLIP(torch.autograd.Function):
    """The loss as a function of rows, columns and tau.

    tau is float64. Its shape is [1], or [2, b] if each anchor has a temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        tau: Tensor,
        log_u: Tensor,
        gamma: float,
        loss: FastCLIPLoss,
    ) -> tuple[Tensor, ...]:
        b = len(rows)
        group = loss.group
        cross = Gathered(columns, loss)
        rows, columns = cross.tiling.quantize(rows), cross.local
        cosines = pair_cosines(rows, columns, cross.tiling)
        scales = tau.reciprocal().expand(2, -1)
        column_scale = scales[1]
        shift: Tensor | None = None
        if len(tau) == 1:
            shift = overflow_shift(rows, columns, column_scale, group)
        else:
            column_scale = comm.gather(column_scale, group)
        of_tiles = scales[0], column_scale
        sums = cross.sums(rows, of_tiles, shift, loss.accuracy)
        # With a common shift, the sum of a row underflows if all similarities of the row are far below the bound from
        # which the shift is computed. In that case, subtract a separate maximum in each sum.
        others = torch.stack([sums.rows, sums.columns])
        if shift is not None and not check_shift(shift, others, group)():
            shift = None
            sums = cross.sums(rows, of_tiles, shift, loss.accuracy)
            others = torch.stack([sums.rows, sums.columns])
        x = scales * cosines
        # g is a mean: the sum of exp(logit - positive pair's logit), divided by the number of other samples.
        count = math.log(b * comm.size(group) - 1)
        # Update u to (1 - gamma) u + gamma g, in logarithms. A sample that is seen for the first time gets u = g.
        log_g = others - x - count
        log_kept = math.log1p(-gamma) if gamma < 1 else -math.inf
        updated = torch.logaddexp(log_u + log_kept, log_g + math.log(gamma))
        log_u = torch.where(log_u == -math.inf, log_g, updated)
        # log_sum is log(eps + u). The gradient treats it as a constant.
        log_eps = math.log(loss.eps) if loss.eps else -math.inf
        log_sum = torch.logaddexp(log_u, torch.full_like(log_u, log_eps))
        # The weight of entry (i, j), exp(logit_ij - shift_i), is the contribution of j to gamma g_i / (eps + u_i).
        # The weight is at most 1, as the tiles require, because u >= gamma g.
        shifts = x + count + log_sum - math.log(gamma)
        ctx.settings = cross, of_tiles, shift, gamma, loss
        ctx.save_for_backward(rows, columns, tau, cosines, others, shifts, log_sum)
        value = (log_sum + loss.rho) * tau if loss.weighs_by_tau else log_sum
        hits = [count_hits(*each) for each in zip(sums.maxima, x, scales, strict=False)]
        ctx.mark_non_differentiable(log_u, *hits)
        return (value.sum() / (2 * b)).to(full_dtype(rows)), log_u, *hits

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        rows, columns, tau, cosines, others, shifts, log_sum = ctx.saved_tensors
        _, needs_columns, needs_tau, *_ = ctx.needs_input_grad
        cross, scales, shift, gamma, loss = ctx.settings
        tiling = cross.tiling
        b = len(rows)
        moments = None
        if needs_tau and len(tau) == 2:
            moments = shifts.new_zeros(b), shifts.new_zeros(len(cross.columns))
        d_rows, d_columns = cross.gradient(rows, scales, shifts, shift, needs_columns, moments)
        # Every h_ij subtracts the positive pair's cosine, so the pair's weight is minus the sum of all other weights.
        weights = (others - shifts).exp()
        # The weights of the tiles contain gamma, so divide the factor by gamma.
        share = upstream.double() / (2 * b)
        factor = share / gamma if loss.weighs_by_tau else share / gamma / tau
        add_pairs(d_rows, columns, -weights.sum(0), factor, tiling)
        add_pairs(d_columns, rows, -weights.sum(0), factor, tiling)
        d_tau = None
        direct = log_sum + loss.rho if loss.weighs_by_tau else torch.zeros_like(log_sum)
        if moments is not None:
            # A sample's temperature is updated with the gradient of its own term only, so do not divide by the
            # number of terms, 2b, or multiply by the upstream gradient, which may contain a loss scale.
            of_columns = comm.all_reduce_sum(moments[1], loss.group)[cross.local_range]
            weighted = torch.stack([moments[0], of_columns]) / tiling.underflow_scale()
            weighted -= cosines * weights
            d_tau = direct - 1 / gamma * tau.reciprocal() * weighted
        elif needs_tau:
            # <rows, gradient of rows> is the sum of weight x h over all entries.
            d_tau = (share * direct).sum() - inner_product(rows, d_rows) / tau
        # Autograd converts gradients to the dtypes of the inputs, and ignores those not needed.
        return d_rows, d_columns, d_tau, None, None, None


@register_loss("fastclip_v0")
class FastCLIPv0Loss(FastCLIPLoss):
    """The global contrastive loss without the factor tau. The temperature is learned as the model's logit scale."""

    weighs_by_tau = False
    learns_scale = True


@register_loss("fastclip_v1")
class FastCLIPv1Loss(FastCLIPLoss):
    """The global contrastive loss (GCL) with one constant temperature."""


@register_loss("fastclip_v2")
class FastCLIPv2Loss(FastCLIPLoss):
    """The robust global contrastive loss (RGCL), which learns two temperatures per sample: one for each side.

    Args:
        rho: The constant rho in the formula of FastCLIPLoss.
        tau_lr: Learning rate of the temperatures.
        tau_min: Lower bound of the temperatures.
        tau_max: Upper bound of the temperatures.
        options: Keyword arguments of FastCLIPLoss.

    Raises:
        ValueError: For values out of range.
    """

    default_tau = 0.03

    def __init__(
        self,
        rho: float = 7.0,
        tau_lr: float = 0.0133,
        tau_min: float = 0.01,
        tau_max: float = 1.0,
        **options: Any,
    ):
        super().__init__(**options)
        if not (0 < tau_min <= self.tau <= tau_max and tau_lr >= 0):
            raise ValueError(
                "expected 0 < tau_min <= tau <= tau_max and tau_lr >= 0, got "
                f"{tau_min}, {self.tau}, {tau_max} and {tau_lr}"
            )
        self.rho = rho
        self.tau_step = TauStep(self.tau, tau_lr, tau_min, tau_max)


@register_loss("fastclip_v3")
class FastCLIPv3Loss(FastCLIPLoss):
    """The robust global contrastive loss with one temperature (RGCL-g), learned as the model's logit scale.

    Args:
        rho: The constant rho in the formula of FastCLIPLoss.
        options: Keyword arguments of FastCLIPLoss.
    """

    learns_scale = True

    def __init__(self, rho: float = 6.5, **options: Any):
        super().__init__(**options)
        self.rho = rho


@register_loss("sogclr")
class SogCLRLoss(FastCLIPv1Loss):
    """`fastclip_v1` with the default gamma="constant" (arXiv 2202.12387)."""

    default_gamma = "constant"


@register_loss("isogclr")
class ISogCLRLoss(FastCLIPv2Loss):
    """`fastclip_v2` with the default gamma="constant" (arXiv 2305.11965)."""

    default_gamma = "constant"
