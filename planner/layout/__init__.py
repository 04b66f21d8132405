"""Where each side keeps a parameter: geometry, meshes, and the layout rules of Megatron-Core and of the engines.

Imports `planner.model`.
"""
