"""Rank numbering: literal cases, errors, and Megatron-Core's own RankGenerator over many meshes."""

import itertools

import pytest

from mcore_reshard.planner.layout.mesh import (
    GenMesh,
    MeshError,
    TrainMesh,
    format_mesh,
    parse_gen_mesh,
    parse_train_mesh,
)
from mcore_reshard.validation.trainer import build as trainer


def test_expert_and_dense_meshes_cover_the_same_ranks_differently():
    mesh = TrainMesh(tp=2, ep=4, dp=2)  # EP4 x TP2 at ETP = 1: tp = r % 2, ep = r % 4
    assert [mesh.coordinate(r)["tp"] for r in range(4)] == [0, 1, 0, 1]
    assert [mesh.coordinate(r)["ep"] for r in range(4)] == [0, 1, 2, 3]
    assert mesh.dense_ranks(0).tolist() == [[0, 2], [1, 3]]
    assert mesh.expert_ranks(0).tolist() == [[[0]], [[1]], [[2]], [[3]]]


def test_vllm_numbers_tensor_parallel_innermost_then_pipeline_then_data():
    mesh = GenMesh(tp=2, pp=2, dp=2, ep=4)
    assert mesh.coordinate(5) == {"tp": 1, "pp": 0, "dp": 1, "ep": 3}
    assert mesh.dense_ranks(1).tolist() == [[2, 6], [3, 7]]
    assert mesh.expert_ranks(1).tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [(5, 2, (0, 0, 0, 1, 1)), (6, 4, (0, 1, 1, 2, 2, 3)), (4, 1, (0, 0, 0, 0))],
)
def test_vllm_gives_spare_layers_to_the_stages_before_the_last(layers, pp, stages):
    assert GenMesh(pp=pp).stage_of_layers(layers) == stages


def test_a_generation_mesh_may_say_how_many_layers_each_stage_has():
    mesh = parse_gen_mesh("tp=2,pp=2,layers=1+3")
    assert mesh.stage_of_layers(4) == (0, 1, 1, 1)
    assert format_mesh(mesh) == "tp=2,pp=2,dp=1,ep=1,layers=1+3" and parse_gen_mesh(format_mesh(mesh)) == mesh
    assert GenMesh(pp=2, layers=(3, 2)).canonical(5) == GenMesh(pp=2)  # vLLM's own split
    assert mesh.canonical(4) == mesh


@pytest.mark.parametrize("text", ["", " ", "\t", ", ,\n"])
def test_a_mesh_of_blanks_is_empty(text):
    with pytest.raises(MeshError, match="it is empty, write for example tp=2"):
        parse_train_mesh(text)


def test_interleaved_chunks_take_layers_in_turns():
    places = TrainMesh(pp=2, vpp=2).place_layers(8)
    assert [(stage, p.vp_stage, p.local) for stage, p in places] == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip


def test_uneven_pipelines_may_leave_stages_to_the_embedding_and_the_loss():
    places = TrainMesh(pp=4, layers=(0, 3, 1, 0)).place_layers(4)
    assert [stage for stage, _ in places] == [1, 1, 1, 2]
    per_chunk = TrainMesh(pp=2, vpp=2, layers=(1, 2, 1, 0)).place_layers(4)
    assert [(stage, p.vp_stage, p.local) for stage, p in per_chunk] == [(0, 0, 0), (1, 0, 0), (1, 0, 1), (0, 1, 0)]


def test_one_pipeline_has_one_canonical_spelling():
    assert TrainMesh(pp=2, layers=(2, 2)).canonical(4) == TrainMesh(pp=2)
    assert TrainMesh(pp=2, vpp=2, layers=(4, 2)).canonical(6) == TrainMesh(pp=2, vpp=2, layers=(2, 1, 2, 1))


def test_mesh_text_round_trips_with_every_axis():
    mesh = parse_train_mesh("tp=2,pp=2,ep=4,dp=2,layers=3+1")
    assert format_mesh(mesh) == "tp=2,pp=2,ep=4,etp=1,cp=1,dp=2,vpp=1,layers=3+1"
    assert parse_train_mesh(format_mesh(mesh)) == mesh
    assert parse_gen_mesh("tp=4") == GenMesh(tp=4)


