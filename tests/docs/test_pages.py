"""Links and commands in the README and the manual are valid, and the README's example runs."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
import yaml

from disco_ds.cli.options import COMMANDS, make_parser
from disco_ds.config import PACKAGE
from helpers.paths import ROOT

FOLDERS = ("docs", "tools")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MAX_WORDS = 1000
RECIPES = {path.stem for path in (PACKAGE / "recipes").glob("*.yaml")}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from a page's headings."""
    found: list[str] = []
    for heading in re.findall(
        r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    ):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return set(found)


def links(text: str) -> Iterator[str]:
    """Yield the targets of links and pictures that are files."""
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if not re.match(r"https?://", target):
            yield target


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in links(text):
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        if not place.exists() or (
            anchor and (place.suffix != ".md" or anchor not in anchors(place))
        ):
            broken.append(target)
    return broken


def code(text: str) -> Iterator[str]:
    """Yield every line of code, in a fence or between backquotes."""
    for _, block in FENCE.findall(text):
        yield from block.splitlines()
    yield from re.findall(r"^    (.*)$", FENCE.sub("", text), re.MULTILINE)
    yield from re.findall(r"`([^`]+)`", FENCE.sub("", text))


def unknown_commands(text: str) -> list[str]:
    """Return lines of code with a command, option, recipe, tool, test or module that does not exist."""
    return [
        line for line in code(text) if any(missing(line.split(" #")[0].replace('"', " ").split()))
    ]


def missing(command: list[str]) -> Iterator[str]:
    targets = re.findall(
        r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    if (
        command[:1] == ["make"]
        and command[1:]
        and re.fullmatch(r"[a-z-]+", command[1])
        and command[1] not in targets
    ):
        yield command[1]
    for word, name in pairwise(["", *command]):
        if word == "disco-ds" and re.fullmatch(r"[a-z]+", name):
            yield from missing_of(name, command[command.index(name) + 1 :])
        if word == "--config" and re.fullmatch(r"[a-z0-9_]+", name) and name not in RECIPES:
            yield name
        if word in ("-m", "--module") and name.startswith("disco_ds") and find_spec(name) is None:
            yield name
        path = ROOT / name.replace(".", "/")
        if word == "-m" and name.startswith("tools.") and not path.with_suffix(".py").is_file():
            yield name
        if (
            re.match(r"(tools|tests)/[\w/]+\.py", name)
            and not (ROOT / name.split("::")[0]).is_file()
        ):
            yield name


def missing_of(name: str, words: list[str]) -> Iterator[str]:
    """Yield the name of an unknown command, or the unknown options of a known one."""
    if name not in COMMANDS:
        yield name
        return
    known = set(re.findall(r"--[a-z-]+", make_parser(name).format_help()))
    for word in takewhile(lambda word: word not in ("--deepspeed", "|", "&&"), words):
        if re.match(r"--[a-z]", word) and word.partition("=")[0] not in known:
            yield word


@pytest.mark.parametrize("name", NAMES)
def test_link_leads_somewhere(name: str) -> None:
    assert not broken_links(ROOT / name, (ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_command_exists(name: str) -> None:
    assert not unknown_commands((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text", ["[a](nowhere.md)", "[a](docs/losses.md#nothing)", "![a](docs/none.png)", "[a](#no)"]
)
def test_broken_link_is_found(text: str) -> None:
    assert broken_links(ROOT / "README.md", text)


@pytest.mark.parametrize(
    "text",
    [
        "`disco-ds trian --config my.yaml`",
        "```\ndisco-ds plan --config my.yaml --rank 8   # one rank\n```",
        "`make tests`",
        "    python tools/bench.py\n",
        "`pytest tests/training/test_nothing.py`",
        "    python -m tools.bench.nothing\n",
        "`deepspeed --module disco_ds.training.train`",
        "`disco-ds train --config quikstart`",
    ],
)
def test_unknown_command_is_found(text: str) -> None:
    assert unknown_commands(text)


@pytest.mark.parametrize("name", NAMES)
def test_yaml_can_be_read(name: str) -> None:
    for language, block in FENCE.findall((ROOT / name).read_text(encoding="utf-8")):
        if language == "yaml":
            yaml.safe_load(block)


def test_readme_is_short() -> None:
    words = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert words <= MAX_WORDS


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (
        block
        for kind, block in FENCE.findall((ROOT / "README.md").read_text("utf-8"))
        if kind == "python"
    )
    exec(example, {})
    assert "torch.Size([4096, 512])" in capsys.readouterr().out


def test_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"^- \[[^]]+\]\(([\w.]+)\)", index, re.MULTILINE)) == pages


def test_section_of_the_losses_that_the_code_cites_exists() -> None:
    sections = set(
        re.findall(
            r"^## (\d)\. ", (ROOT / "docs" / "losses.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    cited = {
        number
        for folder in ("disco_ds", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for words in re.findall(
            r"losses\.md sections? (\d(?:(?: and | to |, )\d)*)", path.read_text(encoding="utf-8")
        )
        for number in re.findall(r"\d", words)
    }
    assert {"1", "2", "3", "5", "6"} <= cited <= sections
