"""Bind a schedule to live tensors: checks, buckets, tables of strided copies, casts, and the tables' CPU interpreter.

Imports `planner`. No device is needed, and no other rank.
"""
