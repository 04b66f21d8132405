"""What must happen before any test imports Megatron."""

from importlib.util import find_spec

from mcore_reshard.validation import te_standin

# Megatron decides at import whether it has Transformer Engine, and some tests import it in this very process.
if find_spec("megatron") is not None:
    te_standin.install()
