"""The engine side of a validation: a real vLLM model, or plain slices that share no code with the planner.

Imports `engines`.
"""
