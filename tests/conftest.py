"""Fixtures and settings for all tests."""

from pathlib import Path

import pytest
import yaml

from disco_ds.data import Manifest
from helpers import machine  # first, because it selects the accelerator
from helpers.cluster import marker, possible  # noqa: F401 (fixtures of several test files)
from helpers.dist import start_server
from helpers.minimal import MINIMAL
from helpers.shards import SIZES, write_shards


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not machine.DEVICE:
        skipped = pytest.mark.skip(
            reason="for a GPU: `make test-gpu`, or `make test-gpu REHEARSE=1` on the CPU"
        )
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skipped)
    if any(hasattr(getattr(item, "module", None), "run_ranks") for item in items):
        start_server()  # before a test of the data workers starts a fork server with fewer imports


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write the smallest complete recipe."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Write shards of uneven sizes."""
    return write_shards(tmp_path_factory.mktemp("shards"), SIZES)