@pytest.mark.parametrize(
    ("build", "complaints"),
    [
        (lambda: TrainMesh(tp=2, ep=3, vpp=2), ["ep*etp = 3*1 must divide tp*cp*dp", "vpp > 1 wants pp > 1"]),
        (lambda: TrainMesh(tp=0, dp=-1), ["tp = 0 must be at least 1", "dp = -1 must be at least 1"]),
        (lambda: TrainMesh(pp=2, vpp=0, layers=(1, 1)), ["vpp = 0 must be at least 1"]),
        (lambda: TrainMesh(tp="2", dp=2.0), ["tp = '2' must be a whole number", "dp = 2.0 must be a whole number"]),
        (lambda: TrainMesh(pp=3, layers=(1, 2)), ["layers has 2 entries, wants pp = 3"]),
        (lambda: GenMesh(tp=2, dp=2, ep=2), ["ep = 2 must be 1", "tp*dp = 2*2 = 4"]),
        (lambda: GenMesh(pp=3, layers=(0, 4)), ["layers has 2 entries, wants pp = 3", "at least 1 on every stage, got 0+4"]),
        (lambda: GenMesh(pp=2, layers=(3, 1)).stage_of_layers(5), ["layers=3+1 adds up to 4, the model has 5"]),
        (lambda: GenMesh(pp=5).stage_of_layers(4), ["pp = 5 exceeds the 4 layers"]),
        (lambda: parse_gen_mesh("tp=2,pp=2,layers=1+x"), ["'layers=1+x' is not a number, write for example layers=3+1"]),
        (lambda: parse_train_mesh("tp=two,xp=1,pp=1,pp=2"), ["'tp=two' is not a number", "unknown axis 'xp'", "pp is given twice"]),
        (lambda: TrainMesh(pp=8).place_layers(61), ["61 layers do not divide over pp*vpp = 8", "layers=8+8+8+8+8+7+7+7"]),
        (lambda: TrainMesh(pp=2, vpp=2).place_layers(9), ["9 layers do not divide over pp*vpp = 4", "layers=3+2+2+2"]),
        (lambda: TrainMesh(pp=2, layers=(3, 1)).place_layers(5), ["adds up to 4, the model has 5"]),
    ],
)  # fmt: skip
def test_an_impossible_mesh_lists_every_violation(build, complaints):
    with pytest.raises(MeshError) as error:
        build()
    for complaint in complaints:
        assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("tp:4", "unknown axis 'tp:4', known: dp, ep, layers, pp, tp; did you mean tp=4?"),
        ("tp2,pp=2", "unknown axis 'tp2', known: dp, ep, layers, pp, tp; did you mean tp=2?"),
        ("TP=2", "unknown axis 'TP', known: dp, ep, layers, pp, tp; did you mean tp=2?"),
        ("pp=2,layers=24,24", "layers are joined by +; did you mean pp=2,layers=24+24?"),
    ],
)
def test_another_spelling_of_a_mesh_is_answered_with_the_right_one(text, hint):
    with pytest.raises(MeshError) as error:
        parse_gen_mesh(text)
    assert error.value.violations == (hint,)


MESHES = [
    {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp}
    for tp, cp, dp, pp in itertools.product((1, 2, 4), (1, 2), (1, 2, 3), (1, 2))
    for ep, etp in itertools.product((1, 2, 3, 4, 8), (1, 2))
    if (tp * cp * dp) % (ep * etp) == 0
]


def test_numbering_equals_megatron_rank_generator():
    pytest.importorskip("megatron", reason="needs the megatron extra")
    trainer.prepare()  # the stand-in for Transformer Engine must come before megatron.core
    from megatron.core import parallel_state

    for sizes in MESHES:
        mesh = TrainMesh(**sizes)
        order = "tp-cp-ep-dp-pp"
        dense = parallel_state.RankGenerator(tp=mesh.tp, ep=1, dp=mesh.dp, pp=mesh.pp, cp=mesh.cp, order=order)
        expert = parallel_state.RankGenerator(tp=mesh.etp, ep=mesh.ep, dp=mesh.edp, pp=mesh.pp, cp=1, order=order)
        for generator, axes in ((dense, {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}),
                                (expert, {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"})):  # fmt: skip
            for token, axis in axes.items():
                for group in generator.get_ranks(token):
                    assert [mesh.coordinate(rank)[axis] for rank in group] == list(range(len(group))), (sizes, axis)
        for stage in range(mesh.pp):
            assert mesh.dense_ranks(stage).T.tolist() == [
                g for g in dense.get_ranks("tp") if mesh.coordinate(g[0])["pp"] == stage
            ]
            for ep, ranks in enumerate(mesh.expert_ranks(stage)):
                for etp, replicas in enumerate(ranks):
                    assert {tuple(mesh.coordinate(int(r))[a] for a in ("pp", "ep", "etp")) for r in replicas} == {
                        (stage, ep, etp)
                    }
    assert len(MESHES) > 80


def test_no_split_is_suggested_for_more_chunks_than_layers():
    with pytest.raises(MeshError) as error:
        TrainMesh(pp=4).place_layers(3)
    assert error.value.violations == ("3 layers do not divide over pp*vpp = 4",)


def test_the_split_that_is_suggested_is_possible():
    with pytest.raises(MeshError) as error:
        TrainMesh(pp=4, vpp=2).place_layers(94)
    layers = str(error.value).rpartition("layers=")[2].rstrip(".")
    assert len(parse_train_mesh(f"pp=4,vpp=2,layers={layers}").place_layers(94)) == 94
