"""How ranks of separate worlds meet: one store client, one exchange, and a CPU group for messages.

Imports `kernels.errors` alone: nothing here knows of plans or tensors.
"""
