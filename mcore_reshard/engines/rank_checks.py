"""What a generation rank of any engine checks: that the plan is for its mesh, and that its weights are of one version."""

from __future__ import annotations

from mcore_reshard.kernels.errors import MixedWeightsError
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, format_mesh
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.session.endpoints import GenerationEndpoint


def require_own_mesh(plan: Plan, mesh: GenMesh, rank: int, replica: int) -> None:
    """Raise MeshError where the plan is for engines of another mesh. The number of replicas may differ."""
    planned, actual = ((m.tp, m.pp, m.ep, m.layers) for m in (plan.gen, mesh))
    if planned != actual:
        raise MeshError(
            f"the plan is for other engines than that of generation rank {rank}",
            [
                f"planned {format_mesh(plan.gen)}",
                f"this engine {format_mesh(mesh)}, replica {replica}",
                "start the engine on the planned mesh, or give connect() of the trainer this one as gen=",
            ],
        )


def refuse_mixture(endpoint: GenerationEndpoint | None) -> None:
    """Raise MixedWeightsError while the rank's weights are of two versions."""
    if endpoint is not None and not endpoint.state.may_generate:
        raise MixedWeightsError(
            f"{endpoint.rank_name}: this engine holds {endpoint.state.describe()}: refit again before it generates, or"
            " connect with generate_while_mixed=True"
        )
