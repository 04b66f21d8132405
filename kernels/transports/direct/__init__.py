"""Generation ranks read training ranks' GPU memory with one kernel launch.

Imports what `kernels.transports` may import; nothing outside of the registry imports it.
"""
