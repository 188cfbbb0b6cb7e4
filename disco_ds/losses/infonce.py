"""InfoNCE, in five losses: `clip`, `disco`, `disco_fused` and `inf_cl`, which differ only in cost, and `nt_xent`.

`clip` and `disco` compute whole rows of the matrix of logits. The other losses compute the matrix tile by tile, and
never store it.
"""

# b local batch, B global = N b, D width, N ranks; I, T unit rows, s scale; x_ij = s <row i, column j>; P softmax over a
# row, Q softmax over a column

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.losses.base import (
    TIE,
    Embeddings,
    Loss,
    LossOutput,
    Teacher,
    TeacherWeight,
    count_hits,
    global_metrics,
    register_loss,
    teacher_metrics,
)
from disco_ds.losses.blocks import (
    Gathered,
    GroupedLoss,
    Ring,
    Softmaxes,
    TiledLoss,
    add_pairs,
    inner_product,
    multiply_gradients,
    zero_gradient,
)
from disco_ds.losses.kernels.similarity import Groups
from disco_ds.losses.kernels.tiles import full_dtype


class WholeRowsLoss(Loss):
    """Base class of losses that compute whole rows of the matrix of logits.

    Args:
        group: The process group; None: all ranks.
        teacher_weight: Weight of the targets of the teachers in Embeddings.teacher, from 0 to 1; the weight of the
            pairs is 1 - teacher_weight. None: there is no teacher. See docs/losses.md section 9.
    """

    def __init__(self, group: Any = None, teacher_weight: TeacherWeight | None = None):
        super().__init__()
        self.group = group
        self.teacher_weight = teacher_weight

    def compute(
        self, embeddings: Embeddings, logits_image: Tensor, logits_text: Tensor, local: slice
    ) -> LossOutput:
        """Compute the loss and the metrics of n pairs. Collective.

        Args:
            embeddings: Features of this rank.
            logits_image: [n, B], the logits of the images of these pairs with all texts.
            logits_text: [n, B], the logits of the texts of these pairs with all images.
            local: The range of these pairs in the global batch.
        """
        both = logits_image, logits_text
        labels = torch.arange(local.start, local.stop, device=logits_image.device)
        loss = _cross_entropy(both, (labels, labels))
        others = {}
        if self.teacher_weight:
            targets, entropy = self._find_targets(embeddings.teacher, both, local)
            of_teachers = _cross_entropy(both, targets)
            parts = [loss, of_teachers, of_teachers - entropy]
            others = teacher_metrics(embeddings, parts, self.group)
            loss = loss + self.teacher_weight * (of_teachers - loss)
        with torch.no_grad():
            tie = TIE * embeddings.scale.abs()
            # Nothing as large as the logits stays in memory from one direction to the next.
            num_at_top = [(x >= x.gather(1, labels[:, None]) - tie).sum(1) for x in both]
            hits = [(num == 1).sum() for num in num_at_top]
            metrics = global_metrics(loss, hits, len(labels), self.group, others)
        return LossOutput(loss, metrics)

    def _find_targets(
        self, teachers: Sequence[Teacher], logits: Sequence[Tensor], local: slice
    ) -> tuple[list[Tensor], Tensor]:
        """Return the teachers' mean softmaxes, [n, B] for each direction, and the mean of their entropies, 0-d."""
        targets = [torch.zeros_like(x) for x in logits]
        entropy = logits[0].new_zeros(())
        for teacher in teachers:
            dtype = full_dtype(teacher.image)
            image, text = (
                comm.gather(x.detach(), self.group).to(dtype) for x in (teacher.image, teacher.text)
            )
            with torch.autocast(image.device.type, enabled=False):  # it would multiply in 16 bits
                sides = (image, text), (text, image)
                for target, (side, other) in zip(targets, sides, strict=True):
                    softmax = (teacher.scale.detach() * (side[local] @ other.T)).softmax(1)
                    target += softmax / len(teachers)
                    entropy -= torch.special.xlogy(softmax, softmax).sum(1).mean()
        return targets, entropy / (2 * len(teachers))


