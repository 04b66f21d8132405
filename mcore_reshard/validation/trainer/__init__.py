"""The training side of a validation: a real Megatron-Core model of a tiny config."""
