"""Plans: routes, balance, determinism, files; and the house rules that keep the planner pure."""

import hashlib
import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from mcore_reshard.cli.summary import summarize
from mcore_reshard.planner.layout.engines import UnknownEngineError, engine_named
from mcore_reshard.planner.layout.mesh import MeshError, parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan_file import PlanFileError, dump_plan, load_plan, parse_plan, save_plan
from mcore_reshard.planner.proof.prove import prove


def plan_of(model, train, gen, policy="exact", **overrides):
    config = {**load_config(model), **overrides}
    return make_plan(
        parameters_from_config(config), parse_train_mesh(train), parse_gen_mesh(gen), model=model, policy=policy
    )


def test_the_whole_model_is_bulk_where_rules_know_it():
    plan = plan_of("tiny-qwen3-moe", "tp=2,ep=4,dp=2", "tp=4")
    assert (plan.misc, plan.excluded) == ((), ())
    assert plan.recv_bytes.tolist() == [144640] * 4
    assert plan.send_bytes.tolist() == [144640] * 4


def test_misc_says_why_and_fused_neighbors_follow():
    plan = plan_of("tiny-nemotron-h", "tp=2", "tp=2")
    assert {plan.groups[m.group].name_pattern.rpartition(".mixer.")[2]: m.reason for m in plan.misc} == {
        "A_log": "vLLM stores A = -exp(A_log): not a byte copy",
        "gate.weight": "the engine keeps this router in float32 or bfloat16 depending on the device",
    }


def test_multi_token_prediction_layers_are_excluded_by_name():
    plan = plan_of("deepseek-v3", "tp=8,pp=8,ep=32,etp=1,dp=4,layers=8+8+8+8+8+7+7+7", "tp=32,dp=4")
    assert plan.excluded and all(plan.groups[e.group].mtp for e in plan.excluded)
    assert not plan.misc
    proof = prove(plan)
    assert proof.ok and proof.destination_bytes == proof.covered_bytes == int(plan.recv_bytes.sum())


@pytest.mark.parametrize(
    ("train", "gen", "goes_to_misc"), [("tp=2", "tp=4", False), ("tp=8", "tp=4", True), ("tp=2", "tp=8", True)]
)
def test_conservative_policy_sends_qkv_to_misc_when_tp_exceeds_the_kv_heads(train, gen, goes_to_misc):
    exact = plan_of("tiny-qwen2", train, gen)
    conservative = plan_of("tiny-qwen2", train, gen, policy="conservative")
    assert not exact.misc
    names = {name.split(".")[-2] for name in conservative.misc_names}
    assert names == ({"q_proj", "k_proj", "v_proj"} if goes_to_misc else set())
    assert prove(conservative).ok
    if goes_to_misc:
        assert conservative.misc[0].reason.startswith("conservative policy: 4 KV heads < max(train tp")
        assert conservative.bulk_bytes + conservative.misc_bytes == exact.bulk_bytes


def test_replicas_share_the_load():
    plan = plan_of("tiny-qwen3", "tp=1,dp=4", "tp=4")
    assert plan.send_bytes.max() / plan.send_bytes.min() < 1.01
    plan = plan_of("qwen3-4b", "tp=2,dp=2", "tp=2,dp=2")
    assert plan.send_bytes.max() / plan.send_bytes.mean() < 1.01


def test_the_busiest_sender_carries_no_more_than_the_busiest_receiver_when_there_are_replicas_to_choose_from():
    """A tied embedding that two ranks pull leaves two of four replicas idle for it; receivers are the limit all the same."""
    plan = plan_of("qwen3-4b", "tp=2,dp=4", "tp=2,dp=2")
    assert plan.send_bytes.max() < plan.recv_bytes.max()


