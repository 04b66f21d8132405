"""Where processes listen, as the kernel says in /proc: no process's own word is taken for it."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"


def listening_at(pid: int) -> set[str]:
    """The addresses at which TCP sockets of a process listen."""
    held = {*_sockets_of(pid)}
    return {address for inode, address in _listening(pid) if inode in held}


def _sockets_of(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                yield found[1]


def _listening(pid: int) -> Iterator[tuple[str, str]]:
    """(inode, address) of every socket in the process's network that listens."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTENS:
                words = re.findall("." * 8, local.partition(":")[0])  # of 32 bits, each in the order of this machine
                packed = b"".join(bytes.fromhex(word)[::-1] for word in words)
                yield rest[5], str(ipaddress.ip_address(packed))


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return found.is_loopback or bool(mapped and mapped.is_loopback)
