"""A live session: endpoints on all ranks, what they must agree on, and the plan that they share.

Imports `planner` and `kernels`; knows no trainer and no engine.
"""
