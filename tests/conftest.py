"""What must happen before any test imports torch or Megatron."""

import os
from importlib.util import find_spec

from mcore_reshard.validation.trainer import te_standin

# torch's store asks the DNS for the name of every address that connects: a lost answer would stall all ranks for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Megatron decides at import whether it has Transformer Engine, and some tests import it in this very process.
if find_spec("megatron") is not None:
    te_standin.install()
