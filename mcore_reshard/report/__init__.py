"""A plan as one HTML page: who sends what to whom, when, over which links, and what a live run measured beside it.

Imports planner and simulate, and plotly late.
"""