def test_byte_counts_agree_between_plan_and_schedules():
    plan = plan_of("tiny-deepseek-v3", "tp=2,pp=2,ep=2,dp=2", "tp=2,pp=2,dp=2,ep=4")
    sends = [schedule_of(plan, "train", r) for r in range(plan.train.world)]
    recvs = [schedule_of(plan, "gen", r) for r in range(plan.gen.world)]
    assert [sum(int(s.sends.nbytes.sum()) for s in x.stages) for x in sends] == plan.send_bytes.tolist()
    assert [sum(int(s.recvs.nbytes.sum()) for s in x.stages) for x in recvs] == plan.recv_bytes.tolist()
    for stage, transfers, nbytes in plan.stage_totals:
        assert sum(len(x.stages[stage].sends) for x in sends) == transfers
        assert sum(int(x.stages[stage].sends.nbytes.sum()) for x in sends) == nbytes


def test_both_ends_list_the_transfers_of_a_pair_in_one_order():
    plan = plan_of("tiny-qwen3-moe", "tp=2,pp=2,ep=2,etp=2,dp=2", "tp=2,dp=2")
    sends = [schedule_of(plan, "train", r) for r in range(plan.train.world)]
    recvs = [schedule_of(plan, "gen", r) for r in range(plan.gen.world)]
    for stage in range(plan.train.pp):
        for src, sender in enumerate(sends):
            for dst, receiver in enumerate(recvs):
                a, b = sender.stages[stage].sends, receiver.stages[stage].recvs
                mine, theirs = a.peer == dst, b.peer == src
                for column in ("transfer_group", "member", "nbytes"):
                    assert np.array_equal(getattr(a, column)[mine], getattr(b, column)[theirs])
                extents = [
                    [schedule.strided_boxes[g].extents for g in table.strided_box[rows]]
                    for schedule, table, rows in ((sender, a, mine), (receiver, b, theirs))
                ]
                assert extents[0] == extents[1]


def test_a_rank_outside_of_the_mesh_is_an_error():
    with pytest.raises(IndexError, match="gen rank 4 is outside of the 4 ranks"):
        schedule_of(plan_of("tiny-llama", "tp=2", "tp=4"), "gen", 4)


def test_the_same_inputs_give_the_same_digest_and_others_do_not():
    digest = plan_of("tiny-llama", "tp=2", "tp=4").digest
    assert digest == plan_of("tiny-llama", "tp=2", "tp=4").digest
    assert (
        len(
            {
                digest,
                plan_of("tiny-llama", "tp=2", "tp=2").digest,
                plan_of("tiny-llama", "tp=2", "tp=4", vocab_size=512).digest,
            }
        )
        == 3
    )


