"""Text of others (users, clients, servers) on a terminal."""

from __future__ import annotations


def clean(text: str) -> str:
    """``text`` with characters that would steer the terminal shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
