"""On which GPUs and with which versions of Triton the losses use the Triton kernels."""

from __future__ import annotations

import pytest

from disco_ds.losses.kernels.availability import lacks_fence


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [
        ((9, 0), "3.6.0", False),
        ((10, 0), "3.6.0", True),
        ((12, 0), "3.7.0+git1a2b3c", True),
        ((10, 0), "3.7.1", False),
        ((10, 3), "3.10.0", False),
    ],
)
def test_old_triton_is_not_used_on_newer_gpus(
    capability: tuple[int, int], version: str, expected: bool
) -> None:
    assert lacks_fence(capability, version) == expected
