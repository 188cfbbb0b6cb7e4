"""Build the sdist and the wheel, try the wheel in a temporary folder, and copy both to dist/ (`make wheel`).

All other packages are those of the Python that runs this tool, so nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = (
    "import sys, setuptools.build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
)
FOLDERS = {"recipes": "disco_ds/recipes", "ds_configs": "ds_configs", "assets": "disco_ds/assets"}
"""Folder inside the installed package -> folder in the repository, all of whose data files the wheel must contain."""
SUFFIXES = {".yaml", ".json", ".md", ".tar"}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        wheel = build(work)
        missing = [name for name in expected() if name not in zipfile.ZipFile(wheel).namelist()]
        if missing:
            print(f"{wheel.name} lacks {', '.join(missing)}", file=sys.stderr)
            return 1
        try_out(wheel, work / "installed")
        dist = ROOT / "dist"
        dist.mkdir(exist_ok=True)
        for path in (work / "dist").iterdir():
            print(shutil.copy(path, dist / path.name))
    return 0


def build(work: Path) -> Path:
    """Build the sdist and the wheel, and return the wheel.

    They are built in a copy of the repository, because setuptools leaves files behind that a later build would read.
    """
    copy, dist = work / "source", work / "dist"
    dist.mkdir()
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in files.rstrip("\0").split("\0"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(dist)], cwd=copy, check=True, stdout=subprocess.DEVNULL
    )
    (wheel,) = dist.glob("*.whl")
    return wheel


def expected() -> list[str]:
    """Return the paths of the data files that the wheel must contain."""
    found = []
    for inside, folder in FOLDERS.items():
        files = [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
        assert files, folder
        found += [f"disco_ds/{inside}/{path.relative_to(ROOT / folder)}" for path in files]
    return found


def try_out(wheel: Path, folder: Path) -> None:
    """Install the wheel in a new folder, and run `disco-ds` from there.

    Raises:
        subprocess.CalledProcessError: If a command fails.
        RuntimeError: If disco_ds is not imported from the folder.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True)
    # PYTHONPATH comes before the packages of this Python, which may include a disco_ds from the repository.
    call = partial(
        subprocess.check_output,
        cwd=folder.parent,
        env=os.environ | {"PYTHONPATH": str(folder)},
        text=True,
    )
    where = call([sys.executable, "-c", "import disco_ds; print(disco_ds.__file__)"]).strip()
    if not Path(where).is_relative_to(folder):
        raise RuntimeError(f"disco_ds is imported from {where}, not from the wheel")
    for arguments in (["--help"], ["train", "--config", "quickstart", "--dry-run"]):
        call([folder / "bin" / "disco-ds", *arguments])
    print(f"{wheel.name}: disco-ds runs from the wheel")


if __name__ == "__main__":
    sys.exit(main())
