"""A rank's trace made by hand, of a model with a norm in each layer and experts in two of three."""

from __future__ import annotations

from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense
from mcore_reshard.planner.layout.geometry import LocalTensor
from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace, TracedTensor

CHECKPOINT = {
    "model.embed_tokens.weight": HfTensor((10, 4), "bfloat16"),
    **{f"model.layers.{layer}.norm.weight": HfTensor((4,), "float32") for layer in range(3)},
    **{
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": HfTensor((6, 4), "bfloat16")
        for layer in (1, 2)
        for expert in range(4)
    },
    "model.layers.0.mlp.up_proj.weight": HfTensor((6, 4), "bfloat16"),
}


def whole(name: str, shape: tuple[int, ...], source: str, dtype: str = "bfloat16") -> TracedTensor:
    """A tensor that is the first elements of an HF tensor."""
    size = 1
    for extent in shape:
        size *= extent
    return TracedTensor(LocalTensor(name, shape, dtype), ((source, StridedCopy((size,), 0, (1,), 0, (1,))),))


def trace() -> CondensedTrace:
    embedding = LocalTensor("vp0.embedding.weight", (6, 4), "bfloat16")
    rows, zeros = StridedCopy((20,), 20, (1,), 0, (1,)), StridedCopy((4,), 0, (0,), 20, (1,))
    tensors = [TracedTensor(embedding, (("model.embed_tokens.weight", rows),), (zeros,))]
    for layer in (0, 1, 2):
        chunk, local = divmod(layer, 2)
        front = f"vp{chunk}.decoder.layers.{local}"
        tensors.append(whole(f"{front}.norm.weight", (4,), f"model.layers.{layer}.norm.weight", "float32"))
        for slot in range(2) if layer else ():
            source = f"model.layers.{layer}.mlp.experts.{slot + 2}.up_proj.weight"
            tensors.append(whole(f"{front}.mlp.experts.weight{slot}", (3, 4), source))
    name = "model.layers.0.mlp.up_proj.weight"
    tensors.append(
        TracedTensor(LocalTensor("vp0.x", (1,), "bfloat16"), computed="aten.exp at a.py:3", parameters=(name,))
    )
    tensors.append(TracedTensor(LocalTensor("vp0.extra", (1,), "bfloat16"), computed="nothing fills it"))
    return condense(RankTrace(tuple(tensors)), ParameterNames(CHECKPOINT), is_trainer=True)
