"""Plan a refit as exact byte movement, and prove it. Imports numpy and the standard library alone.

Folders, each importing those before it: `model` <- `layout` <- `plan` <- `proof`.
"""
