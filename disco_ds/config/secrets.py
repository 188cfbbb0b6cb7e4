"""Secrets in the text of settings: refused there, because recipes are copied into run folders, and hidden in messages.

A recipe names an environment variable instead. In a URL, `https://host/{0..9}.tar?token=$TOKEN`, it is expanded when a
shard is fetched; in `pipe:curl -H "Authorization: Bearer $TOKEN" ...` by the command's shell.
"""

from __future__ import annotations

import os
import re

_NAMES = r"[\w-]*(?:signature|\bsig|token|secret|passw|pwd|credential|authorization|cookie|api[-_]?key|access[-_]?key)"
_SCHEME = r"(?:bearer|basic|token)\s+"
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # https://user:password@host, https://token@host
        r"(?P<what>://[^/\s:@'\"]*:)(?P<value>[^/\s@'\"$][^/\s@'\"]*)(?=@)",
        r"(?P<what>https?://)(?P<value>[^/\s:@'\"$][^/\s:@'\"]*)(?=@)",
        # ?X-Amz-Signature=..., "Authorization: Bearer ..."
        rf"(?P<what>{_NAMES}[\w-]*['\"]?\s*[=:]\s*['\"]?(?:{_SCHEME})?)(?!{_SCHEME})(?P<value>[^\s&'\"$(`][^\s&'\"]*)",
        # --password ...
        rf"(?P<what>\s-{_NAMES}[\w-]*(?<!-file)\s+['\"]?)(?P<value>[^\s'\"$(`-][^\s'\"]*)",
        # curl -u user:password
        r"(?P<what>\s(?:-u|--user)[\s=]*['\"]?[^\s:'\"]+:)(?P<value>[^\s'\"$(`][^\s'\"]*)",
    )
]
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def refuse_secret(text: str) -> str:
    """The text of a setting. Raises: ValueError for a password, token or signature that is written out in it."""
    for pattern in _PATTERNS:
        if found := pattern.search(text):
            what = found["what"].strip()
            raise ValueError(
                f"a secret is written out after {what!r}, and settings are copied into run folders and logs: write "
                f"{what}$NAME, and set the environment variable NAME on every host"
            )
    return text


def redact(text: str) -> str:
    """The text of a message without what refuse_secret would refuse."""
    for pattern in _PATTERNS:
        text = pattern.sub(r"\g<what>***", text)
    return text


def expand(text: str) -> str:
    """Put the values of environment variables in the place of $NAME and ${NAME}. Raises: ValueError for unset ones."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in os.environ:
            raise ValueError(f"the environment variable {name} is not set; a $ that names none is %24 in a URL")
        return os.environ[name]

    return _VARIABLE.sub(value, text)
