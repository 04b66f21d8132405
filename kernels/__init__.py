"""Executors: bind the schedule of one rank to its tensors and move the bytes. Imports torch and `planner`.

Folders: `copies` <- `cuda`; `rendezvous` stands alone; `transports` imports all three.
"""
