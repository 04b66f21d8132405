"""slime's own `SGLangEngine` actor, beside a server that is there already: its methods POST to it, its start is left out.

A Ray worker has no SGLang imported, and the class needs two names of it for starting servers alone: stand-ins.
"""

from __future__ import annotations

import sys
from types import ModuleType

if "sglang" not in sys.modules:
    for module, name in (("sglang.srt.server_args", "ServerArgs"), ("sglang.srt.utils", "kill_process_tree")):
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        setattr(sys.modules[module], name, None)

from slime.backends.sglang_utils.sglang_engine import SGLangEngine


class ServedEngine(SGLangEngine):
    def __init__(self, host: str, port: int) -> None:
        self.node_rank, self.server_host, self.server_port = 0, host, port
