"""Executors: bind the schedule of one rank to its tensors and move the bytes. Needs torch."""
