"""Log lines of events, as `key=value`, on the logger "mcore_reshard": silent until a program gives it a handler.

    event=refit_committed rank=gen:3 session=refit version=7 epoch=12-91c0ffee seconds=0.041 bytes=1048576

Each field is an attribute of the log record too, for handlers that write JSON. No line holds contents of tensors or a token.
"""

from __future__ import annotations

import json
import logging
from typing import Any

LOG = logging.getLogger("mcore_reshard")
LOG.addHandler(logging.NullHandler())


def log_event(name: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event. Fields that are None are left out."""
    if LOG.isEnabledFor(level):
        said = {"event": name, **{key: value for key, value in fields.items() if value is not None}}
        LOG.log(level, "%s", " ".join(f"{key}={_text(value)}" for key, value in said.items()), extra=said)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text and text.isprintable() and not set(text) & {" ", "=", '"'} else json.dumps(text)
