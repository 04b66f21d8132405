"""Who sends what: routes, the plan and its file, the schedule of one rank, and where any element goes.

Imports `planner.model` and `planner.layout`.
"""
