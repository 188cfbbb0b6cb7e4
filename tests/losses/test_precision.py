"""Accuracy of losses that multiply 16-bit matrices: the limits in docs/exactness.md, and the range of fp16 weights."""

import math

import pytest
import torch

from disco_ds.losses import Embeddings, build_loss
from disco_ds.losses.kernels.tiles import Tiling
from tools.check import precision as tool

AUTO = next(name for name in tool.OURS if name.endswith("(auto on a GPU)"))


def test_auto_is_fp32_on_a_cpu_and_fp16_on_a_gpu():
    assert Tiling().on(torch.device("cpu")).precision == "fp32"
    assert Tiling().on(torch.device("cuda")).precision == "fp16"
    assert tool.OURS[AUTO] == {"precision": "fp16"}
    assert build_loss("disco_fused").tiling.precision == "auto"


def test_half_factors_lose_a_sixth_of_what_open_clip_loses_under_autocast():
    table = tool.measure(B=384, D=128)
    for theirs, mine in zip(table[tool.OPEN_CLIP], table[AUTO], strict=True):
        assert mine <= (theirs / 6 if theirs > 1e-4 else 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["clip", "disco"])
def test_whole_matrices_are_multiplied_in_fp32_under_autocast(name, dtype):
    image, text = (x.to(dtype) for x in tool.make_pairs("typical", 64, 32))
    gradients = []
    for kind in (torch.float64, dtype):
        leaves = [x.detach().to(kind).requires_grad_() for x in (image, text)]
        with torch.autocast("cpu", torch.bfloat16, enabled=kind != torch.float64):
            out = build_loss(name)(Embeddings(*leaves, torch.tensor([100.0])))
        out.loss.backward()
        gradients.append(leaves[0].grad.double())
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert error < max(1e-5, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_fastclip_weights_stay_in_the_range_of_fp16(factor):
    """Make FastCLIP's weights as small as in a batch that is 1,000 times larger.

    To this end, gamma is small, and the state u is far from the sums of the batch (docs/losses.md, section 6).
    """
    B, D = 384, 64
    image, text = tool.make_pairs("typical", B, D)
    gradients = []
    for dtype, precision in ((torch.float64, "fp32"), (torch.float32, "fp16")):
        loss = build_loss("fastclip_v3", gamma="constant", gamma_min=0.05, precision=precision)
        loss.set_num_samples(B, 10 * B)
        leaves = [x.to(dtype).requires_grad_() for x in (image, text)]
        embeddings = Embeddings(
            *leaves, torch.tensor([1 / 0.07], dtype=dtype), None, torch.arange(B)
        )
        loss(embeddings)
        loss.commit()
        loss.state.values["log_u"] += math.log(factor)
        assert loss.current_gamma() == 0.05
        loss(embeddings).loss.backward()
        gradients.append(torch.cat([x.grad for x in leaves]).double())
    true, got = gradients
    assert got.isfinite().all()
    # 1e-3 is the rounding of similarities to 11 bits at this scale.
    assert (got - true).norm(dim=1).max() <= 2e-3 * true.norm(dim=1).max()
