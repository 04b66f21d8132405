"""A live Megatron-Core model as the source: its tensors, its mesh, its plan, and Megatron-Bridge's export.

Imports what `trainers` may import.
"""
