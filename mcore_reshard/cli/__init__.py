"""The command line: `main` parses, one module a command runs it and returns the exit code.

Imports all but `trainers` and `engines`; `__main__` alone imports it.
"""