def _cross_entropy(logits: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return the mean of the cross-entropies of both directions."""
    image, text = (F.cross_entropy(x, y) for x, y in zip(logits, targets, strict=True))
    return (image + text) / 2


@register_loss("clip")
class FullMatrixLoss(WholeRowsLoss):
    """InfoNCE over the global batch, with O(B^2 D) work and O(B^2) memory on each rank.

    Every rank computes the whole matrix, which gives it the whole gradient of its own rows, so only forward
    communicates. Collective: every rank must call this. Source: docs/losses.md section 1; DisCo-CLIP equation 1.

    The options are those of WholeRowsLoss.
    """

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss from the whole B x B matrix of logits. Collective."""
        dtype = full_dtype(embeddings.image)
        I_A = _gather_own_gradient(embeddings.image.to(dtype), self.group)
        T_A = _gather_own_gradient(embeddings.text.to(dtype), self.group)
        with torch.autocast(I_A.device.type, enabled=False):  # autocast would multiply in 16 bits
            logits = embeddings.scale * (I_A @ T_A.T)  # [B, B]
        return self.compute(embeddings, logits, logits.T, slice(0, len(logits)))


def _gather_own_gradient(x: Tensor, group: Any) -> Tensor:
    """Gather the rows of all ranks. Only this rank's rows get a gradient, multiplied by N, as base.py requires."""
    N, n, b = comm.size(group), comm.rank(group), len(x)
    rows = comm.gather(x.detach(), group=group)
    local = x.detach() + N * (x - x.detach())  # exactly the value of x, with N times the gradient
    return torch.cat([rows[: n * b], local, rows[(n + 1) * b :]])


@register_loss("disco")
class DisCoLoss(WholeRowsLoss):
    """InfoNCE over the global batch, with the same value and gradient as the loss `clip`.

    It takes O(B^2 D / N) work and O(B^2 / N) memory on each rank. Source: DisCo-CLIP equations 3-7 and
    Algorithm 1. The paper averages the gradients of gathered features over ranks. Here the engine averages
    parameter gradients over ranks, and averaging twice would leave only 1/N of the gradient. So this loss sums the
    gradients of gathered features instead (docs/losses.md section 1).
    The paper's all_reduce is a reduce_scatter here: a rank receives only the gradients of its own features.
    Collective in forward and backward: every rank must call this.

    The options are those of WholeRowsLoss.
    """

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss from this rank's images with all texts, and its texts with all images. Collective."""
        dtype, s = full_dtype(embeddings.image), embeddings.scale
        I_n, T_n = embeddings.image.to(dtype), embeddings.text.to(dtype)
        b, n = len(I_n), comm.rank(self.group)
        I_A = comm.gather(I_n, self.group)  # [B, D]
        T_A = comm.gather(T_n, self.group)
        # As in Algorithm 1, take this rank's rows from the gathered matrix. The backward of gather sums gradients over
        # ranks, and this way the sum includes the gradient of these rows.
        local = slice(n * b, (n + 1) * b)
        with torch.autocast(I_n.device.type, enabled=False):  # autocast would multiply in 16 bits
            logits_image = s * (I_A[local] @ T_A.T)  # [b, B]
            logits_text = s * (T_A[local] @ I_A.T)
        return self.compute(embeddings, logits_image, logits_text, local)


class InfoNCE(torch.autograd.Function):
    """InfoNCE under the contract of base.py, without storing the matrix of similarities. For TiledLoss.function.

    If gradients are needed, forward computes them, and backward only multiplies them by the upstream gradient. They are
    correct only if the upstream gradient is the same on every rank, as it is if the loss is averaged over ranks.

    Source: docs/losses.md sections 1 and 2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        loss: TiledLoss,
        groups: Groups | None,
        teachers: Sequence[tuple[Tensor, Tensor, Teacher]],
        trains: bool,
    ) -> tuple[Tensor, ...]:
        """Compute what TiledLoss.forward expects, and the gradients. Collective. The bias has no effect."""
        student = Softmaxes(rows, columns, scale, loss, groups, maxima=loss.accuracy)
        weight = (loss.teacher_weight or 0.0) / max(len(teachers), 1)
        taught = [
            Softmaxes(side, other_side, teacher.scale, loss, weight=weight)
            for side, other_side, teacher in teachers
        ]
        for each in taught:
            if not each.shift_is_safe():
                each.recompute_per_row()
        needed = [trains and each for each in ctx.needs_input_grad[:3]]
        # Almost every shift is safe. Compute the gradients before the host waits for the check, so that a GPU has work
        # while the host reads the result and prepares what follows.
        gradients, target_gradient = _gradients(student, taught, needed)
        if not student.shift_is_safe():
            del gradients, target_gradient  # frees their memory
            student.recompute_per_row()
            gradients, target_gradient = _gradients(student, taught, needed)
        ctx.gradients = gradients
        # backward does not need the shift; tests and tools/check/losses.py read it.
        ctx.shift = student.shift
        # Compute -log(pair / (pair + others)) as log1p(others / pair), which stays precise when `others` is small.
        x, sums = student.pair_logits, student.sums
        per_pair = torch.logaddexp(torch.zeros_like(x), student.negatives_lse - x).sum(0)
        if groups is not None and groups.share is not None and sums.positives is not None:
            # The target is uniform over the group, so the mean of the group's logits replaces the pair's logit. Summed
            # over all anchors, this change is the same in both directions, so compute it for the rows and double it.
            per_pair += 2 * (x * (1 - groups.share) - groups.share * sums.positives)
        parts: list[Tensor] = []
        if target_gradient is not None:
            per_pair, parts = _add_teacher_loss(per_pair, student, taught, target_gradient)
        hits = [count_hits(largest, x, student.scale) for largest in sums.maxima]
        ctx.mark_non_differentiable(*hits, *parts)
        return (per_pair.mean() / 2).to(full_dtype(rows)), *hits, *parts

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Multiply the gradients that forward computed by the upstream gradient."""
        return *multiply_gradients(ctx, upstream), None, None, None, None, None


def _add_teacher_loss(
    per_pair: Tensor, student: Softmaxes, teachers: Sequence[Softmaxes], target_gradient: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Add the teachers' part to the loss of the pairs.

    Args:
        per_pair: [b], the loss of each pair without teachers, summed over both directions.
        student: The student's softmaxes.
        teachers: The teachers' softmaxes.
        target_gradient: [b, D], as computed by softmax_gradient.

    Returns:
        This rank's share of the loss with teachers, 0-d, summed over both directions; and the means over both
        directions of its parts: the loss of the pairs, the cross-entropy with the targets, and the mean of
        KL(teacher, student) over the teachers. Without the entropy of the targets, the last one is left out.
    """
    x = student.pair_logits
    lifted = len(x) * student.tiling.underflow_scale()
    weight = sum(teacher.weight for teacher in teachers)
    of_pairs = per_pair.mean()
    # In the loss, soft targets move the probability of each negative from the positive pair's logit to the negative's.
    negative_mass = torch.stack([teacher.negative_mass for teacher in teachers]).sum(0)
    change = (negative_mass * x).mean()
    change -= student.scale[0] * inner_product(student.rows, target_gradient) / lifted
    parts = [of_pairs, of_pairs + change / weight]
    if student.maxima:
        entropy = torch.zeros_like(change)
        for teacher in teachers:
            y = teacher.pair_logits
            entropy += teacher.weight * (teacher.lse - y).sum(0).mean()
            entropy += (teacher.negative_mass * y).mean()
            assert teacher.weighted_columns is not None
            product = inner_product(teacher.rows, teacher.weighted_columns)
            entropy -= teacher.scale[0] * product / lifted
        parts.append(parts[1] - entropy / weight)
    return of_pairs + change, [part / 2 for part in parts]


def _gradients(
    student: Softmaxes, teachers: Sequence[Softmaxes], needed: Sequence[bool]
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """Compute the gradients of rows, columns and scale, without the upstream gradient.

    Args:
        student: The student's softmaxes.
        teachers: The teachers' softmaxes. If student.maxima is True, their weighted_columns are computed.
        needed: Whether the gradient of the rows, the columns and the scale is needed.

    Returns:
        First, the gradients of rows, columns and scale, with None for each that is not needed. Second, the
        target_gradient of softmax_gradient, [b, D]; None without teachers.
    """
    if not any(needed) and not teachers:
        return (None, None, None), None
    # If a feature needs a gradient, the rows do: assign_sides has chosen them.
    _, needs_columns, needs_scale = needed
    rows, columns, scale, tiling = student.rows, student.columns, student.scale, student.tiling
    # The gradient of the scale is <rows, gradient of rows> / s, and also <columns, gradient of columns> / s, so the
    # gradient of one side is enough. With shared denominators, the scale's gradient is the mean of the two.
    shared = bool(student.same)
    d_columns: Any
    target_gradient = zero_gradient(rows) if teachers else None
    for teacher in teachers:
        teacher.weighted_columns = zero_gradient(teacher.rows) if student.maxima else None
    d_rows, d_columns = student.blocks.gradient(
        student.operands[0],
        student.scales,
        student.lse,
        student.shift,
        needs_columns or (needs_scale and shared),
        teachers=teachers,
        target_gradient=target_gradient,
    )
    if target_gradient is not None:
        d_rows -= target_gradient
    # A shift is never safe for a negative scale, so the gradients that are used are computed without one.
    if student.shift is None and d_columns is not None:
        d_columns = student.take_sign(d_columns)  # it is a sum over rows that contain the sign
    # In a block that compares rows with rows, or columns with columns, each view is an anchor and also a negative of
    # other views. The gradient of the block's rows includes both contributions.
    for block, views, lse, total in zip(
        student.same, student.operands, student.lse, (d_rows, d_columns), strict=False
    ):
        if total is not None:
            shifts = lse.expand(2, -1)
            total += block.gradient(
                views, student.scales, shifts, student.shift, needs_columns=False
            )[0]
    # The weight of a positive pair is P + Q - 2 = -(1 - P) - (1 - Q): minus the probability of all other entries in
    # its row and in its column.
    pairs = -student.negative_mass
    groups = student.blocks.groups
    if groups is not None and groups.share is not None:
        pairs += 2 * (1 - groups.share)  # for a pair in a group, the weight is P + Q - 2 / size
    # With teachers, the target of a positive pair is below 1 by the teachers' weighted probability of negatives.
    for teacher in teachers:
        pairs += teacher.negative_mass
    factor = scale / (2 * len(rows))
    add_pairs(d_rows, columns, pairs, factor, tiling)
    add_pairs(d_columns, rows, pairs, factor, tiling)
    d_scale = None
    if needs_scale:
        total = inner_product(rows, d_rows)
        if shared:
            total = (total + inner_product(columns, d_columns)) / 2
        d_scale = total / scale
    return (d_rows, d_columns if needs_columns else None, d_scale), target_gradient


@register_loss("disco_fused")
class DisCoFusedLoss(GroupedLoss):
    """InfoNCE over the global batch, with the same value and gradient as the losses `clip` and `disco`.

    Texts are gathered once. Each rank computes one block of similarities, its own images against all texts, tile
    by tile. Sums over the block's rows give the image-to-text loss. Sums over its columns, completed by one
    all_reduce of B numbers, give the text-to-image loss. A reduce_scatter sends the gradient of each text back to the
    rank that the text came from. Memory: two B x D tensors and one tile. Source: docs/losses.md section 1.

    The options are those of GroupedLoss (blocks.py).
    """

    function = InfoNCE
    make_blocks = Gathered


@register_loss("inf_cl")
class InfCLLoss(GroupedLoss):
    """InfoNCE over the global batch, with the same value and gradient as the losses `clip` and `disco`.

    No tensor of size B x D or larger is allocated. Each rank's block of texts travels around the ring once for the
    sums, and once more together with its gradient. The next block is received while the current one is multiplied.
    Memory: four b x D blocks and one tile. The options are those of GroupedLoss (blocks.py).

    Source: docs/losses.md section 1; Inf-CL (arXiv 2410.17243).
    """

    function = InfoNCE
    make_blocks = Ring


@register_loss("nt_xent")
class NTXentLoss(TiledLoss):
    """Mean over all 2B views i of -log(exp(x_ij) / sum of exp(x_ik) over all 2B - 1 other views k).

    j is the other view of the same image, and x are the similarities times the scale, which is 1 / temperature. In
    Embeddings, the second view takes the place of the text. Three blocks of similarities are computed in tiles:
    first views against second views, first against first, and second against second. Source: SimCLR
    (arXiv 2002.05709) equation 1; DisCo-CLIP section 4.1; docs/losses.md section 7.

    Args:
        ring: Send views around a ring (as in `inf_cl`) instead of gathering them (as in
            `disco_fused`).
        options: Keyword arguments of TiledLoss.
    """

    initial_scale = 10.0
    function = InfoNCE
    compares_views = True

    def __init__(self, ring: bool = False, **options: Any):
        super().__init__(**options)
        self.make_blocks = Ring if ring else Gathered
