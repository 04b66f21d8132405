"""Refits into live vLLM engines, which generate before and after: the parts of tools/validate_live.py."""
