"""docs/settings.md is up to date, and every setting has a meaning."""

from disco_ds.config import Config
from tools.make import reference


def test_page_is_what_the_code_says() -> None:
    committed = reference.PAGE.read_text(encoding="utf-8")
    assert reference.settings_page() == committed, "run `python -m tools.make.reference`"


def test_every_setting_has_a_meaning() -> None:
    bare = [row[0] for title, model in reference.sections("", Config) for row in reference.rows(title, model)
            if not row[3]]  # fmt: skip
    assert not bare
    names = {title for title, _ in reference.sections("", Config)}
    assert {"", "data.", "data.sources[].", "optim.image."} <= names, (
        "the page must contain groups of settings"
    )
