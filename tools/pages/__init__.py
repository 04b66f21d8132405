"""The parts of tools/docs.py: it fills the pages and checks them.

`tables` and `figures` are made from data files and from the planner; `blocks` runs the code; `checks` follows links.
"""