@pytest.mark.parametrize(
    "model", ["tiny-qwen3-moe", "tiny-gpt-oss", "tiny-nemotron-h", "tiny-llama-tied", "deepseek-v3"]
)
def test_a_plan_file_round_trips_byte_for_byte(model, tmp_path):
    plan = plan_of(model, "tp=2,pp=1", "tp=2,pp=2")
    save_plan(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert dump_plan(loaded) == (tmp_path / "plan.json").read_text()
    assert loaded.digest == plan.digest and prove(loaded).ok
    assert schedule_of(loaded, "gen", 1).tensors == schedule_of(plan, "gen", 1).tensors
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_that_cannot_be_written_or_read_is_an_error_of_the_plan(tmp_path):
    plan = plan_of("tiny-llama", "tp=2", "tp=4")
    with pytest.raises(PlanFileError, match=r"cannot write plan .*none/plan\.json: No such file or directory"):
        plan.save(tmp_path / "none" / "plan.json")
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(PlanFileError, match=f"cannot read plan .*: {reason}"):
            load_plan(path)


def corrupted(change):
    document = json.loads(dump_plan(plan_of("tiny-llama", "tp=2", "tp=4")))
    change(document)
    return json.dumps(document)


def resealed(change):
    """A plan whose content was changed and whose digest fits again."""

    def change_and_seal(document):
        change(document["plan"])
        text = json.dumps(document["plan"], sort_keys=True, separators=(",", ":"))
        document["digest"] = hashlib.sha256(text.encode()).hexdigest()

    return corrupted(change_and_seal)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "it is not JSON"),
        ("[1, 2]", 'no "format"'),
        ('{"model_type": "llama"}', 'no "format"'),
        (corrupted(lambda d: d.update(version=99)), "version 99, this release reads version 5"),
        (corrupted(lambda d: d["plan"]["transfer_groups"][0].__setitem__(3, 1)), "is damaged: its content has digest"),
        (corrupted(lambda d: d.update(digest="0" * 64)), "it claims 000"),
        (
            resealed(lambda plan: plan["transfer_groups"][0].__setitem__(9, None)),
            "None in transfer_groups where a number belongs",
        ),
        (
            resealed(lambda plan: plan["transfer_groups"][0].__setitem__(6, [0])),
            "in transfer_groups where a list of 2 belongs",
        ),
        (resealed(lambda plan: plan["groups"][0].__setitem__(7, 1)), "1 in groups where true or false belongs"),
        (resealed(lambda plan: plan["rank_grids"].__setitem__(0, [[10**20]])), "in rank_grids where a number belongs"),
        (resealed(lambda plan: plan.pop("misc")), "does not have the fields model, train"),
        (resealed(lambda plan: plan.update(policy="guess")), "unknown policy 'guess'"),
        (corrupted(lambda d: d.pop("plan")), "is damaged"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused(text, complaint):
    with pytest.raises(PlanFileError, match=complaint):
        parse_plan(text)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(PlanFileError, match="cannot read plan"):
        load_plan(tmp_path / "none.json")


def test_an_engine_with_a_partition_of_its_own_is_planned_and_written_to_a_file():
    plan = plan_of("tiny-llama", "tp=2,pp=2", "tp=2,pp=2,layers=1+3")
    assert plan.gen.layers == (1, 3) and prove(plan).ok
    assert parse_plan(dump_plan(plan)) == plan
    stage = {t.name.split(".")[2] for t in schedule_of(plan, "gen", 2).tensors if t.name.startswith("model.layers.")}
    assert stage == {"1", "2", "3"}
    assert (
        plan_of("tiny-llama", "tp=2", "tp=2,pp=2,layers=2+2").digest
        == plan_of("tiny-llama", "tp=2", "tp=2,pp=2").digest
    )
    with pytest.raises(
        MeshError, match=r"heads cannot be divided by tp = 3.*; generation: layers=1\+2 adds up to 3, the model has 4"
    ):
        plan_of("tiny-llama", "tp=2", "tp=3,pp=2,layers=1+2")


def test_violations_of_both_worlds_come_together():
    with pytest.raises(MeshError) as error:
        plan_of("tiny-qwen3", "tp=3,pp=3", "tp=5")
    text = str(error.value)
    assert "training: 4 layers do not divide" in text and "training: 8 attention heads" in text
    assert "generation: 8 attention heads cannot be divided by tp = 5" in text


SECOND_ENGINE = '''
"""An engine that differs from vLLM in names, in what it quantizes and in what it says of a plan: one file, nothing else."""

from dataclasses import replace

from mcore_reshard.planner.model.parameters import Role

from .partitions import Partition
from .vllm import ENGINE as VLLM
from .vllm import VllmLayout


class ToyLayout(VllmLayout):
    name = "toy"

    def place(self, group):
        placed = super().place(group)
        if not isinstance(placed, tuple):
            return placed
        return tuple(self._renamed(owners) for owners in placed)

    def _renamed(self, owners):
        def renamed(piece):
            return replace(piece, tensor=replace(piece.tensor, name="toy." + piece.tensor.name))

        partition = owners.partition
        pieces = tuple(tuple(map(renamed, held)) for held in partition.pieces)
        padding = tuple(
            tuple(replace(p, tensor=replace(p.tensor, name="toy." + p.tensor.name)) for p in held)
            for held in partition.padding
        )
        return replace(owners, partition=Partition(pieces, padding))


def quantizes(group, layer, model_parameters):
    return group.role in {Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN} and layer != 0


def misquantized(model_parameters):
    return ["generation: toy engines want untied embeddings"] if model_parameters.architecture.tied else []


ENGINE = replace(
    VLLM,
    name="toy",
    layout=ToyLayout,
    quantizes=quantizes,
    misquantized=misquantized,
    notes=lambda misc: [f"toy: {len(misc)} groups by misc"],
    repeated_suffix=".toy",
)
'''


@pytest.fixture
def second_engine(tmp_path, monkeypatch):
    import mcore_reshard.planner.layout

    (tmp_path / "toy.py").write_text(SECOND_ENGINE)
    monkeypatch.setattr(
        mcore_reshard.planner.layout, "__path__", [*mcore_reshard.planner.layout.__path__, str(tmp_path)]
    )
    yield "toy"
    sys.modules.pop("mcore_reshard.planner.layout.toy", None)


def test_a_second_engine_is_one_new_file(second_engine):
    model_parameters = parameters_from_config(load_config("tiny-qwen3-moe"))
    plan = make_plan(model_parameters, parse_train_mesh("tp=2,ep=2"), parse_gen_mesh("tp=2"), engine=second_engine)
    assert plan.engine == "toy" and prove(plan).ok
    assert all(tensor.name.startswith("toy.") for tensor in schedule_of(plan, "gen", 1).tensors)
    assert prove(parse_plan(dump_plan(plan))).ok


def test_a_second_engine_says_in_that_file_what_it_quantizes(second_engine):
    config = load_config("tiny-qwen3-moe-fp8")
    meshes = parse_train_mesh("tp=1,ep=2,dp=2"), parse_gen_mesh("tp=1")
    plan = make_plan(parameters_from_config(config), *meshes, engine=second_engine, gen_dtype="fp8")
    quantized = {(plan.groups[pair.weight].role.value, plan.groups[pair.weight].layers) for pair in plan.pairs}
    assert {role for role, _ in quantized} == {"expert_gate", "expert_up", "expert_down"}
    assert all(0 not in layers for _, layers in quantized) and prove(plan).ok
    with pytest.raises(MeshError, match="toy engines want untied embeddings"):
        tied = parameters_from_config({**config, "tie_word_embeddings": True})
        make_plan(tied, *meshes, engine=second_engine, gen_dtype="fp8")


def test_a_second_engine_says_in_that_file_what_users_should_hear_of_a_plan(second_engine):
    plan = replace(plan_of("tiny-nemotron-h", "tp=2", "tp=2"), engine=second_engine)
    assert f"toy: {len(plan.misc)} groups by misc" in summarize(plan, prove(plan))["notes"]
    assert engine_named(second_engine).repeated_tensor("weight_scale_inv.toy") == "weight_scale_inv"


def test_an_engine_without_rules_says_that_plans_for_it_come_from_traces():
    parameters = parameters_from_config(load_config("tiny-llama"))
    with pytest.raises(MeshError, match=r"no layout rules for SGLang, .* plan --traced"):
        make_plan(parameters, parse_train_mesh("tp=2"), parse_gen_mesh("tp=2"), engine="sglang")


def test_an_unknown_engine_is_refused_by_planner_and_proof():
    with pytest.raises(
        UnknownEngineError, match=r"known: sglang, vllm; planner/layout/trtllm\.py would have to define"
    ):
        make_plan(
            parameters_from_config(load_config("tiny-llama")),
            parse_train_mesh("tp=2"),
            parse_gen_mesh("tp=2"),
            engine="trtllm",
        )
    (violation,) = prove(replace(plan_of("tiny-llama", "tp=2", "tp=2"), engine="proof")).violations
    assert violation.rule == "references" and "no engine 'proof'" in violation.message
