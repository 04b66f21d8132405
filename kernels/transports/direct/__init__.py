"""Generation ranks read training ranks' GPU memory with one kernel launch."""
