"""What one generation rank does in refits, whatever its engine: a session, its errors, and the state of its weights."""

from __future__ import annotations

from mcore_reshard.kernels.errors import MixedWeightsError, SessionError
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, format_mesh
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.session.endpoints import GenerationEndpoint, RefitReport


class EngineRank:
    """The base of `VllmRank` and `SglangRank`, which connect: they set `endpoint` to this rank's end of a session."""

    def __init__(self) -> None:
        self.endpoint: GenerationEndpoint | None = None
        self._mixed_may_generate = False

    @property
    def connected(self) -> GenerationEndpoint:
        """This rank's end of the session. Raises SessionError where there is none."""
        if self.endpoint is None:
            raise SessionError("this worker is in no session: connect all workers first")
        return self.endpoint

    def refit(self, version: int | None = None, *, everything: bool = False) -> RefitReport:
        """Take part in the trainer's next refit, as `GenerationEndpoint.refit`."""
        return self.connected.refit(version, everything=everything)

    def close(self) -> None:
        """Leave the session and free what it holds. May be called twice."""
        if self.endpoint is not None:
            self.endpoint.close()

    def refuse_mixture(self) -> None:
        """Raise MixedWeightsError while the weights are of two versions, unless `connect` allowed to generate from these."""
        endpoint = self.endpoint
        if endpoint is None or endpoint.state.may_generate or self._mixed_may_generate:
            return
        raise MixedWeightsError(
            f"{endpoint.rank_name}: this engine holds {endpoint.state.describe()}: refit again before it generates, or"
            " connect with generate_while_mixed=True"
        )


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
