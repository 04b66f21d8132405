"""The GPU side of the tables: tiles, the copy and cast kernels, memory shared between processes."""
