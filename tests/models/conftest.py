"""A very small model of open_clip."""

from pathlib import Path

import pytest

from helpers.towers import write_tiny


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return write_tiny(tmp_path)
