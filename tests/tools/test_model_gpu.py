"""The model of GPUs that are not here, against the published rates that it is calibrated with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.tool import load_tool

pytest.importorskip("triton")
tool = load_tool("model_gpu")


@pytest.mark.parametrize(("persistent", "tflops"), [(False, 492), (True, 540)])
def test_modeled_products_have_the_published_rate(persistent, tflops):
    n, D = 8192, 512
    code = SimpleNamespace(
        product_cycles=2 * 128 * 256 * D / 4096,
        issue_cycles=2500,
        epilogue_cycles=1500,
        programs=1,
    )
    sizes = {"BLOCK_M": 128, "BLOCK_N": 256, "WIDTH_BYTES": 128, "PERSISTENT": persistent}
    config = SimpleNamespace(kwargs=sizes, num_stages=3)
    seconds = tool._timed(tool.CARDS["H100"], code, config, n, n, D, "best")
    assert 2 * n**2 * D / seconds / 1e12 == pytest.approx(tflops, rel=0.01)


def test_a_product_takes_whole_waves():
    card = tool.CARDS["H200"]
    one, two = (tool.product_s(card, rows, 512, 1 << 20) for rows in (8448, 8576))
    assert 1.1 < two / one < 2.1
    assert 2 * 8448 * 512 * (1 << 20) / one == pytest.approx(card.matmul, rel=0.01)
