"""A faster form of open_clip's built-in tokenizer.

Data workers import this module, so it imports nothing but open_clip.
"""

from collections.abc import Callable
from typing import Any

from open_clip.tokenizer import (
    SimpleTokenizer,
    canonicalize_text,
    get_clean_fn,
    whitespace_clean,
)


class FastTokenizer(SimpleTokenizer):
    """open_clip's built-in tokenizer, with equal tokens in less than half the time for plain text.

    Plain text is printable ASCII without "&". open_clip also repairs wrongly decoded characters and HTML entities. This
    takes most of its time, but plain text has neither. Other text goes through the code of open_clip.

    Args:
        tokenizer: The tokenizer to imitate. Its tables are shared.
    """

    def __init__(self, tokenizer: SimpleTokenizer) -> None:
        self.__dict__.update(vars(tokenizer))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without the start and end tokens."""
        clean = _CLEAN_PLAIN.get(self.clean_fn)
        if clean is None or "&" in text or not (text.isascii() and text.isprintable()):
            return super().encode(text)
        # open_clip first maps each byte of a word to a character. This is left out here, because it maps every byte of
        # plain text to itself.
        words = [self.bpe(word) for word in self.pat.findall(clean(whitespace_clean(text)))]
        return [self.encoder[part] for word in words for part in word.split(" ")]


_CLEAN_PLAIN: dict[Any, Callable[[str], str]] = {
    get_clean_fn("canonicalize"): canonicalize_text,
    get_clean_fn("lower"): str.lower,
    get_clean_fn("whitespace"): str,
}
"""Maps each of open_clip's functions that clean a text to a function with the same effect on plain text, after spaces
have been joined."""
