"""What tools/docs.py puts into the pages, and what it checks of them.

`tables` and `figures` are made from data files and from the planner; `blocks` runs the code; `checks` follows links.
"""
