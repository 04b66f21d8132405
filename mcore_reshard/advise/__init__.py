"""Which meshes refit fastest among those that fit in memory. No torch.

Imports planner, planning and simulate.
"""
