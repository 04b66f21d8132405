"""The training side of a validation: a real Megatron-Core model of a tiny config, on CPU with a stand-in for TE.

Imports `trainers`.
"""
