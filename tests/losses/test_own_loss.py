"""Custom losses (`package.module:Class`): the example loss works with every command, and mistakes are reported."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from disco_ds.config import load_config
from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, build_loss
from disco_ds.metrics.logger import METRICS_FILE
from disco_ds.plan.losses import loss_cost
from disco_ds.run import run_training
from helpers.dist import run_ranks
from helpers.minimal import settings
from helpers.own_code import disco_ds
from helpers.paths import ROOT
from helpers.tiny_run import recipe

NAME = "our_package.my_losses:SmoothedLoss"
OTHERS = """
import torch
from disco_ds.losses import Loss
from disco_ds.losses.infonce import FullMatrixLoss
from disco_ds.losses.infonce import DisCoFusedLoss

class Unplanned(FullMatrixLoss):
    pass

class Plain(torch.nn.Module):
    pass

class NoForward(Loss):
    pass

class Bare(Loss):
    def forward(self, embeddings):
        raise NotImplementedError

class Wider(DisCoFusedLoss):
    def __init__(self, margin=0.0, **options):
        super().__init__(**options)

class Returns(FullMatrixLoss):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, embeddings):
        out = super().forward(embeddings)
        return eval(self.what, {"out": out, "loss": out.loss, "Output": type(out)})

class Open(Bare):
    def __init__(self, **options):
        super().__init__()
        self.options = options
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on PYTHONPATH that contains our_package."""
    folder = tmp_path / "path"
    (folder / "our_package").mkdir(parents=True)
    code = (ROOT / "examples" / "smoothed_loss.py").read_text()
    for name, text in {
        "__init__": "",
        "my_losses": code,
        "others": OTHERS,
        "broken": "import no_such_library",
    }.items():
        (folder / "our_package" / f"{name}.py").write_text(text)
    (folder / "our_package" / "fails.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "our_package"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def test_recipe_with_an_own_loss_trains_two_steps(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = recipe(
        tmp_path,
        loss={"name": NAME, "options": {"smoothing": 0.2}},
        steps=2,
        log={"every_steps": 1},
    )
    folder = run_training(load_config(path))
    records = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 2
    assert all(1 < loss < 5 for loss in losses), losses


@pytest.mark.slow
def test_dry_run_plan_and_doctor_take_an_own_loss(package, tmp_path):
    path = str(recipe(tmp_path, loss={"name": NAME}))
    done = disco_ds("train", "--config", path, "--dry-run", cwd=tmp_path)
    assert (done.returncode, f"name: {NAME}" in done.stdout) == (0, True), done.stderr
    done = disco_ds("doctor", "--config", path, "--gradients", cwd=tmp_path)
    assert re.search("^ok +kernels ", done.stdout, re.MULTILINE), done.stdout
    line = next(line for line in done.stdout.splitlines() if "compared with one process" in line)
    assert line.split()[0] == "ok", line


def oracle(
    image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, smoothing: float
) -> torch.Tensor:
    logits, labels = scale * image @ text.T, torch.arange(len(image))
    return (
        sum(F.cross_entropy(x, labels, label_smoothing=smoothing) for x in (logits, logits.T)) / 2
    )  # type: ignore


def gradients_of_ranks(folder: str) -> list[torch.Tensor]:
    sys.path.insert(0, folder)
    generator = torch.Generator().manual_seed(0)
    both = [
        F.normalize(torch.randn(8, 5, generator=generator, dtype=torch.float64)) for _ in range(2)
    ]
    own = slice(4 * comm.rank(), 4 * comm.rank() + 4)
    leaves = [x[own].clone().requires_grad_() for x in both] + [
        torch.tensor([9.0]).double().requires_grad_()
    ]
    out = build_loss(NAME, smoothing=0.3)(Embeddings(*leaves))
    out.loss.backward()
    everyone = [x.clone().requires_grad_() for x in both] + [
        torch.tensor([9.0]).double().requires_grad_()
    ]
    true = oracle(*everyone, smoothing=0.3)
    true.backward()
    torch.testing.assert_close(out.metrics["loss"], true.detach())
    for mine, whole in zip(leaves[:2], everyone, strict=False):
        torch.testing.assert_close(mine.grad, 2 * whole.grad[own])
    torch.testing.assert_close(comm.all_reduce_sum(leaves[2].grad) / 2, everyone[2].grad)
    return [comm.size()]


def test_example_keeps_the_contract_on_two_ranks(package):
    assert run_ranks(gradients_of_ranks, 2, str(package)) == [[2], [2]]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "nowhere.at_all:Loss",
            {},
            r"No module named 'nowhere'; .*PYTHONPATH",
        ),
        ("our_package.nothing:Loss", {}, r"No module named 'our_package\.nothing'"),
        (
            "our_package.broken:Loss",
            {},
            r"our_package\.broken:Loss cannot be imported: .*'no_such_library'",
        ),
        (
            "our_package.fails:Loss",
            {},
            r"our_package\.fails:Loss cannot be imported: ZeroDivisionError",
        ),
        (
            "our_package.my_losses:Smooth",
            {},
            r"my_losses has no Smooth; did you mean SmoothedLoss\?$",
        ),
        (
            "our_package.others:Plain",
            {},
            r"Plain is not a Loss: .*disco_ds\.losses\.Loss",
        ),
        ("our_package.others:NoForward", {}, r"NoForward needs .*forward\(embeddings\)"),
        ("our_package.others:torch", {}, r"torch is not a Loss"),
        ("our_package.others:", {}, r"not of the form package\.module:name"),
        (":Loss", {}, r"not of the form package\.module:name"),
        (".others:Loss", {}, r"not of the form package\.module:name"),
        (NAME, {"smooth": 1}, r"has no option smooth; its options: smoothing$"),
        ("our_package.others:Bare", {"tile": 1}, r"has no option tile; its options: none$"),
        (
            "our_package.others:Wider",
            {"wire": 1},
            r"has no option wire; its options: margin, same_group, ",
        ),
    ],
)
def test_mistake_is_named(name, options, words, package):
    with pytest.raises(ValueError, match=words) as caught:
        build_loss(name, **options)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("loss", r"must return a LossOutput, but returned a Tensor$"),
        ("(loss, {})", r"must return a LossOutput, but returned a tuple$"),
        ("Output(loss)", r"must return the metric 'loss' .*, but the metrics are \[\]$"),
        ("Output(loss.detach(), out.metrics)", r"a loss without a gradient: .* without detaching"),
    ],
)
def test_output_that_breaks_the_contract_is_named(what, words, package):
    loss = build_loss("our_package.others:Returns", what=what)
    rows = F.normalize(torch.randn(4, 3)).requires_grad_()
    with pytest.raises(ValueError, match=r"^our_package\.others:Returns\.forward .*" + words):
        loss(Embeddings(rows, rows, torch.ones(1)))


@pytest.mark.slow
def test_output_that_breaks_the_contract_ends_the_run_in_one_line(package, tmp_path):
    path = recipe(
        tmp_path, loss={"name": "our_package.others:Returns", "options": {"what": "loss"}}, steps=2
    )
    done = disco_ds("train", "--config", str(path), cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(
        r"error on .*: our_package\.others:Returns\.forward must return a LossOutput", done.stderr
    )


def test_options_that_a_constructor_passes_on_are_those_of_its_base(package):
    loss = build_loss("our_package.others:Wider", margin=0.5, tile=[8, 16])
    assert loss.tiling.tile == [8, 16]
    assert build_loss("our_package.others:Open", anything=1).options == {"anything": 1}


def test_plan_asks_the_class_what_it_costs(package):
    assert loss_cost(NAME, {}, 8, 2, 4).received_bytes == 16 * 8 * 4
    with pytest.raises(
        ValueError,
        match=r"our_package\.others:Unplanned.* cost\(",
    ):
        loss_cost("our_package.others:Unplanned", {}, 8, 2, 4)


def test_settings_take_the_name_as_it_is():
    assert settings(loss={"name": NAME}).loss.name == NAME
