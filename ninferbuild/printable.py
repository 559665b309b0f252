"""Text for terminals and logs: names of untrusted files may hold characters that steer a terminal."""

from __future__ import annotations

import re

_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, separators of lines and paragraphs, and what changes the direction of text."""

_SHORT = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def printable(text: str, keep: str = "") -> str:
    """``text`` with what steers a terminal as Python escapes it (``\\x1b``), but for the characters in ``keep``."""
    return _STEERING.sub(lambda match: match[0] if match[0] in keep else _escaped(match[0]), text)


def printable_lines(text: str) -> str:
    """:func:`printable`, with line breaks and tabs left as they are."""
    return printable(text, keep="\n\t")


def _escaped(character: str) -> str:
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
