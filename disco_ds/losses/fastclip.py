"""FastCLIP and the methods it compares with: each sample's denominator is an estimate that is kept between batches.

They are six presets of one loss, which differ in the objective and the temperature. The tiles are those of
`disco_fused`, with other vectors of sums and weights. Source: FastCLIP (arXiv 2407.01445), docs/losses.md section 6.
"""

# b local batch, B global = N b, D width, N ranks; h_ij = <I_i, T_j> - <I_i, T_i>; tau = 1 / scale
# g_i = mean over the B - 1 others of exp(h_ij / tau_i); u_i its moving average; [2, b]: of row and of column anchors

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.losses.base import Embeddings, LossOutput, count_hits, global_metrics, register_loss
from disco_ds.losses.blocks import (
    Gathered,
    GatheredBoth,
    TiledLoss,
    TiledOptions,
    finish,
    holds,
    inner,
    largest_shift,
    positives,
)
from disco_ds.losses.sample_state import Memory, SampleState, TauStep

if TYPE_CHECKING:
    from typing import Unpack

GammaSchedule = Literal["constant", "cosine", "fractional"]


class FastCLIPLoss(TiledLoss):
    """Half the mean over image anchors of tau_i (log(eps + u_i) + rho), plus the same of text anchors.

    u is the estimate after its update by this batch, and the gradient is that of g / (eps + u) with u held constant.
    `fastclip_v0` has no factor tau. rho is 0 but for the presets that have an option of that name.

    Args:   gamma: weight of a batch in u, which is 1 in the first epoch: "constant" is gamma_min from then on; "cosine"
            falls to gamma_min in gamma_epochs (None: half of the run's), by whole epochs; "fractional" is the same
            sample by sample; eps: see above; tau: initial temperature, None: the preset's; memory: where the state
            lies, see SampleState; gather_both: the paper's dataflow (its gradient reduction), which sends no sums of
            features; options: see TiledLoss.
    Raises: ValueError for values out of their range.
    """

    weighs_by_tau: ClassVar[bool] = True
    default_gamma: ClassVar[GammaSchedule] = "cosine"
    default_tau: ClassVar[float] = 0.07
    learns_scale = False
    rho: float = 0.0
    tau_step: TauStep | None = None
    """How the temperatures of single samples learn; None: there is one temperature for all."""

    def __init__(
        self,
        gamma: GammaSchedule | None = None,
        gamma_min: float = 0.2,
        gamma_epochs: int | None = None,
        eps: float = 1e-14,
        tau: float | None = None,
        memory: Memory = "device",
        gather_both: bool = False,
        **options: Unpack[TiledOptions],
    ):
        super().__init__(**options)
        self.gamma_schedule = gamma or self.default_gamma
        if self.gamma_schedule not in get_args(GammaSchedule):
            raise ValueError(f"gamma must be one of {', '.join(get_args(GammaSchedule))}, got {gamma!r}")
        if not (0 < gamma_min <= 1 and (gamma_epochs is None or gamma_epochs >= 1) and eps >= 0):
            raise ValueError(
                "needed: 0 < gamma_min <= 1, gamma_epochs >= 1, eps >= 0; "
                f"got gamma_min {gamma_min}, gamma_epochs {gamma_epochs}, eps {eps}"
            )
        self.gamma_min, self.gamma_epochs, self.eps = gamma_min, gamma_epochs, eps
        self.tau = self.default_tau if tau is None else tau
        if self.tau <= 0:
            raise ValueError(f"tau must be positive, got {self.tau}")
        self.initial_scale = 1 / self.tau
        if memory not in get_args(Memory):
            raise ValueError(f"memory must be one of {', '.join(get_args(Memory))}, got {memory!r}")
        self.memory: Memory = memory
        self.blocks = GatheredBoth if gather_both else Gathered
        self.state: SampleState | None = None

    def set_num_samples(self, num_samples: int, run_samples: int) -> None:
        if self.gamma_epochs is None:
            self.gamma_epochs = max(run_samples // (2 * num_samples), 1)
        self.state = SampleState(num_samples, self.memory, self.tau_step, self.group)

    def current_gamma(self) -> float:
        """gamma of the next batch, from the number of samples committed so far."""
        state = self._state()
        epoch = state.samples / state.num_samples
        if self.gamma_schedule != "fractional":
            epoch = state.samples // state.num_samples
        if self.gamma_schedule == "constant":
            return 1.0 if epoch == 0 else self.gamma_min
        assert self.gamma_epochs is not None
        left = (1 + math.cos(math.pi * min(epoch / self.gamma_epochs, 1.0))) / 2
        return self.gamma_min + (1 - self.gamma_min) * left

    def forward(self, embeddings: Embeddings) -> LossOutput:
        state = self._state()
        if embeddings.index is None:
            raise ValueError(f"{type(self).__name__} needs sample ids: Embeddings(..., index=[b])")
        b = len(embeddings.image)
        if b * comm.size(self.group) < 2:
            raise ValueError("FastCLIP needs a global batch of at least 2, got 1: there are no other samples")
        # A sample's estimates lie with the rank that owns its id, and are fetched for every batch.
        held = state.fetch(embeddings.index)  # [b, 2] each, of image and of text anchors
        # As in infonce: the columns are sent, so the side without a gradient takes their place.
        swap = embeddings.text.requires_grad and not embeddings.image.requires_grad
        rows, columns = (embeddings.text, embeddings.image) if swap else (embeddings.image, embeddings.text)
        if self.tau_step is not None:
            leaf = held["tau"].detach().requires_grad_()
            # The step of the temperatures takes the gradient of the sample's own term: undo the mean over 2b terms.
            leaf.register_hook(lambda gradient: state.stage("tau_gradient", 2 * b * gradient))
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
            metrics["tau"] = comm.all_reduce_sum(held["tau"].mean(), self.group) / comm.size(self.group)
        return LossOutput(loss, metrics)

    def commit(self) -> None:
        self._state().commit()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state of the samples that this rank owns."""
        return self._state().state_dict()

    def load_state_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        self._state().load_parts(parts)

    def _state(self) -> SampleState:
        if self.state is None:
            raise ValueError(f"{type(self).__name__} keeps numbers per sample: call set_num_samples first")
        return self.state


class _FastCLIP(torch.autograd.Function):
    """tau: [1], one for all, or [2, b]; float64."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, columns: Tensor, tau: Tensor, log_u: Tensor, gamma: float, loss: FastCLIPLoss
    ) -> tuple[Tensor, ...]:
        dtypes, b, group, tiling = (rows.dtype, columns.dtype), len(rows), loss.group, loss.tiling.on(rows.device)
        rows, columns = tiling.hold(rows), tiling.hold(columns)
        cross = loss.blocks(columns, tiling, loss.comm_dtype, group)
        cosines = positives(rows, cross.own, tiling)
        scales = tau.reciprocal().expand(2, b)
        shift = largest_shift(rows, columns, scales[0, :1], group) if len(tau) == 1 else None
        sums = cross.sums(rows, scales, shift, loss.accuracy)
        # A row whose similarities are all far below the largest underflows; then every sum gets a maximum of its own.
        if shift is not None and not holds(shift, sums.rows, sums.columns, group=group):
            shift = None
            sums = cross.sums(rows, scales, shift, loss.accuracy)
        others, x = torch.stack([sums.rows, sums.columns]), scales * cosines
        # g is a mean: the sum of exp(logit - pair's logit), divided by the number of others.
        count = math.log(b * comm.size(group) - 1)
        # u = (1 - gamma) u + gamma g in logarithms, and u = g for a sample that is seen for the first time.
        log_g = others - x - count
        kept = math.log1p(-gamma) if gamma < 1 else -math.inf
        log_u = torch.where(log_u == -math.inf, log_g, torch.logaddexp(log_u + kept, log_g + math.log(gamma)))
        # log(eps + u), whose part in the gradient is a constant.
        log_sum = torch.logaddexp(log_u, torch.full_like(log_u, math.log(loss.eps) if loss.eps else -math.inf))
        # The weight of entry j, exp(logit_ij - shift_i), is its part of gamma g_i / (eps + u_i). That is at most 1, as
        # the tiles need it, because u >= gamma g.
        shifts = x + count + log_sum - math.log(gamma)
        ctx.cross, ctx.shift, ctx.gamma, ctx.loss, ctx.tiling, ctx.dtypes = cross, shift, gamma, loss, tiling, dtypes
        ctx.save_for_backward(rows, cross.own, tau, cosines, others, shifts, log_sum)
        value = (log_sum + loss.rho) * tau if loss.weighs_by_tau else log_sum
        hits = count_hits(sums.rows_max, x[0]), count_hits(sums.columns_max, x[1])
        ctx.mark_non_differentiable(log_u, *hits)
        return (value.sum() / (2 * b)).to(torch.promote_types(dtypes[0], torch.float32)), log_u, *hits

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        rows, columns, tau, cosines, others, shifts, log_sum = ctx.saved_tensors
        needs_rows, needs_columns, needs_tau, *_ = ctx.needs_input_grad
        loss, gamma, b, tiling = ctx.loss, ctx.gamma, len(rows), ctx.tiling
        scales = tau.reciprocal().expand(2, b)
        moments = torch.zeros_like(shifts) if needs_tau and len(tau) == 2 else None
        wanted = needs_rows or (needs_tau and moments is None), needs_columns
        d_rows, d_columns = ctx.cross.gradient(rows, scales, shifts, ctx.shift, *wanted, moments)
        # The pair is part of every h_ij of its row, so it gets minus the weight of all others.
        weights = (others - shifts).exp()
        # The tiles' weights carry gamma, so the factor divides by it.
        share = upstream.double() / (2 * b)
        factor = share / gamma if loss.weighs_by_tau else share / gamma / tau
        d_rows = finish(d_rows, columns, -weights.sum(0), factor, tiling)
        d_columns = finish(d_columns, rows, -weights.sum(0), factor, tiling)
        d_tau = None
        if needs_tau:
            direct = share * (log_sum + loss.rho) if loss.weighs_by_tau else torch.zeros_like(log_sum)
            if moments is None:
                assert d_rows is not None  # computed for tau too
                # <rows, their gradient> is the sum of all weights times h
                d_tau = direct.sum() - inner(rows, d_rows) / tau
            else:
                d_tau = direct - share / gamma * scales * (moments / tiling.gain() - cosines * weights)
        return (
            d_rows.to(ctx.dtypes[0]) if d_rows is not None and needs_rows else None,
            d_columns.to(ctx.dtypes[1]) if d_columns is not None else None,
            d_tau,
            *[None] * 3,
        )


