"""Escape text for the terminal: configs and plan files may hold characters that a terminal obeys."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with all unprintable characters escaped: an escape character becomes `\x1b`. Lines stay lines."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
