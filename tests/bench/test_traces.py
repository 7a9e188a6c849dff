"""Traces are reproducible, ordered, and in the sizes of a model."""

from __future__ import annotations

import pytest

from larder.core import BadParameter
from larder.models import LLAMA_3_1_8B, KVSource
from larder_bench.traces._builder import TraceBuilder
from larder_bench.traces.base import (
    NONE,
    TRACES,
    CachedObject,
    ReadEvent,
    StateForm,
    Trace,
    TraceModel,
    WriteEvent,
)
from larder_bench.traces.chat import ChatWorkload

NAMES = sorted(TRACES.builtin_names())
CROWDS = pytest.mark.parametrize("name", NAMES)
FORMS = pytest.mark.parametrize("form", list(StateForm))
EACH = LLAMA_3_1_8B.bytes_per_token(KVSource.ENTRIES)


def made(name: str, form: StateForm = StateForm.WHOLE, seed: int = 0, events: int = 400) -> Trace:
    return TRACES.load(name)(form=form).make(seed, events)


def start(trace: Trace, cached: CachedObject) -> int:
    return trace.objects[cached.before].tokens if cached.before != NONE else 0


@CROWDS
def test_equal_seeds_make_equal_traces(name: str) -> None:
    assert made(name) == made(name)
    assert made(name).events != made(name, seed=1).events


@CROWDS
@FORMS
def test_events_are_ordered_with_reads_and_writes(name: str, form: StateForm) -> None:
    trace = made(name, form)
    times = [event.time for event in trace.events]
    assert len(times) == 400 and times == sorted(times)
    written = dict[int, float]()
    for event in trace.events:
        if isinstance(event, WriteEvent):
            written[event.object_id] = event.time
        elif isinstance(event, ReadEvent):
            cached = trace.objects[event.object_id]
            assert cached.session in (NONE, event.session) and event.tokens > cached.tokens
            assert cached.session == NONE or written[event.object_id] <= event.time


@CROWDS
def test_state_has_its_share_of_bytes_and_replaces_one_of_its_session(name: str) -> None:
    trace = made(name)
    for number, cached in enumerate(trace.objects):
        share = 1.0 if cached.session == NONE else 0.25
        assert cached.bytes == int(share * EACH * cached.tokens) and cached.parent == NONE
        assert cached.seconds == pytest.approx(trace.seconds_of(cached.tokens))
        assert cached.before < number
        if cached.replaces != NONE:
            assert trace.objects[cached.replaces].session == cached.session


@CROWDS
def test_parts_add_up_to_the_text(name: str) -> None:
    trace = made(name, StateForm.PARTS)
    for cached in trace.objects:
        assert cached.parent == cached.before
        assert cached.bytes == EACH * (cached.tokens - start(trace, cached))
        spared = trace.seconds_of(cached.tokens) - trace.seconds_of(start(trace, cached))
        assert cached.seconds == pytest.approx(spared)


def test_object_sizes_differ_by_model() -> None:
    sizes = {ChatWorkload(model=model).make(0, 50).objects[0].bytes for model in TraceModel}
    assert len(sizes) == 3 and 400 * EACH in sizes


def test_regenerated_answer_continues_the_former_state_and_replaces_the_first() -> None:
    builder = TraceBuilder(ChatWorkload())
    session = builder.begin_session(builder.prompt(100))
    time = builder.turn(session, 0.0, 10, 20, "person")
    time = builder.turn(session, time + 5, 10, 20, "person")
    builder.regenerate(session, time + 5, 10, 30, "person")
    first, refused, newest = builder.objects[1:]
    assert newest.before == 1 and newest.replaces == 2 and newest.tokens == refused.tokens + 10
    assert refused.replaces == 1 and first.replaces == NONE
    reads = builder.trace(100).reads
    assert [read.object_id for read in reads] == [0, 1, 1]


def test_later_states_replace_earlier_ones() -> None:
    builder = TraceBuilder(ChatWorkload(kept=1.0))
    session = builder.begin_session(builder.prompt(100))
    builder.turn(session, builder.turn(session, 0.0, 10, 20, "person"), 10, 20, "person")
    objects = builder.trace(9).objects
    replaced = {each.replaces for each in objects}
    left = [each.bytes for index, each in enumerate(objects) if index not in replaced]
    assert sum(left) == (100 + 160) * EACH


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("agents", {"turns": 0}, "agents.turns"),
        ("workflows", {"agents": 7}, "workflows.agents must be from 1 to 6"),
        ("workflows", {"pause": 0.0}, "workflows.pause"),
        ("chat", {"again": 2.0}, "chat.again"),
        ("chat", {"turns": 0.5}, "chat.turns"),
        ("chat", {"talks_per_hour": 0.0}, "talks_per_hour"),
        ("mixed", {"kept": 0.0}, "mixed.kept"),
        ("mixed", {"operations_per_second": 0.0}, "mixed.operations_per_second"),
    ],
)
def test_parameters_out_of_range_are_refused(name: str, parameters: dict, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        TRACES.load(name)(**parameters)
