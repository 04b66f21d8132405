"""Plans, traces and configs of unknown origin: a clear refusal costs less than a second and 100 MB, whatever they say."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.hostile import Cost, tried
from helpers.plans import Case

from mcore_reshard.planner.bounded_json import (
    MAX_DEPTH,
    MAX_LISTS,
    MAX_PLAN_BYTES,
    MAX_STRINGS,
    MAX_VALUES,
    BoundsError,
    parse_json,
)
from mcore_reshard.planner.layout.geometry import LocalTensor
from mcore_reshard.planner.layout.record_forms import canonical
from mcore_reshard.planner.model.name_patterns import fill
from mcore_reshard.planner.model.parameters import ParameterGroup, Role
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import PlanFileError, dump_plan, parse_plan

MOE = Case("tiny-qwen3-moe", "tp=2,pp=2,ep=2,dp=2", "tp=2,dp=2")
CASES = [
    MOE,
    Case("tiny-nemotron-h", "tp=2,pp=2,ep=2", "tp=2"),
    Case("tiny-gpt-oss", "tp=2,ep=2", "tp=2"),
    Case("tiny-deepseek-v3", "tp=2,pp=2,ep=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8)),
]
LARGE = Case("deepseek-v3", "tp=8,pp=16,ep=64,dp=16,layers=4+4+4+4+4+4+4+4+4+4+4+4+4+3+3+3", "tp=16,dp=16,ep=256")

PLANS = """
import hashlib, json
from mcore_reshard.planning import plan
from mcore_reshard.planner.layout.record_forms import canonical
from mcore_reshard.planner.layout.trace_file import parse_checkpoint, parse_trace
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan_file import dump_plan, parse_plan
from mcore_reshard.planner.proof.prove import require_proof

TEXT = dump_plan(plan("tiny-qwen3-moe", "tp=2,pp=2,ep=2,dp=2", "tp=2,dp=2"))

def read(text):
    found = parse_plan(text)
    require_proof(found)
    return schedule_of(found, "gen", 0).name

def changed(change):
    document = json.loads(TEXT)
    body = document["plan"]
    layer = next(row for row in body["groups"] if "{layer}" in row[0] and "{expert}" not in row[0])
    expert = next(row for row in body["groups"] if "{expert}" in row[0])
    exec(change, dict(body=body, group=body["groups"][0], layer=layer, expert=expert, tensor=body["tensors"][0],
                      transfers=body["transfer_groups"][0]))
    document["digest"] = hashlib.sha256(canonical(body).encode()).hexdigest()
    return read(canonical(document))

def checkpoint(*entries):
    return parse_checkpoint(json.dumps({"format": "mcore-reshard checkpoint", "version": 1, "tensors": entries}))
