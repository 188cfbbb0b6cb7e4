"""Determine a sample's caption and its group (data.group_by) from the sample's members.

The result of every function here depends only on the members, settings and random numbers that are passed to it.
"""

import hashlib
import json
import math
import re
import string
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

from PIL import Image

from disco_ds.data.errors import BrokenSample

Members = Mapping[str, Any]
"""A sample's members: the content of each of its files, keyed by extension. A content is bytes, unless data.transforms
replaced it with text, parsed JSON or a PIL image."""
Picture = bytes | Image.Image
"""An encoded image, or a decoded one if data.transforms decoded it."""
KEYS = re.compile(r"[^\[\]]+")
"""Matches each part of a template field: the name of the member, and the keys in brackets."""
_UNFILLED = (LookupError, TypeError, AttributeError, ValueError)
"""Exceptions that are raised if a field of a template is missing or cannot be used."""
_MAX_CAPTION = 2**14
"""Maximum number of bytes of a caption that are passed to the tokenizer."""
_MAX_WORD = 2**11
"""Maximum number of bytes of a word that are passed to the tokenizer."""


def pick_caption(
    weights: dict[str, float], members: Members, uniform: float, item: float = 0.0
) -> str:
    """Choose one of the caption templates at random, according to their weights, and fill it.

    A field in a template names a member of the sample: {txt} is the text of the member txt, {json[key]} is an entry of
    the parsed member json, {json[key][0]} is the first item of a list, and {json[key][*]} is a random item of it. A
    field must not be a whole list. {json[key]|txt} is the first of the alternatives that the sample has and that is
    not blank.

    Args:
        weights: The weight of each template, from data.captions.
        members: The sample's members by extension.
        uniform: Random number in [0, 1) that selects the template.
        item: Random number in [0, 1) that selects the items of lists.

    Raises:
        BrokenSample: If a field is missing or cannot be used, or if the caption is empty.
    """
    ends = list(accumulate(weights.values()))
    template = list(weights)[bisect_right(ends, uniform * ends[-1])]
    return fill_template(template, members, item)


def list_captions(weights: dict[str, float], members: Members) -> list[str]:
    """Return all captions that the templates can produce, in the order of the templates and of the items of lists.

    A template with `[*]` produces one caption for each item of the list. Items that are null or blank produce none, and
    neither does a template that cannot be filled. Several captions may have the same text.
    """
    captions: list[str] = []
    for template in weights:
        # Each choice of an item may lead to other choices: {a[*]|b[*]} uses an item of b only if that of a is blank.
        waiting: list[tuple[int, ...]] = [()]
        while waiting:
            filler = _Filler(0.0, waiting.pop())
            with suppress(*_UNFILLED):
                text = filler.vformat(template, (), members).strip()
                if text:
                    captions.append(text)
            waiting += filler.others
    return captions


def list_fields(template: str) -> set[str]:
    """Return the names of the members that a template refers to."""
    # For example, the field "json[label]" refers to the member json.
    fields = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    return {name.partition("[")[0] for field in fields for name in field.split("|")}


def fill_template(template: str, members: Members, item: float = 0.0, what: str = "caption") -> str:
    """Fill a template with the sample's members, and strip whitespace from both ends.

    Args:
        template: A template that config.data.check_template accepts.
        members: The sample's members.
        item: Random number in [0, 1) that selects the items of lists.
        what: What the filled template is called in messages.

    Raises:
        BrokenSample: If a field is missing or cannot be used, or if the result is empty. The message lists the sample's
            members.
    """
    seen = f"; the sample has {', '.join(members)}"
    try:
        text = _Filler(item).vformat(template, (), members).strip()
    except _UNFILLED as error:
        raise BrokenSample(f"{what} {template!r}: {type(error).__name__}: {error}{seen}") from None
    if not text:
        raise BrokenSample(f"{what} {template!r} is empty{seen}")
    return text


