"""See a refit before it runs: its messages over time, on the links of a machine. No torch.

Imports planner and the parts of kernels that say who sends which message when.
"""
