"""How ranks of separate worlds meet: one store client, one exchange, and a CPU group for messages.

Imports `kernels.errors` and `planner.bounded_json` alone: nothing here knows of plans or tensors.
"""
