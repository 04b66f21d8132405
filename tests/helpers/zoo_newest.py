"""Tiny models that need Megatron-Bridge 0.6, and the meshes that `make test-newest` builds them on."""

from __future__ import annotations

from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation.trainer.bridge import bridge_release

IS_NEWEST = bridge_release() >= (0, 6)

_TP2, _TP4, _TP2_PP2 = TrainMesh(tp=2), TrainMesh(tp=4), TrainMesh(tp=2, pp=2)
_TP2_EP2, _EP2 = TrainMesh(tp=2, ep=2, etp=1), TrainMesh(dp=2, ep=2)
_TP2_PP2_OF_3 = TrainMesh(tp=2, pp=2, layers=(2, 1))

# The first mesh of a family is the quick one.
NEWEST_MESHES = {
    "tiny-ernie4.5-moe": (_TP2_EP2, _TP4, _EP2, _TP2_PP2_OF_3),
    "tiny-glm4.7-flash": (_TP2_EP2, _TP4, _EP2, _TP2_PP2_OF_3),
    "tiny-glm5": (_TP2_EP2, _TP4, _EP2, _TP2_PP2_OF_3),
    "tiny-ling": (_TP2_EP2, _TP4, _EP2, _TP2_PP2_OF_3),
    "tiny-mimo": (_TP2, _TP4, _TP2_PP2),
    "tiny-mimo-v2-flash": (_TP2_EP2, _TP2, _EP2, _TP2_PP2_OF_3),
    "tiny-minimax-m2": (_TP2_EP2, _TP4, _EP2, _TP2_PP2),
    "tiny-nemotron-3-latent-moe": (_TP2_EP2, _TP4, _EP2, _TP2_PP2),
    "tiny-qwen3.5": (_TP2, _TP4, _TP2_PP2),
    "tiny-qwen3.5-moe": (_TP2_EP2, _TP4, _EP2, _TP2_PP2),
    "tiny-step3.5": (_TP2_EP2, _TP4, _EP2, _TP2_PP2),
}
