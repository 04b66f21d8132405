"""A live vLLM model as the destination: its tensors, its loader, its workers, what follows direct writes."""
