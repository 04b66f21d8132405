"""Paragraphs of the pages."""

from __future__ import annotations

import re
import textwrap
from typing import Any


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph at 100 columns. Links and `code` stay whole."""
    joined = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    filled = textwrap.fill(joined, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return filled.replace("\0", " ")


def noted(data: dict[str, Any]) -> str:
    """A sentence of the data file's own, where it has one."""
    return f" {data['note'][0].upper()}{data['note'][1:]}." if "note" in data else ""
