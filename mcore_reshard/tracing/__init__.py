"""Layouts read off loaders: run a loader on meta tensors, and record which elements it puts where.

Imports `planner` and `kernels`; no framework.
"""
