"""Fixtures: shards in a folder and on a local server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from disco_ds.data import Manifest
from helpers.shards import SIZES, write_shards
from helpers.web import Server, serve


@pytest.fixture
def shards(tmp_path: Path) -> Manifest:
    return write_shards(tmp_path / "shards", SIZES)


@pytest.fixture
def server(shards: Manifest) -> Iterator[Server]:
    with serve(shards.folder) as server:
        yield server
