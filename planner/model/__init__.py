"""The parameters of a model, their precision, and the config.json that they are read from.

Imports `planner.bounded_json` alone.
"""