"""

# Changes of a sound plan, which is sealed anew; then what the refusal says.
CHANGES = {
    "layer[0] = layer[0].replace('{layer}', '{layer:>1000000000}')": "a name has no braces but those of",
    "layer[0] = layer[0].replace('{layer}', '{layer!r:>1000000000}')": "a name has no braces but those of",
    "expert[0] = expert[0].replace('{expert}', '{expert.__class__.__mro__}')": "a name has no braces but those of",
    "layer[0] += '{layer}'": "a name has no braces but those of",
    "tensor[0] += '{layer:>1000000000}'": "a name has no braces but those of",
    "tensor[0] += '{0}'": "a name has no braces but those of",
    "tensor[0] += '}'": "a name has no braces but those of",
    "group[0] = 'x' * 10_000_000": "a name of 10,000,000 characters",
    "group[0] += chr(0xd800)": "half of a surrogate pair",
    "layer[4] = [10**9]": "has layers outside of 0 to 4,095",
    "layer[4] = [-10**9]": "has layers outside of 0 to 4,095",
    "layer[4] = [*range(400_000)]": "has layers outside of 0 to 4,095",
    "expert[5] = 10**9": "more than any model",
    "expert[5] = 2**47": "more than any model",
    "expert[5] = -1": "experts",
    "group[2] = [10**9] * 4; group[6] = group[2]": "more than 2^48 elements",
    "group[2] = [2**48]; group[6] = group[2]": "more than any model",
    "group[2] = [1] * 10**5; group[6] = group[2]": "100000 dims",
    "tensor[1] = [2**48, 2**48]": "more than 2^48 elements",
    "transfers[6] = [0, 10**9]": "has experts",
    "transfers[6] = [-10**9, 10**9]": "has experts",
    "transfers[5] = [[10**9, 0, 0]]": "once each",
    "transfers[5] = transfers[5] * 50_000": "[references]",
    "transfers[0] = 10**9": "does not exist",
    "body['train']['tp'] = 10**9": "ranks exceed the 65536",
    "body['train']['vpp'] = 10**9": "chunks exceed the 65536",
    "body['train'].update(vpp=10**9, layers=[0, 0])": "chunks exceed the 65536",
    "body['train']['ep'] = 10**9": "must divide",
    "body['gen']['dp'] = 10**9": "ranks exceed the 65536",
    "body['gen']['layers'] = [10**9]": "adds up to",
    "body['rank_grids'][0] = [[10**9]]": "",
    "body['rank_grids'][0] = [[0] * 10**5]": "more entries than",
    "body['policy'] = 'x' * 10**7": "unknown policy 'xxx",
}
TEXTS = {
    "read('[' * 100_000)": "is nested deeper than 32 levels",
    "read('[' * 900 + ']' * 900)": "is nested deeper than 32 levels",
    "read('{\"a\":' * 900 + '1' + '}' * 900)": "is nested deeper than 32 levels",
    "read('[' * 4_000_000)": "lists and objects, more than",
    "read('[' + '[],' * 4_000_000 + '1]')": "lists and objects, more than",
    "read('[' + '1,' * 4_000_000 + '1]')": "values, more than",
    "read('[' + '{},' * 500_000 + '1]')": "is not a plan",
    "read('[' + '257,' * 1_500_000 + '1]')": "is not a plan",
    "read('[' + '\"aaaaaaaa\",' * 1_000_000 + '1]')": "strings, more than",
    "read('[' + '\"aaaaaa\\\\\\\\\",' * 300_000 + '1]')": "strings, more than",
    "read('[' + '\"aaaaaa\\\\\\\"\",' * 260_000 + '257,' * 900_000 + '1]')": "is not a plan",
    "read('{' + ','.join(f'\"{n:0>20}\":{n}' for n in range(260_000)) + '}')": "is not a plan",
    "read('1' * 1_000_000)": "an integer of 1,000,000 digits",
    "read('-' + '1' * 10_000_000)": "an integer of 10,000,001 digits",
    "read('[1' + '.1' * 1_000_000 + ']')": "not JSON",
    "read('1e' + '9' * 1_000_000)": "not finite or far too long",
    "read('NaN')": "NaN, which is no JSON number",
    "read(' ' * 30_000_000)": "more than 12,582,912",
    "parse_trace('[' * 100_000)": "is nested deeper than 32 levels",
    "parse_trace('[' + '[],' * 4_000_000 + '1]')": "lists and objects, more than",
    "checkpoint(['a.{layer}', [2], 'bfloat16', [[0, 10**9]], []])": "more than any model",
    "checkpoint(*[['a' + str(n) + '.{layer}.{expert}', [2], 'bfloat16', [[0, 1000]], [[0, 1000]]] for n in range(9)])": (
        "more than any model"
    ),
    "checkpoint(['a.{layer:>1000000000}', [2], 'bfloat16', [], []])": "a name has no braces but those of",
    "checkpoint(['a' * 500 + '{layer}', [2], 'bfloat16', [[0, 500_000]], []])": "more than any model",
    "checkpoint(['a', [10**9] * 9, 'bfloat16', [], []])": "more than 2^48 elements",
}
REFUSALS = ("PlanFileError", "ProofError", "TraceFileError")


def misjudged(costs: dict[str, Cost], expected: dict[str, str]) -> list[tuple[str, Cost]]:
    return [
        (name, cost)
        for name, cost in costs.items()
        if not cost.is_bounded or not cost.answer.startswith(REFUSALS) or expected[name] not in cost.answer
    ]


def test_a_hostile_plan_is_refused_within_a_second_and_100_mb() -> None:
    costs = tried({change: f"changed({change!r})" for change in CHANGES}, PLANS)
    assert misjudged(costs, CHANGES) == []


def test_a_hostile_text_is_refused_within_a_second_and_100_mb() -> None:
    assert misjudged(tried({text: text for text in TEXTS}, PLANS), TEXTS) == []


def test_the_cost_of_what_is_not_refused_is_seen() -> None:
    spin = "[*iter(lambda: time.process_time() < 1.5, False)]"
    costs = tried({"memory": "len(bytearray(200 << 20))", "time": spin, "fine": "1"}, "import time")
    assert [name for name, cost in costs.items() if not cost.is_bounded] == ["memory", "time"]


def test_a_name_is_filled_in_and_is_no_format_string() -> None:
    assert fill("a.{layer}.b.{expert}", layer=3, expert=7) == "a.3.b.7"
    assert fill("vp{vp}.a.{layer}.b{expert}", vp=1, layer=3, expert=7) == "vp1.a.3.b7"
    assert fill("a.{layer:>9}.{0}.{}", layer=3) == "a.{layer:>9}.{0}.{}"
    assert fill("plain", layer=3) == "plain"


@pytest.mark.parametrize(
    "name", ["a.{layer:>9}", "a.{}", "a.{layer}.{layer}", "a.{vp}", "a.{layer", "a.layer}", "{{layer}}"]
)
def test_a_parameter_with_other_braces_cannot_be_made(name: str) -> None:
    with pytest.raises(ValueError, match="a name has no braces but those of"):
        ParameterGroup(name, Role.Q, (2, 2), "bfloat16", (0,))


def test_json_is_read_as_it_was_written() -> None:
    value = {"a": [1, -(1 << 63), 1.5, None, True, "9" * 64], "b": {"deep": [[[[]]]]}, "ü": "\u2028"}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False).encode()):
        assert parse_json(text, "it", max_bytes=1000) == value
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deepest, "it", max_bytes=1000) is not None
    with pytest.raises(BoundsError, match=r"^it is nested deeper than 32 levels"):
        parse_json(f"[{deepest}]", "it", max_bytes=1000)
    with pytest.raises(BoundsError, match=r"^it has 21 bytes, more than 20"):
        parse_json("1" * 21, "it", max_bytes=20)
    with pytest.raises(BoundsError, match=r"^it is not JSON"):
        parse_json(b"\xff", "it", max_bytes=20)


# --- damage to single fields


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON document."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def other_values(old: Any) -> list[Any]:
    """Huge, deep and foreign values, and those that come close to the old one."""
    deep: Any = 0
    for _ in range(MAX_DEPTH):
        deep = [deep]
    values = [
        None,
        True,
        -1,
        0,
        7,
        4095,
        65536,
        10**9,
        1 << 47,
        1 << 49,
        10**30,
        1.5,
        "",
        "x" * 600,
        "{layer:>1000000000}",
    ]
    values += [
        "{layer}",
        "{vp}{layer}{expert}",
        "\ud800",
        [],
        [[]],
        {},
        [1, 2],
        [0] * 10_000,
        [*range(3000)],
        [10**9],
        deep,
    ]
    if isinstance(old, int):
        values += [old + 1, old - 1, old * 2, -old] * 3
    if isinstance(old, list):
        values += [old * 2, old[::-1], old[:-1], [*old, old], old * 1000 if len(old) < 50 else old * 2]
    if isinstance(old, str):
        values += [old * 2, old + "{layer}", old.replace("{layer}", "3"), old.replace("{", "{{")]
    return values


def damaged(text: str, rng: random.Random) -> str:
    """The plan with one field other, sealed anew. Each section of the file has its share."""
    document = json.loads(text)
    body = document["plan"]
    section = rng.choice(sorted(body))
    container, key = rng.choice([(body, section), *places(body[section])])
    container[key] = rng.choice(other_values(container[key]))
    document["digest"] = hashlib.sha256(canonical(body).encode()).hexdigest()
    return canonical(document)


def outcome(text: str, use: Callable[[Plan], Any]) -> str:
    """What becomes of a plan: refused, unsound or used."""
    try:
        plan = parse_plan(text)
    except PlanFileError as error:
        assert len(str(error)) < 2000
        return "refused"
    if not plan.prove().ok:
        return "unsound"
    assert dump_plan(plan).rstrip("\n") == text
    use(plan)
    return "used"


def expand(plan: Plan) -> None:
    for rank in range(plan.train.world):
        schedule_of(plan, "train", rank)
    for rank in range(plan.gen.world):
        schedule_of(plan, "gen", rank)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_damage_to_any_field_is_refused_or_harmless(case: Case) -> None:
    text, rng = dump_plan(case.plan()), random.Random(str(case))
    start, outcomes = time.process_time(), [outcome(damaged(text, rng), expand) for _ in range(60)]
    assert {*outcomes} == {"refused", "unsound", "used"}
    assert (time.process_time() - start) / len(outcomes) < 0.5


@pytest.mark.slow
def test_damage_to_a_large_plan_is_refused_or_harmless() -> None:
    text, rng = dump_plan(LARGE.plan()), random.Random(0)
    for _ in range(2):
        assert outcome(damaged(text, rng), lambda plan: schedule_of(plan, "gen", 0)) in {"refused", "unsound", "used"}


def test_real_plans_are_far_from_the_bounds() -> None:
    text = dump_plan(LARGE.plan())
    assert text.count('"') * 4 < MAX_STRINGS
    assert len(text) * 10 < MAX_PLAN_BYTES and text.count("[") * 4 < MAX_LISTS
    assert (text.count("[") + text.count(",")) * 4 < MAX_VALUES
    assert dump_plan(parse_plan(text)) == text


def test_local_tensors_of_a_schedule_need_no_pattern() -> None:
    assert LocalTensor("module.{odd}", (1,), "bfloat16").name == "module.{odd}"
