"""Translate open_clip_train's flags and other trainers' setting names into the settings of this package.

The table of translations is in open_clip_flags.yaml. Messages about unknown settings and options use
the table, and tools/make/reference.py writes it into docs/from_open_clip.md.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def read_words() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the table as {section: {flag: row}}.

    The sections are "flags" (open_clip_train's flags) and "other_words" (names from other trainers).
    A row has at least one of these keys: `ours`, a list of our corresponding settings or command-line
    options, and `note`, an explanation of the flag. If only one major release of open_clip has the
    flag, `only` names this release.
    """
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def explain_word(name: str) -> str | None:
    """Return a hint about our equivalent of another trainer's flag, or None if the flag is unknown."""
    word = name.lower().lstrip("-").replace("_", "-")
    words = read_words()
    row = words["flags"].get(word) or words["other_words"].get(word)
    if row is None:
        return None
    note = row.get("note", "")
    if "ours" not in row:
        return f"{note} (docs/from_open_clip.md)"
    hint = f"; {note}" if note else ""
    return f"here it is {' or '.join(row['ours'])}{hint}"
