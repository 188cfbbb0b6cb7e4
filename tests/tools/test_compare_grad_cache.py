"""tools/compare_grad_cache.py at a tiny size, with the installed contenders; ours are always installed."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from helpers.tool import load_tool

compare_grad_cache = load_tool("compare_grad_cache")
SIZES = [
    "--batch=32",
    "--error-batch=32",
    "--micro-batch=4",
    "--length=6",
    "--hidden=16",
    "--layers=1",
    "--repeats=1",
]
OURS = ["disco_fused", "disco_fused, micro-batch / 2"]


@pytest.mark.slow
def test_contenders_have_the_true_gradient_and_figures():
    others = ("sentence-transformers", "GradCache")
    names = [*OURS, *(name for name in others if not compare_grad_cache.missing([name]))]
    args = compare_grad_cache.parse_args(["--contenders", *names, *SIZES])
    rows = compare_grad_cache.measure(names, args)
    assert list(rows) == names
    for name in OURS:
        assert rows[name]["error"] < 2e-6
        assert rows[name]["factor"] == pytest.approx(1, abs=1e-6)
    for row in rows.values():
        assert len(row["seconds"]) == 1
        assert row["seconds"][0] > 0
        assert 0 < row["peak"] < row["resident"]
    text = compare_grad_cache.describe(rows, args)
    assert "2 CPU ranks of one thread, global batch 32, micro-batch 4, length 6; torch" in text
    assert f"torch {importlib.metadata.version('torch')}" in text
    assert text.count("\n| disco_fused") == 2


def test_a_gradient_of_local_negatives_or_of_another_scale_is_found():
    args = compare_grad_cache.parse_args(SIZES)
    true = compare_grad_cache.true_gradient(args)
    half = compare_grad_cache.compare_gradients(0.5 * true, true)
    assert half == pytest.approx({"error": 0.5, "factor": 0.5, "error / factor": 0.0}, abs=1e-9)
    args.error_batch = 16
    local = compare_grad_cache.compare_gradients(compare_grad_cache.true_gradient(args), true)
    assert local["error"] > 0.1
    assert local["error / factor"] > 0.1


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_comparison_with_its_traceback():
    args = compare_grad_cache.parse_args(["--contenders", "disco_fused", *SIZES])
    args.micro_batch = 5
    with pytest.raises(
        RuntimeError, match=r"disco_fused: (.|\n)*cannot be divided evenly into 3 micro-batches"
    ):
        compare_grad_cache.measure(["disco_fused"], args)


def test_missing_packages_are_named(monkeypatch, capsys):
    for module in ("sentence_transformers", "grad_cache", "gradcache"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    assert compare_grad_cache.main(SIZES) == 1
    error = capsys.readouterr().err
    assert "not installed here: sentence-transformers, GradCache" in error
    assert "--help" in error


def test_batches_that_do_not_divide_are_refused(capsys):
    assert compare_grad_cache.main(["--contenders", "disco_fused", *SIZES, "--batch=36"]) == 2
    assert "36 pairs are not a multiple of ranks x micro-batch (8)" in capsys.readouterr().err
