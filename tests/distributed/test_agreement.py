"""If settings differ between ranks, all ranks stop before any work, with an error that names the settings."""

import os
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from disco_ds.cli.main import main
from disco_ds.config import load_config
from disco_ds.distributed import comm, hosts
from disco_ds.distributed.hosts import check_agreement, check_code, find_differences
from helpers.dist import run_ranks
from helpers.shards import write_shards
from helpers.tiny_run import recipe, refused


def differing_settings() -> list[str]:
    """Return the error message for each pair of settings."""
    rank = comm.rank()
    check_agreement({"same": {"a": 1, "b": [None, 2.5]}})
    said = []
    for mine in (
        {"data": {"shards": f"/data/Fü{rank}.tar", "workers": 2}},
        {"deepspeed": [{"stage": None}, {}][rank], "loss": {"options": {}}},
        {"runs": ["1", 1][rank], "--resume": [None, "latest"][rank]},
        {f"key-{number}": number * rank for number in range(9)},
    ):
        with pytest.raises(ValueError) as caught:
            check_agreement(mine)
        said.append(str(caught.value))
    return said


def check_settings(first: list[str]) -> None:
    host = socket.gethostname()
    zero, one = (f"on {host} (rank {number})" for number in range(2))
    shards, stage, kinds, many = (said.split("\n  ") for said in first)
    assert shards[0] == "the ranks have different settings:"
    assert shards[1].startswith(
        f'data.shards: "/data/Fü0.tar" {zero}; "/data/Fü1.tar" {one}\nthe remote shell expands'
    )
    assert stage[1].startswith(f"deepspeed.stage: null {zero}; not given {one}\n")
    assert kinds[1] == f'--resume: null {zero}; "latest" {one}'
    assert kinds[2].startswith(f'runs: "1" {zero}; 1 {one}\n')
    assert [line.partition(":")[0] for line in many[1:]] == [
        f"key-{number}" for number in range(1, 9)
    ]


def differing_code(folder: Path) -> str:
    version = metadata.version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: f"{version(name)}.{name}-{comm.rank()}")
        patch.setattr(hosts, "PACKAGE", folder / str(comm.rank()))
        with pytest.raises(ValueError) as caught:
            check_code()
    return str(caught.value)


def check_said_of_code(said: str) -> None:
    assert said.startswith("the ranks have different code:\n  deepspeed: ")
    assert "\n  disco_ds: " in said
    assert f"on {socket.gethostname()} (rank 1)" in said
    assert said.endswith("install the same code and libraries on all hosts")


def test_many_hosts_are_grouped_by_value() -> None:
    (said,) = find_differences([(f"node-{rank // 2}", {"a": str(rank % 2)}) for rank in range(4)])
    assert said == "a: 0 on node-0, node-1 (ranks 0, 2); 1 on node-0, node-1 (ranks 1, 3)"


def start_trainer(recipe: Path, *words: str) -> int:
    """Run the trainer, with {rank} in `words` replaced by this rank. Return its exit code."""
    os.chdir(recipe.parent)
    mine = [word.format(rank=os.environ["RANK"]) for word in words]
    # The model does not exist. `build` would report that, but the trainer must stop earlier.
    return main(["train", "--config", recipe.name, "model.name=nowhere", *mine])


def test_trainer_stops_before_any_work_where_a_rank_has_other_settings(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "seed={rank}", "--resume={rank}"
    assert run_ranks(start_trainer, 2, recipe, *words, joined=False) == [2, 2]
    said = capfd.readouterr().out  # run_ranks redirects stderr to stdout
    assert (
        f"seed: 0 on {socket.gethostname()} (rank 0); 1 on {socket.gethostname()} (rank 1)" in said
    )
    assert said.count("error on") == 1
    assert '--resume: "0" on ' in said
    assert [path.name for path in recipe.parent.iterdir()] == [recipe.name], (
        "no run folder may be created"
    )


def start_where_rank_1_has_no_recipe(recipe: Path) -> list[int]:
    known = recipe if os.environ["RANK"] == "0" else recipe.with_name("missing.yaml")
    evaluate = ["eval", str(recipe.parent), "eval.labeled.unseen=bundled:emoji/unseen"]
    return [main([*words, "--config", str(known)]) for words in (["train"], evaluate)]


def test_recipe_that_only_one_rank_cannot_read_ends_all_ranks(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = run_ranks(start_where_rank_1_has_no_recipe, 2, recipe, joined=False)
    said = capfd.readouterr().out
    assert codes == [[2, 2], [2, 2]], said
    errors = [line for line in said.splitlines() if "error on" in line]
    assert len(errors) == 2, said
    assert all("(rank 1)" in line and "missing.yaml" in line for line in errors), said


def build_in_own_folder(folder: Path) -> str:
    os.chdir(folder / f"host{comm.rank()}")
    return refused(
        load_config(
            recipe(folder, data={"shards": "data", "workers": 0, "slots": 2, "image_key": "jpg"})
        )
    )


def check_said_of_shards(said: str) -> None:
    """The data order depends on the shards' sizes, so ranks with different sizes would train in different orders."""
    assert "data.shards: " in said
    assert f"on {socket.gethostname()} (rank 1)" in said
    assert said.endswith("every host needs the same shards, manifest, csv and model config")


def find_listeners() -> list[str]:
    connections = psutil.Process().net_connections("tcp")
    return [found.laddr.ip for found in connections if found.status == psutil.CONN_LISTEN]


def differ(folder: Path) -> dict[str, Any]:
    return {
        "listeners": find_listeners(),
        "settings": differing_settings(),
        "code": differing_code(folder),
        "shards": build_in_own_folder(folder),
    }


def test_settings_code_and_shards_that_differ_are_named_on_every_rank(tmp_path: Path) -> None:
    for number, sizes in enumerate(([8, 8, 8], [8, 8, 9])):
        write_shards(tmp_path / f"host{number}" / "data", sizes)
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "slots.py").write_text(f"{number}")
    first, second = run_ranks(differ, 2, tmp_path)
    listeners = first.pop("listeners"), second.pop("listeners")
    assert "::" in listeners[0], (
        "torch's store of several ranks listens on all interfaces, or the next test proves nothing"
    )
    assert first == second
    check_settings(first["settings"])
    check_said_of_code(first["code"])
    check_said_of_shards(first["shards"])


def test_run_of_one_rank_listens_on_no_public_interface() -> None:
    (found,) = run_ranks(find_listeners, 1)
    assert not {"::", "0.0.0.0"} & set(found)
