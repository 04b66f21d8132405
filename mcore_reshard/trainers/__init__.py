"""Trainers as sources of a refit: one folder a framework, named after it.

Imports `planning`, `session`, `planner` and `kernels`; functions import the framework when they first need it.
"""