@register_loss("fastclip_v0")
class FastCLIPv0Loss(FastCLIPLoss):
    """The global contrastive loss without its factor tau; one temperature, learned, which is the model's."""

    weighs_by_tau = False
    learns_scale = True


@register_loss("fastclip_v1")
class FastCLIPv1Loss(FastCLIPLoss):
    """The global contrastive loss (GCL); one temperature, constant."""


@register_loss("fastclip_v2")
class FastCLIPv2Loss(FastCLIPLoss):
    """The robust global contrastive loss (RGCL); a temperature per sample and side, learned by the loss itself.

    Args:   rho: see FastCLIPLoss; tau_lr: learning rate of the temperatures; tau_min, tau_max: bounds of them; options:
            see FastCLIPLoss.
    Raises: ValueError for values out of their range.
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
        if not 0 < tau_min <= self.tau <= tau_max:
            raise ValueError(f"needed: 0 < tau_min <= tau <= tau_max, got {tau_min}, {self.tau}, {tau_max}")
        self.rho, self.tau_step = rho, TauStep(self.tau, tau_lr, tau_min, tau_max)


@register_loss("fastclip_v3")
class FastCLIPv3Loss(FastCLIPLoss):
    """The robust global contrastive loss with one temperature, learned, which is the model's (RGCL-g).

    Args: rho, options: see FastCLIPLoss.
    """

    learns_scale = True

    def __init__(self, rho: float = 6.5, **options: Any):
        super().__init__(**options)
        self.rho = rho


@register_loss("sogclr")
class SogCLRLoss(FastCLIPv1Loss):
    """`fastclip_v1` with a constant gamma (arXiv 2202.12387)."""

    default_gamma = "constant"


@register_loss("isogclr")
class ISogCLRLoss(FastCLIPv2Loss):
    """`fastclip_v2` with a constant gamma (arXiv 2305.11965)."""

    default_gamma = "constant"
