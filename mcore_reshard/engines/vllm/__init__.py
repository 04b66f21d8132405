"""A live vLLM model as the destination: its tensors, its loader, its workers, and what must follow direct writes.

Imports what `engines` may import.
"""
