"""Bind a schedule to live tensors: tables of strided copies, buckets, casts, and the CPU interpreter of the tables.

Imports `planner`. No device is needed, and no other rank.
"""
