"""The parameters of a model, their precision, and the config.json that they are read from.

Imports nothing else of this package.
"""
