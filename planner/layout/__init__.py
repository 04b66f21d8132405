"""Where each side keeps a parameter: geometry, meshes, and the layouts of Megatron-Core and of the engines.

`megatron_rules.py` and `vllm_rules.py` say how one parameter is cut. Imports `planner.bounded_json` and `planner.model`.
"""
