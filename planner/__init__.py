"""Plan a refit as exact byte movement, and prove it. Imports numpy and the standard library alone.

`bounded_json.py` reads what other processes and files say. Folders, each importing those before it: `model` <- `layout` <-
`plan` <- `proof`.
"""
