"""What tools/bench_refit.py measures: workloads, methods, and the ranks that run them."""
