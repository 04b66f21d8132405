"""Where each side keeps a parameter: geometry, meshes, and the layouts of Megatron-Core and of the engines.

How one parameter is cut stands in `megatron_rules.py` and `vllm_rules.py`. Imports `planner.model`.
"""
