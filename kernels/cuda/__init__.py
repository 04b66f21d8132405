"""The GPU side of the tables: tiles, the copy and cast kernels, memory shared between processes.

Imports `kernels.copies`; CUDA packages are imported when a function first needs them.
"""
