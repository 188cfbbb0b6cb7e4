"""The public names of disco_ds are listed without importing torch. Each is imported when it is first accessed."""

import doctest
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import disco_ds
from disco_ds.checkpoints.export import export_run
from disco_ds.losses import base


def test_import_of_the_package_is_light_and_names_are_listed() -> None:
    code = (
        "import sys, time; start = time.process_time(); import disco_ds; took = time.process_time() - start\n"
        "offered = set(disco_ds.OFFERED) <= set(dir(disco_ds))\n"
        "print(took < 0.2, {'torch', 'deepspeed', 'pydantic'} & set(sys.modules), offered)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split("\n")[0] == "True set() True", done.stdout


@pytest.mark.parametrize("name", sorted(disco_ds.OFFERED))
def test_name_is_offered_and_is_not_a_module(name: str) -> None:
    assert getattr(disco_ds, name).__name__ == name
    assert find_spec(f"disco_ds.{name}") is None
    assert name in disco_ds.__all__


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        disco_ds.trian  # noqa: B018


def test_examples_of_build_loss_hold() -> None:
    finder = doctest.DocTestFinder()
    (found,) = (
        test
        for test in finder.find(
            base.build_loss, "build_loss", globs={"build_loss": disco_ds.build_loss}
        )
    )
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found)
    assert (result.failed, result.attempted) == (0, 2)


def test_export_names_what_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown layout 'zip'"):
        export_run(tmp_path, tmp_path / "to", layout="zip")


def test_torch_s_deprecations_of_what_deepspeed_calls_are_hidden_in_own_loops() -> None:
    """DeepSpeed 0.19 calls collectives by names that are deprecated in torch 2.14."""
    text = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another."
    code = f"import warnings, disco_ds.losses; warnings.warn({text!r}, FutureWarning)"
    command = [sys.executable, "-W", "error::FutureWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
