from __future__ import annotations

import enum
import json
import random
from dataclasses import dataclass
from typing import Annotated, Any, NewType, TypedDict

import pytest

from odyssey_megatron import codec
from odyssey_megatron.codec import from_json, to_json, to_jsonable
from odyssey_megatron.inputs import Between
from odyssey_megatron.plan.layout import Layout, megatron_layout
from odyssey_megatron.plan.plan import Plan, Transfer
from odyssey_megatron.plan.scheduling.programs import Programs

Rank = NewType("Rank", int)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    x: int
    y: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    flag: bool
    rank: Rank
    colour: Colour
    inner: Inner
    many: tuple[Inner, ...]
    pair: tuple[int, str]
    table: dict[str, float]
    ids: frozenset[int]
    maybe: Inner | None = None
    anything: Any = None


def outer(**changes: Any) -> Outer:
    values = {
        "name": "a",
        "flag": True,
        "rank": Rank(3),
        "colour": Colour.BLUE,
        "inner": Inner(x=1),
        "many": (Inner(x=2, y=2.0), Inner(x=3)),
        "pair": (1, "b"),
        "table": {"k": 1.5},
        "ids": frozenset({3, 1}),
        "maybe": None,
        "anything": [1, {"z": None}],
    }
    return Outer(**(values | changes))


def changed(**changes: Any) -> str:
    return json.dumps(to_jsonable(outer()) | changes)


def test_records_round_trip():
    for record in (outer(), outer(maybe=Inner(x=9, y=1e-300), many=(), table={})):
        assert from_json(Outer, to_json(record)) == record


def test_the_text_is_canonical():
    assert to_json({"b": 1, "a": (1, 2)}) == '{"a":[1,2],"b":1}'
    assert to_json(outer(ids=frozenset({1, 3}))) == to_json(outer(ids=frozenset({3, 1})))


def test_a_whole_number_is_a_float_but_not_the_reverse():
    read = from_json(Inner, '{"x": 1, "y": 2}')
    assert type(read.y) is float
    with pytest.raises(ValueError, match="int"):
        from_json(Inner, '{"x": 1.5}')


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "null",
        changed(extra=1),
        changed(flag=1),
        changed(rank=True),
        changed(rank="3"),
        changed(colour="green"),
        changed(inner={"y": 1.0}),
        changed(inner=None),
        changed(many={"x": 1}),
        changed(pair=[1]),
        changed(pair=[1, "b", 2]),
        changed(table={"k": "v"}),
        changed(ids=["a"]),
        changed(maybe={"x": None}),
        '{"name": "only this"}',
    ],
)
def test_a_malformed_record_is_refused_as_a_whole(text):
    with pytest.raises(ValueError):
        from_json(Outer, text)


def test_damaged_plans_never_give_a_plan_of_another_shape():
    """Bytes flipped at random: ValueError, or a record that still is one."""
    layout = megatron_layout(num_layers=6, pipeline_size=2, num_workers=4, num_microbatches=4)
    plan = Plan(
        policy="initial",
        layout=layout,
        programs=Programs.from_text("0: F0[0:3]"),
        transfers=(Transfer(layer=1, source=0, target=1),),
        step_s=1.0,
        bound_s=0.5,
        transition_s=0.0,
        peak_bytes=((0, 1),),
    )
    text = to_json(plan)
    assert from_json(Plan, text) == plan
    random.seed(5)
    for _ in range(500):
        damaged = bytearray(text.encode())
        damaged[random.randrange(len(damaged))] = random.randrange(32, 127)
        try:
            read = from_json(Plan, bytes(damaged))
        except ValueError:
            continue
        assert isinstance(read.layout, Layout)
        assert from_json(Plan, to_json(read)) == read


def test_what_reads_the_fields_of_a_class_is_made_once(monkeypatch):
    """A journal has a million lines, and a report checks each field of them."""

    class Line(TypedDict):
        step: Annotated[int, Between(0, 9)]
        ranks: tuple[int, ...]

    made, whole = [], codec._reader
    monkeypatch.setattr(codec, "_reader", lambda kind: made.append(kind) or whole(kind))
    for step in range(3):
        assert codec.from_jsonable(Line, {"step": step, "ranks": [step]})["ranks"] == (step,)
    assert len([kind for kind in made if kind is not Line]) <= 4
