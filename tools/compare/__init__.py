"""Frameworks' own weight updates beside ours, on a CPU: one file for each framework, and what measures both alike."""
