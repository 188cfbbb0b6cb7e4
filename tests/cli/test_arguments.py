"""The command line: arguments, help texts, the dry run, and how arguments reach the ranks."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from disco_ds.cli.main import main
from disco_ds.cli.options import COMMANDS, parse_args
from disco_ds.config import load_config
from disco_ds.launch.hosts import read_hosts
from disco_ds.launch.launcher import front_end
from disco_ds.launch.packing import pack
from tools.make import demo

WITHOUT_TORCH = """
import sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.stdout.flush()
            raise SystemExit(7)
sys.meta_path.insert(0, Stop())
from disco_ds.cli.main import main
main(["train", "--config", "quickstart"])
"""


def test_train_prints_a_line_before_it_loads_torch(tmp_path: Path) -> None:
    """The program ends with code 7 as soon as torch is imported."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("quickstart: loading ")


# The dry run


def test_dry_run_shows_the_batch_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--config", "quickstart", "--dry-run", "--ranks", "4"]
    assert main([*words, "micro_batch=8"]) == 0
    printed = capfd.readouterr().out
    assert re.search(r"128 = 4 ranks\D+8\D+4\D", printed)
    assert '"gradient_accumulation_steps": 4' in printed
    assert not list(tmp_path.iterdir())


def test_dry_run_mistakes_exit_with_2_and_one_line(tmp_path: Path) -> None:
    words = ["--config", "quickstart", "--dry-run", "deepspeed=missing"]
    command = [sys.executable, "-m", "disco_ds", "train", *words]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: deepspeed: there is no file 'missing'")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_dry_run_finds_mistakes_in_settings_before_it_imports_the_model_libraries(
    tmp_path: Path,
) -> None:
    script = (
        "import sys; from disco_ds.cli.main import main; code = main()"
        "; print('seen', code, {'open_clip', 'torchvision', 'timm', 'webdataset'} & set(sys.modules))"
    )
    command = [
        sys.executable,
        "-c",
        script,
        "train",
        "--config",
        "quickstart",
        "--dry-run",
        "micro_batch=7",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines()[-1] == "seen 2 set()"
    assert "nearest: global_batch=" in done.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("loss.name=disco_fusd", "unknown loss 'disco_fusd'; did you mean disco_fused?"),
        ("loss.options={tyle: 64}", "has no option tyle"),
        ("loss={name: fastclip_v1, options: {eps: -1}}", "loss.options.eps=-1: "),
        ("loss.name=nowhere.losses:Mine", "No module named 'nowhere'"),
        ("model.name=ViT-B-23", "unknown model 'ViT-B-23'; did you mean ViT-B-32?"),
        ("model.pretrained=none.pt", "model.pretrained: none.pt is not a file"),
        ("data.shards=ftp://example.org/{0..9}.tar", "ftp:// is not supported: use one of http://"),
        ("eval.labeled={far: 'pipe:cat x.tar'}", "set data.remote.pipe=true"),
        ("data.shards=ftp://bucket/{0..9}.tar", "ftp://"),
    ],
)
def test_dry_run_refuses_what_a_start_would(
    override: str, words: str, tmp_path: Path, capfd: Any
) -> None:
    assert main(["train", "--config", "quickstart", "--dry-run", override]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.count("\n") < 3


def test_dry_run_is_for_the_ranks_of_the_recipe_and_needs_no_data(
    tmp_path: Path, capfd: Any
) -> None:
    assert (
        main(
            [
                "train",
                "--config",
                "quickstart",
                "--dry-run",
                "ranks=4",
                "micro_batch=8",
                "data.shards=/not/here",
            ]
        )
        == 0
    )
    assert "= 4 ranks x" in capfd.readouterr().out


def test_dry_run_refuses_a_warmup_longer_than_epochs_of_data_that_is_here(
    tmp_path: Path, capfd: Any
) -> None:
    words = ["train", "--config", "quickstart", "--dry-run", "samples=null", "epochs=1"]
    assert main([*words, "optim.warmup_steps=2000"]) == 2
    assert "optim.warmup_steps + optim.cooldown_steps (2000 + 0) exceed" in capfd.readouterr().err
    # Without the data, the length of an epoch is unknown.
    assert main([*words, "optim.warmup_steps=2000", "data.shards=/not/here"]) == 0


def test_help_imports_no_library(tmp_path: Path) -> None:
    script = """
import sys
from disco_ds.cli.main import main
from disco_ds.cli.options import COMMANDS

for argv in ([], ["--help"], *([name, "--help"] for name in COMMANDS)):
    try:
        main(argv)
    except SystemExit as end:
        print("\\nseen", end.code, {"torch", "deepspeed", "yaml", "open_clip"} & set(sys.modules))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("seen")] == [
        "seen 0 set()"
    ] * (len(COMMANDS) + 2)
    assert done.stdout.count("usage: disco-ds ") == len(COMMANDS) + 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["trian"], "'trian'"), (["--config", "x"], "COMMAND"), (["plan"], "--config")],
)
def test_wrong_command_exits_with_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "eval", "doctor"])
def test_missing_variables_of_a_launcher_are_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    arguments = ["--config", "quickstart"] if command != "eval" else ["missing"]
    assert main([command, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: RANK is set but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; "
    )
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--x 'y", "No closing quotation"),
        ('--x "y', "No closing quotation"),
        ("--x \\", "No escaped character"),
    ],
)
def test_options_with_an_open_quote_are_refused(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--config", "quickstart", "--deepspeed", text])
    assert f"--deepspeed: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [None, "", "a", "a slots=x", "a slots=1\na slots=1", "\xff slots=1"]
)
def test_missing_or_malformed_hostfile_is_refused(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"Hostfile|expected `host slots=GPUs`|hostfile .*hosts"):
        read_hosts(path, "")


def test_parse_args_takes_overrides_and_the_launchers_rank() -> None:
    args = parse_args(
        ["train", "--local_rank=1", "--config", "x", "a=1", "b.c=2", "--resume", "latest"]
    )
    assert (args.config, args.overrides, args.resume, args.dry_run) == (
        "x",
        ["a=1", "b.c=2"],
        "latest",
        False,
    )


@pytest.mark.parametrize("argv", [[], ["--config"], ["--config", "x", "--hostfile", "f"]])
def test_parse_args_refuses(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["train", *argv])
    assert caught.value.code == 2
    assert "usage: disco-ds train" in capsys.readouterr().err


# On the way to the ranks

HOSTILE = [
    "data.shards=/data/{00000..00003}.tar",
    "data.captions={'{json[title]}':1,\"{txt}\":2e-1}",
    "eval.caption_key=$(touch ran) `touch ran` $HOME ${HOME} ~ ~/x * ? [a-z] %h %n %u %%",
    "eval.label_key={a,b};touch ran&touch ran|cat>ran<ran#!! \\ \\\\ \\n\n\t''\"",
    "name=Füße 猫 \u2028 \U0001f600",
]
SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh", "csh", "fish") if shutil.which(shell)]
PRINT = "import json, sys; print(json.dumps(sys.argv[1:]))"


def arrived(words: list[str], shell: str, folder: Path) -> list[str]:
    """Return the trainer's arguments as they arrive on a host, after deepspeed's runner, pdsh and the shell.

    Args:
        words: Arguments of deepspeed.
        shell: Login shell of the host.
        folder: Working directory of the shell.
    """
    from deepspeed.launcher.multinode_runner import PDSHRunner
    from deepspeed.launcher.runner import parse_args as parse_front_end

    runner = PDSHRunner(parse_front_end(words), "e30=")
    command, *_ = runner.get_cmd({}, {"host-1": 1, "host-2": 1})
    ours = command[command.index("disco_ds.train") + 1 :]
    line = " ".join([sys.executable, "-c", f"'{PRINT}'", *ours])
    done = subprocess.run(
        [shell, "-c", line], cwd=folder, capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("shell", SHELLS)
def test_launch_passes_arguments_to_the_ranks_as_typed_through_any_shell(
    shell: str, tmp_path: Path
) -> None:
    (tmp_path / "x").touch()  # a shell could replace * and ? by this name
    config, resume = "a recipe's $HOME {1,2}.yaml", "runs/{a,b} *"
    args = parse_args(
        [
            "launch",
            "--config",
            config,
            "--resume",
            resume,
            *HOSTILE,
            "--deepspeed",
            "--master_port 1",
        ]
    )
    command = front_end(args, load_config("quickstart"), {}, [], "id", args.resume)
    got = parse_args(["train", *arrived(command[3:], shell, tmp_path)])
    assert (got.config, got.resume, got.overrides, got.launch_id) == (config, resume, HOSTILE, "id")
    assert [path.name for path in tmp_path.iterdir()] == ["x"], (
        "a shell has run a part of the arguments as a command"
    )


def test_bare_overrides_do_not_arrive_as_typed(tmp_path: Path) -> None:
    """Shells change arguments of `deepspeed`. `disco-ds launch` packs them, so that shells do not change them."""
    typed = ["deepspeed", "--module", "disco_ds.train", "--config", "x", HOSTILE[0]]
    got = parse_args(["train", *arrived(typed[1:], "bash", tmp_path)])
    assert got.overrides == [f"data.shards=/data/{number:05}.tar" for number in range(4)]
    # The quoting that docs/launch.md recommends.
    quoted = [f"'{HOSTILE[0]}'", r"name=a \$b", "data.captions={'{txt}': 1, \"x\": 2}"]
    got = parse_args(["train", *arrived([*typed[1:5], *quoted], "bash", tmp_path)])
    assert got.overrides == [HOSTILE[0], "name=a $b", "data.captions={'{txt}': 1, \"x\": 2}"]


def test_demo_passes_arguments_to_the_ranks_as_typed() -> None:
    for given, ours in ((["name={a,b} c"], ["micro_batch=64"]), (["micro_batch=16"], [])):
        words = demo.front_end(
            demo.trainer_arguments(2, [*given, "--resume", "latest"]), gpus=0, ranks=2
        )
        got = parse_args(["train", *arrived(words[3:], "sh", Path.cwd())])
        assert (got.config, got.resume, got.overrides) == ("quickstart", "latest", ours + given)


def test_pack_is_one_word_without_shell_characters_and_keeps_every_byte() -> None:
    words = [*HOSTILE, "", b"runs/\xff\xfe".decode("utf-8", "surrogateescape"), "\x7f\x01"]
    for count in range(len(words) + 1):
        word = pack(["--config=x", "--", *words[:count]])
        assert re.fullmatch(r"--packed=[A-Za-z0-9_-]+", word)
        given = parse_args(["train", "--config=x", "--", *words[:count]])
        assert parse_args(["train", word, "--local_rank=3"]) == given


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["launch", "--config", "quickstart", "--restarts", "-5"],
            "--restarts must be greater than or equal to 0, got '-5'",
        ),
        (
            ["launch", "--config", "quickstart", "--restarts", "two"],
            "--restarts must be a valid integer, got 'two'",
        ),
        (
            ["plan", "--config", "quickstart", "--ranks", "0"],
            "--ranks must be greater than or equal to 1, got '0'",
        ),
        (
            ["index", "folder", "--workers", "-1"],
            "--workers must be greater than or equal to 0, got '-1'",
        ),
        (
            ["plan", "--config", "quickstart", "--slack", "2"],
            "--slack must be less than or equal to 1, got '2'",
        ),
        (
            ["plan", "--config", "quickstart", "--flops", "nan"],
            "--flops must be a finite number, got 'nan'",
        ),
        (["plan", "--config", "quickstart", "--bandwidth", "inf"], "got 'inf'"),
        (
            ["plan", "--config", "quickstart", "--host-memory", "-1"],
            "or equal to 0, got '-1'",
        ),
    ],
)
def test_number_out_of_range_is_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_warning_of_deepspeed_about_a_missing_gpu_is_not_printed() -> None:
    code = "from disco_ds.cli.main import main; print(main(['index', '/missing']))\n"
    code += (
        "from deepspeed.accelerator import get_accelerator; print(get_accelerator().device_name())"
    )
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.stdout == "2\ncpu\n", ran
    assert "Setting accelerator" not in ran.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--config", "quickstart"],
        pytest.param(["eval", "ViT-B-32", "eval.labeled.x=."], marks=pytest.mark.slow),
    ],
)
def test_port_in_use_is_one_line(command: list[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ranks = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        whole = [sys.executable, "-m", "disco_ds", *command]
        environment = os.environ | ranks
        done = subprocess.run(
            whole, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert f"rank 0 cannot meet the others at 127.0.0.1:{port}: " in line
