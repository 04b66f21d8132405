"""The machine under a refit: hosts, GPUs and links. Imports nothing of this package."""