class _Filler(string.Formatter):
    """Fills templates, and chooses an item of a list for each `[*]`.

    `vformat` raises one of the types in _UNFILLED if a field is missing or cannot be used.

    Args:
        uniform: Random number in [0, 1) that determines the items, except the given ones.
        given: The first choices.
    """

    def __init__(self, uniform: float, given: tuple[int, ...] = ()) -> None:
        self._uniform, self._given = uniform, given
        self._items: tuple[int, ...] = ()
        """The choices so far."""
        self.others: list[tuple[int, ...]] = []
        """The first choices of other captions that follow this one, in reverse order. The remaining choices are 0."""

    def get_field(self, field_name: str, args: Any, kwargs: Members) -> tuple[str, str]:
        """Return the text of the first alternative whose value is not missing, null, NaN, infinite or blank.

        If all others are skipped, return the last alternative even if it is blank.
        """
        *others, last = field_name.split("|")
        for name in others:
            # Ignore only missing values. Any other error makes the sample broken.
            with suppress(LookupError):
                text = self._look_up(name, kwargs)
                if text.strip():
                    return text, field_name
        return self._look_up(last, kwargs), field_name

    def _choose(self, values: list[Any]) -> Any:
        """Choose an item of a list that is not empty."""
        if len(self._items) < len(self._given):
            item = self._given[len(self._items)]
        else:
            scaled = self._uniform * len(values)
            item = int(scaled)
            # Whichever item was drawn, the fractional part is uniform in [0, 1), so the next choice is independent.
            self._uniform = scaled % 1
            later = range(item + 1, len(values))
            self.others += [(*self._items, other) for other in reversed(later)]
        self._items += (item,)
        return values[item]

    def _look_up(self, name: str, members: Members) -> str:
        """Return the text of a member, such as txt, or of an entry of a JSON member, such as json[captions][0].

        Raises:
            LookupError: If the value is missing, null, NaN or infinite.
            ValueError: If the value is a list, an object or a boolean.
        """
        member, *keys = KEYS.findall(name)
        value = members[member]
        if isinstance(value, bytes):
            is_json = member.rpartition(".")[2] == "json"
            value = json.loads(value) if is_json else value.decode("utf-8")
        for key in keys:
            if value is None:
                break
            if key == "*":
                if not isinstance(value, list):
                    raise ValueError(f"{{{name}}} is not a list")
                if not value:
                    raise LookupError(f"{{{name}}} is an empty list")
                value = self._choose(value)
            else:
                value = value[int(key) if isinstance(value, list) else key]
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            raise LookupError(f"{{{name}}} is {value or 'null'}")
        if isinstance(value, (bool, dict, list)):
            raise ValueError(
                f"{{{name}}} is a {type(value).__name__}, not a text or a number; write {{{name}[0]}} for the first "
                f"item of a list, {{{name}[*]}} for a random one"
            )
        return str(value)


def find_group(group_by: str, members: Members, caption: str, image: Picture) -> int:
    """Return a 64-bit hash of the value that data.group_by names. Samples with equal values share a group.

    Args:
        group_by: The setting data.group_by: "caption", "image" or a template.
        members: The sample's members.
        caption: The caption that was chosen for this epoch.
        image: The encoded image, or the decoded one if data.transforms decoded it.

    Raises:
        BrokenSample: If group_by is a template that cannot be filled, or whose result is empty.
    """
    if group_by == "image":
        value = image if isinstance(image, bytes) else image.tobytes()
    else:
        text = caption if group_by == "caption" else fill_template(group_by, members, what="group")
        value = text.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(value, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def shorten_caption(text: str) -> str:
    """Shorten a very long caption, to limit the time that the tokenizer takes.

    CLIP's byte pair encoding takes time quadratic in the length of a word: 10 s for 16,000 letters. A caption of at
    most 2,048 bytes is not changed. A longer caption is cut to 16,384 bytes, and each of its words to 2,048 bytes. This
    rarely affects the tokens: one token of CLIP's vocabulary stands for about 5 bytes on average, so CLIP's context of
    77 tokens is usually full much earlier. Text without spaces, such as Chinese or Thai, is treated as one word, so it
    is cut after 682 characters.
    """
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= _MAX_WORD:
        return text
    # Only these characters count as separators. Tokenizers remove other separators, such as control characters, and
    # would thereby join the words around them.
    data = re.sub(rb"([^ \t\r\n]{%d})[^ \t\r\n]+" % _MAX_WORD, rb"\1", data[:_MAX_CAPTION])
    # "ignore" drops the bytes of a character that was cut in the middle.
    return data.decode("utf-8", "ignore")
