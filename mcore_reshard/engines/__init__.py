"""Generation engines as destinations of a refit: one folder an engine, named after it.

Imports `session`, `planner` and `kernels`; the engine is imported when a function first needs it.
"""
