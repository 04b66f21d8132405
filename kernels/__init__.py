"""Executors: bind one rank's schedule to its tensors and move the bytes."""
