"""Checks that the packages fit together and can be imported."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from disco_ds.checks import Line
from disco_ds.checks.probe import installed

PACKAGES = ("disco_ds", "torch", "torchvision", "triton", "deepspeed", "open_clip_torch", "timm", "webdataset")


def check_versions() -> Iterator[Line]:
    """Check the versions of PACKAGES against what each of them requires, and import the most important."""
    here = {name: version for name in PACKAGES if (version := installed(name))}
    yield Line("ok", "versions", ", ".join(f"{name} {version}" for name, version in here.items()))
    if "disco_ds" not in here:
        yield Line("warn", "versions", "disco_ds is not installed: what it requires is not known", "pip install -e .")
    for package in here:
        for asked in map(Requirement, metadata.requires(package) or ()):
            version = installed(asked.name)
            applies = asked.marker is None or asked.marker.evaluate({"extra": ""})
            if applies and not (version and asked.specifier.contains(version, prereleases=True)):
                found = f"{package} {here[package]} needs {asked.name}{asked.specifier}, got {version}"
                yield Line("fail", "versions", found, f"pip install '{asked.name}{asked.specifier}'")
    # Only the first failure is reported: others may follow from it.
    for name in ("torch", "torchvision", "deepspeed", "open_clip", "webdataset"):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken installation raises
            builds = "torch and torchvision are of different builds (CPU, CUDA): install both again, from one index"
            remedy = builds if "torchvision::" in str(error) else f"install {name} again"
            yield Line("fail", "versions", f"import {name}: {type(error).__name__}: {error}", remedy)
            return
