"""A live vLLM model as the destination: its tensors, its loader, its workers, and the work after direct writes.

Imports what `engines` may import.
"""
