"""The parts of tools/bench_refit.py: workloads, methods, and the ranks that run them."""
