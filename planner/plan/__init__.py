"""The plan of who sends what: routes, plan file, the schedule of one rank, and where any element goes.

Imports `planner.bounded_json`, `planner.model`, `planner.layout` and `planner.topology`.
"""
