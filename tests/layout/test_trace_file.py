"""Traces and lists of tensors as text: what is written is read back, and nothing false is read."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.traces import CHECKPOINT, trace

from mcore_reshard.planner.layout.condense import ParameterNames
from mcore_reshard.planner.layout.trace_file import (
    TraceFileError,
    dump_checkpoint,
    dump_trace,
    parse_checkpoint,
    parse_trace,
    require_known,
)
from mcore_reshard.planner.layout.traces import HfTensor


def test_a_trace_is_read_back_as_it_was_written() -> None:
    text = dump_trace(trace())
    assert parse_trace(text) == trace()
    assert dump_trace(parse_trace(text)) == text
    assert trace().computed and trace().unfilled and any(holding.padding for holding in trace().holdings)
    require_known(parse_trace(text), ParameterNames(CHECKPOINT))


def test_a_checkpoint_is_read_back_with_an_entry_for_each_pattern() -> None:
    text = dump_checkpoint(CHECKPOINT)
    assert parse_checkpoint(text) == CHECKPOINT
    assert dump_checkpoint(parse_checkpoint(text)) == text
    experts = "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
    assert json.loads(text)["tensors"] == [
        ["model.embed_tokens.weight", [10, 4], "bfloat16", [], []],
        ["model.layers.{layer}.norm.weight", [4], "float32", [[0, 3]], []],
        [experts, [6, 4], "bfloat16", [[1, 3]], [[0, 4]]],
        ["model.layers.{layer}.mlp.up_proj.weight", [6, 4], "bfloat16", [[0, 1]], []],
    ]


@pytest.mark.parametrize(
    "names",
    [
        ["a.0.b.0", "a.0.b.1", "a.1.b.0"],  # layers with other experts
        ["a.0.b.1", "a.0.b.3", "a.2.b.1", "a.2.b.3"],  # gaps
        ["a.007.b", "a.7.b"],  # leading zeros
        ["a.{layer}.b", "a.1.b"],  # a name that looks like a pattern
        ["a.1.b.2.c.3", "1", "1.2", "x"],
        [],
    ],
)
def test_names_of_any_form_are_read_back(names: list[str]) -> None:
    checkpoint = {name: HfTensor((2, index % 2), "float16") for index, name in enumerate(names)}
    assert parse_checkpoint(dump_checkpoint(checkpoint)) == checkpoint


def test_a_checkpoint_of_58_layers_and_256_experts_is_short() -> None:
    checkpoint = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": HfTensor((2048, 7168), "bfloat16")
        for layer in range(3, 61)
        for expert in range(256)
        for name in ("gate_proj", "up_proj")
    }
    assert parse_checkpoint(text := dump_checkpoint(checkpoint)) == checkpoint
    assert len(text) < 400


Change = Callable[[Any], None]


def set_copy(field: int, value: Any) -> Change:
    """Change one field of the first copy: extents, offset and strides at the source, then at the destination."""

    def change(document: Any) -> None:
        document["holdings"][0][1][0][1][field] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="mcore-reshard plan"), 'no "format": "mcore-reshard trace"'),
        (lambda d: d.update(version=2), "of version 2, this release reads version 1"),
        (lambda d: d.pop("computed"), "does not have the fields"),
        (lambda d: d["tensors"][0].__setitem__(1, [-6, 4]), "negative size"),
        (lambda d: d["holdings"][0][1][0].__setitem__(0, 99), "tensor 99 in holdings"),
        (lambda d: d["holdings"][0][1][0].__setitem__(0, -1), "tensor -1 in holdings"),
        (set_copy(0, [0]), "extents below 1"),
        (set_copy(0, [25]), "leaves its 24 elements"),
        (set_copy(1, -1), "negative offsets"),
        (set_copy(2, [1, 1]), r"has strides \(1, 1\)"),
        (set_copy(3, 5), "leaves its 24 elements"),
        (set_copy(4, [True]), "True in holdings where a number belongs"),
        (lambda d: d["holdings"][0].__setitem__(0, ""), "lacks pieces"),
        (lambda d: d["holdings"][0].__setitem__(3, []), "lacks pieces, padding or layers"),
        (lambda d: d["holdings"][0][3][0].__setitem__(0, -2), "negative layer"),
        (lambda d: d["holdings"][0].__setitem__(4, [3, 2]), r"has experts \(3, 2\)"),
        (lambda d: d["computed"][0].append("more"), "where a list of 2 belongs"),
    ],
)
def test_what_cannot_be_is_refused(change: Change, message: str) -> None:
    document = json.loads(dump_trace(trace()))
    change(document)
    with pytest.raises(TraceFileError, match=message):
        parse_trace(json.dumps(document), "rank 3's trace")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["a.{layer}", [2], "bfloat16", [[0, 1 << 40]], []], "more than"),
        (["a.{layer}.{expert}", [2], "bfloat16", [[0, 1 << 12]], [[0, 1 << 12]]], "more than"),
        (["a.{layer}", [2], "bfloat16", [[3, 3]], []], "has the numbers"),
        (["a", [2], "bfloat16", [[0, 2]], []], "lists a twice"),
        (["a", [-2], "bfloat16", [], []], "negative size"),
        (["a", [2], "bfloat16", []], "where a list of 5 belongs"),
    ],
)
def test_lists_of_tensors_that_cannot_be_are_refused(entry: list[Any], message: str) -> None:
    document = {**json.loads(dump_checkpoint({})), "tensors": [entry]}
    with pytest.raises(TraceFileError, match=message):
        parse_checkpoint(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
def test_other_texts_are_refused(text: str) -> None:
    for parse in (parse_trace, parse_checkpoint):
        with pytest.raises(TraceFileError):
            parse(text)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({}, "which is not in the checkpoint"),
        ({**CHECKPOINT, "model.embed_tokens.weight": HfTensor((9, 4), "bfloat16")}, "beyond the end of"),
        ({n: t for n, t in CHECKPOINT.items() if ".3.up" not in n}, r"has experts \(2, 4\) of .*, the checkpoint 3"),
        ({n: t for n, t in CHECKPOINT.items() if ".2.norm" not in n}, r"has layers \[2\] of"),
    ],
)
def test_a_trace_of_another_checkpoint_is_refused(known: dict[str, HfTensor], message: str) -> None:
    with pytest.raises(TraceFileError, match=message):
        require_known(trace(), ParameterNames(known))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON document."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


@pytest.mark.parametrize(
    ("text", "parse"), [(dump_trace(trace()), parse_trace), (dump_checkpoint(CHECKPOINT), parse_checkpoint)]
)
def test_damage_in_any_one_place_is_an_error_of_its_own_or_harmless(text: str, parse: Callable[[str], Any]) -> None:
    rng, refused = random.Random(0), 0
    values: list[Any] = [None, True, -1, 0, 7, 1 << 50, 1.5, "", "x", [], [[]], {}, [1, 2]]
    count = sum(1 for _ in places(json.loads(text)))
    for number in range(count):
        for value in rng.sample(values, 5):
            document = json.loads(text)
            container, key = [*places(document)][number]
            container[key] = value
            try:
                parse(json.dumps(document))
            except TraceFileError:
                refused += 1
    assert refused > 3 * count
