"""The GPU side of the tables: tiles, the copy and cast kernels, memory shared between processes.

Imports `kernels.copies`; functions import CUDA packages when they first need them.
"""
