"""Generation engines as destinations of a refit: one folder an engine, named after it.

Imports `session`, `planner` and `kernels`; functions import the engine when they first need it.
"""
