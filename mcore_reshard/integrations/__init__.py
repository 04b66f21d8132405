"""Adapters: one module for each framework that a refit can be called from, through its own extension point.

A module imports its framework, so it loads only where that is installed. `common.py` has what several share. Imports all
of the package but the command line and validation.
"""
