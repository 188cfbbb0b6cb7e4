"""open_clip_train's flags and other words that people bring, with the settings that correspond to them.

The table is open_clip_flags.yaml. An unknown setting or option is explained by it, and
docs/from_open_clip.md shows it (tools/make_reference.py).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import yaml


class Flag(NamedTuple):
    """What corresponds to a word of another trainer."""

    ours: tuple[str, ...]
    """Dotted names of settings, or options of the command line; empty if there are none."""
    note: str


@lru_cache
def read_words() -> dict[str, dict[str, Flag]]:
    """Return the words by section: "flags" of open_clip_train, and "other_words"."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {
        section: {
            name: Flag(tuple(row.get("ours", ())), row.get("note", ""))
            for name, row in rows.items()
        }
        for section, rows in yaml.safe_load(text).items()
    }


def explain_word(name: str) -> str | None:
    """Return a sentence about a word of another trainer, or None if the word is unknown."""
    word = name.lower().lstrip("-").replace("_", "-")
    words = read_words()
    flag = words["flags"].get(word) or words["other_words"].get(word)
    if flag is None:
        return None
    if not flag.ours:
        return f"{flag.note} (docs/from_open_clip.md)"
    note = f"; {flag.note}" if flag.note else ""
    return f"here it is {' or '.join(flag.ours)}{note}"
