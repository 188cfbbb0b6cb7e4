"""Check that the installed packages have the versions that disco_ds needs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from disco_ds.doctor import Line

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
    """List the versions of PACKAGES. If disco_ds is installed, check that its requirements are met."""
    here = {name: version for name in PACKAGES if (version := installed(name))}
    yield Line("ok", "versions", ", ".join(f"{name} {version}" for name, version in here.items()))
    for text in (metadata.requires("disco_ds") or ()) if "disco_ds" in here else ():
        required = Requirement(text)
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        version = installed(required.name)
        if version is None or not required.specifier.contains(version, prereleases=True):
            wanted = f"{required.name}{required.specifier}"
            found = f"disco_ds needs {wanted}, got {version}"
            yield Line("fail", "versions", found, f"pip install '{wanted}'")


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
