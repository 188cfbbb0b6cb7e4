"""Detect secrets, to refuse them in settings and to mask them in messages.

Settings are copied into run folders, so they must not contain secrets. A recipe contains the name of an environment
variable instead. In a URL such as `https://host/{0..9}.tar?token=$TOKEN`, the variable is expanded when a shard is
fetched. In `pipe:curl -H "Authorization: Bearer $TOKEN" ...`, the shell that runs the command expands the variable.
"""

import os
import re

_NAMES = r"[\w-]*(?:signature|\bsig|token|secret|passw|pwd|credential|authorization|cookie|api[-_]?key|access[-_]?key)"
_QUERY = "key|auth|bearer|cred|hmac|jwt|pass|sas|session|session[-_]?id|ticket"
"""A URL's query parameter whose name ends in one of these words is a credential.

Outside of a query, the words do not count, because they have other meanings there.
"""
_SCHEME = r"(?:bearer|basic|token)\s+"
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # https://user:password@host, https://token@host
        r"(?P<what>://[^/\s:@'\"]*:)(?P<value>[^/\s@'\"$][^/\s@'\"]*)(?=@)",
        r"(?P<what>https?://)(?P<value>[^/\s:@'\"$][^/\s:@'\"]*)(?=@)",
        # ?X-Amz-Signature=..., "Authorization: Bearer ..."
        rf"(?P<what>{_NAMES}[\w-]*['\"]?\s*[=:]\s*['\"]?(?:{_SCHEME})?)(?!{_SCHEME})(?P<value>[^\s&'\"$(`][^\s&'\"]*)",
        # ?key=..., &auth=...
        rf"(?P<what>[?&][\w.-]*(?:{_QUERY})=)(?P<value>[^\s&'\"$(`][^\s&'\"]*)",
        # --password ...
        rf"(?P<what>\s-{_NAMES}[\w-]*(?<!-file)\s+['\"]?)(?P<value>[^\s'\"$(`-][^\s'\"]*)",
        # curl -u user:password
        r"(?P<what>\s(?:-u|--user)[\s=]*['\"]?[^\s:'\"]+:)(?P<value>[^\s'\"$(`][^\s'\"]*)",
    )
]
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def refuse_secret(text: str) -> str:
    """Return the text of a setting unchanged, unless it contains a secret.

    Raises:
        ValueError: If the text contains a password, token or signature in plain text.
    """
    for pattern in _PATTERNS:
        if found := pattern.search(text):
            what = found["what"].strip()
            raise ValueError(
                f"contains a secret after {what!r}, but settings are copied into run folders and "
                f"logs: write {what}$NAME and set the environment variable NAME on every host"
            )
    return text


def redact(text: str) -> str:
    """Return a message in which every secret that refuse_secret would detect is replaced by ***."""
    for pattern in _PATTERNS:
        text = pattern.sub(r"\g<what>***", text)
    return text


def expand(text: str) -> str:
    """Replace $NAME and ${NAME} with the values of environment variables.

    Raises:
        ValueError: If a variable is not set.
    """
    for found in VARIABLE.finditer(text):
        name = found[1] or found[2]
        if name not in os.environ:
            raise ValueError(
                f"the environment variable {name} is not set; in a URL, write %24 for a literal $"
            )
    return os.path.expandvars(text)
