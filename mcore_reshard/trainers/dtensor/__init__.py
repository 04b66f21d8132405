"""A live DTensor model (FSDP2, tensor parallel, or both) as the source: its tensors, what they hold, and its export.

Imports what `trainers` may import.
"""
