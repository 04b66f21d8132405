"""What a model is: its parameters, their precision, and the config.json that they are read from.

Imports nothing else of this package.
"""
