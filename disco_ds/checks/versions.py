"""Check that the installed packages have the versions that disco_ds needs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from disco_ds.checks import Line, Status

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
    """Check that the requirements of the installed PACKAGES are met."""
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
                status: Status = "warn" if is_cuda else "fail"
                yield Line(status, "versions", found, f"pip install '{wanted}'")


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
