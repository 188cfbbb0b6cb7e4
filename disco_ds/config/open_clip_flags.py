"""Flags of open_clip_train and names used by other trainers, with the settings that correspond to them.

The table is in open_clip_flags.yaml. Messages about unknown settings and options use it, and
tools/make_reference.py writes it into docs/from_open_clip.md.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import yaml


class Flag(NamedTuple):
    """Our equivalent of another trainer's flag."""

    ours: tuple[str, ...]
    """Dotted names of settings, or options of the command line; empty if there are none."""
    note: str


@lru_cache
def read_words() -> dict[str, dict[str, Flag]]:
    """Return the table by section: "flags" (of open_clip_train) and "other_words"."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {
        section: {
            name: Flag(tuple(row.get("ours", ())), row.get("note", ""))
            for name, row in rows.items()
        }
        for section, rows in yaml.safe_load(text).items()
    }


def explain_word(name: str) -> str | None:
    """Return our equivalent of another trainer's flag, or None if the flag is unknown."""
    word = name.lower().lstrip("-").replace("_", "-")
    words = read_words()
    flag = words["flags"].get(word) or words["other_words"].get(word)
    if flag is None:
        return None
    if not flag.ours:
        return f"{flag.note} (docs/from_open_clip.md)"
    note = f"; {flag.note}" if flag.note else ""
    return f"here it is {' or '.join(flag.ours)}{note}"
