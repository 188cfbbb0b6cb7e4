"""Helpers for tests of the doctor: access to the lines of its report, and settings with data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disco_ds.checks.report import Line
from disco_ds.config import Config
from helpers.minimal import settings


def statuses(lines: list[Line]) -> list[tuple[str, str]]:
    return [(line.status, line.check) for line in lines]


def the(lines: list[Line], check: str) -> Line:
    (line,) = [line for line in lines if line.check == check]
    return line


def data_of(folder: Path | str, **changes: Any) -> Config:
    data = {"shards": str(folder), "source": "shards", "image_key": "png", "workers": 2, **changes}
    # A checkpoint is due before the end of the 100 steps.
    checkpoint = {"every_steps": 50}
    return settings(data=data, model={"name": "quickstart"}, checkpoint=checkpoint)
