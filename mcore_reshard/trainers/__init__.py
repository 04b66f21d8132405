"""Trainers as sources of a refit: one folder a framework, named after it.

Imports `session`, `planner` and `kernels`; the framework is imported when a function first needs it.
"""
