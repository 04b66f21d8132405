"""A live SGLang model as the destination: its tensors, its loader, its layout, and the work after direct writes.

Imports what `engines` may import.
"""
