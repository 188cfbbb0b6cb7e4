"""Flags of open_clip_train and names used by other trainers, with the settings that correspond to them.

The table is in open_clip_flags.yaml. Messages about unknown settings and options use it, and
tools/make_reference.py writes it into docs/from_open_clip.md.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def read_words() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the table by section: "flags" (of open_clip_train) and "other_words".

    The row of a flag has `ours`, dotted names of settings or options of the command line, and a
    `note`; one of them may be missing.
    """
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def explain_word(name: str) -> str | None:
    """Return our equivalent of another trainer's flag, or None if the flag is unknown."""
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
