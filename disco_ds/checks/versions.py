"""Check that the installed packages are compatible and can be imported."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from disco_ds.checks import Line

PACKAGES = (
    "disco_ds",
    "torch",
    "torchvision",
    "triton",
    "deepspeed",
    "open_clip_torch",
    "timm",
    "webdataset",
)


def check_versions() -> Iterator[Line]:
    """Check that the requirements of the installed PACKAGES are met, and import the main packages."""
    here = {name: version for name in PACKAGES if (version := installed(name))}
    yield Line("ok", "versions", ", ".join(f"{name} {version}" for name, version in here.items()))
    if "disco_ds" not in here:
        found = "disco_ds is not installed, so its requirements are unknown"
        yield Line("warn", "versions", found, "pip install -e .")
    for package in here:
        for text in metadata.requires(package) or ():
            required = Requirement(text)
            if required.marker is not None and not required.marker.evaluate({"extra": ""}):
                continue
            version = installed(required.name)
            if version is None or not required.specifier.contains(version, prereleases=True):
                wanted = f"{required.name}{required.specifier}"
                found = f"{package} {here[package]} needs {wanted}, got {version}"
                # An image may have its own CUDA libraries, or torch built from source.
                is_cuda = package == "torch" and required.name.startswith(("cuda-", "nvidia-"))
                yield Line(
                    "warn" if is_cuda else "fail", "versions", found, f"pip install '{wanted}'"
                )
    # Only the first failure is reported, because it may cause the others.
    for name in ("torch", "torchvision", "deepspeed", "open_clip", "webdataset"):
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken installation may raise anything
            remedy = f"reinstall {name}"
            if "torchvision::" in str(error):
                remedy = (
                    "torch and torchvision are different builds (CPU, CUDA): reinstall both from the "
                    "same index"
                )
            found = f"import {name}: {type(error).__name__}: {error}"
            yield Line("fail", "versions", found, remedy)
            return


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
