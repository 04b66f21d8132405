"""mcore-reshard: plan, prove and run the refit of a Megatron-Core trainer's weights into a generation engine."""

__version__ = "0.1.0"
