"""The command line: `main` parses, one module a command runs it and returns the exit code.

Imports everything; nothing imports it.
"""
