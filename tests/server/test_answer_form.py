"""Tool calls and reasoning in answers: parsers, streams of parts, one spelling."""

from __future__ import annotations

import random
from typing import Any

import pytest

from larder.core import BadParameter, UsageError
from larder.server import (
    TOOL_PARSERS,
    AnswerForm,
    AnswerParser,
    Hermes,
    Llama3Json,
    Mistral,
    ParsedAnswer,
    Pythonic,
    ToolCall,
    canonical_answer,
    default_tool_parser,
    json_call,
    reasoning_stream,
    tool_call_stream,
)
from larder.server.tool_parsers import hermes
from larder.session import without_calls

F, G = ToolCall("f", '{"a": 1, "b": [true, null]}'), ToolCall("g.h", "{}")
RAW_F = '{"name": "f", "arguments": {"a": 1.0,"b":[true,null]}}'
RAW_G = '{"name":"g.h","arguments":{}}'
# Braces, quotes, escapes and an end tag inside a string.
WRITTEN_TEXT = '{"s": "}\\"]{ \\\\</tool_call>", "t" : [{"u": "\\u00e9"}]}'
RAW_TEXT = f'{{"name": "f", "arguments": {WRITTEN_TEXT}, "id": 3}}'
TEXT = ToolCall.of("f", WRITTEN_TEXT)
RAW_BROKEN = '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'
RAW_CUT = f"<tool_call>\n{RAW_F[:-2]}"
BROKEN_OFF = {RAW_BROKEN: '{"a": }', RAW_CUT: '{"a": 1.0,"b":[true,null]'}
ANSWERS = {
    "hermes": [
        (
            f"Well.\n<tool_call>\n{RAW_F}\n</tool_call>\n<tool_call>{RAW_G}</tool_call>",
            "Well.\n",
            (F, G),
        ),
        ("No call < tool.", "No call < tool.", ()),
        ("<tool_call>\nnot json\n</tool_call>", "<tool_call>\nnot json\n</tool_call>", ()),
        (f"<tool_call>\n{RAW_F}", "", (F,)),
        (RAW_CUT, RAW_CUT, ()),
        ('<tool_call>{"arguments": {}, "name": "g.h"}</tool_call>', "", (G,)),
        (f"<tool_call>{RAW_TEXT}</tool_call> Well.<tool_call>{RAW_G}</tool_call>", "", (TEXT, G)),
        (RAW_BROKEN, RAW_BROKEN, ()),
        (f"<tool_call>{RAW_F}</tool_call><tool_call>?</tool_call>", "", (F,)),
    ],
    "llama3_json": [
        (RAW_F.replace("arguments", "parameters"), "", (F,)),
        (f"<|python_tag|>{RAW_F}; {RAW_G}", "", (F, G)),
        (f"{RAW_TEXT}, {RAW_G} and text", "", (TEXT, G)),
        ('{"color": "red"}', '{"color": "red"}', ()),
        ('{"name": "\\ud800", "arguments": {}}', '{"name": "\\ud800", "arguments": {}}', ()),
        (f"I say {RAW_F}", f"I say {RAW_F}", ()),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{RAW_F}, {RAW_G}]", "", (F, G)),
        (f"[{RAW_F}]", "", (F,)),
        (
            'Well.[TOOL_CALLS]f[ARGS]{"a": 1, "b": [true, null]}[TOOL_CALLS]g.h[ARGS]{}',
            "Well.",
            (F, G),
        ),
        ("[1, 2]", "[1, 2]", ()),
    ],
    "pythonic": [
        ("[f(a=1, b=[True, None]), g.h()]", "", (F, G)),
        ("[f(a=open('x'))]", "[f(a=open('x'))]", ()),
        ("[1, 2]", "[1, 2]", ()),
        ("Well, f(a=1)", "Well, f(a=1)", ()),
    ],
}
CASES = [(name, *case) for name, cases in ANSWERS.items() for case in cases]


def streamed(form: AnswerForm, parts: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls of an answer that comes in parts."""
    parser, found = AnswerParser(form), list[dict[str, Any]]()
    for part in parts:
        found += parser.push(part)
    found += parser.finish()
    result = list[tuple[str, str]]()
    for call in (call for delta in found for call in delta.get("tool_calls", ())):
        function = call["function"]
        if "id" in call:
            assert call["index"] == len(result) and function["arguments"] == ""
            result.append((function["name"], ""))
        else:
            assert call["index"] == len(result) - 1 and "name" not in function
            result[-1] = result[-1][0], result[-1][1] + function["arguments"]
    assert len(result) == parser.num_calls
    reasoning, content = (
        "".join(d.get(n, "") for d in found) for n in ("reasoning_content", "content")
    )
    return reasoning, content, result


def random_parts(text: str, seed: int) -> list[str]:
    drawn = random.Random(seed)
    cuts = sorted(drawn.sample(range(len(text) + 1), min(4, len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(
    ("name", "text"),
    [("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}'), ("pythonic", "[f(a=1, b=[True, None]), g.h()]")],
)
def test_calls_of_other_forms_are_sent_at_the_end(name: str, text: str) -> None:
    parser = AnswerParser(AnswerForm(name))
    assert not [delta for sign in text for delta in parser.push(sign)]
    assert parser.finish()[0]["tool_calls"] and parser.num_calls


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_tool_calls_are_parsed(
    name: str, text: str, content: str, calls: tuple[ToolCall, ...]
) -> None:
    form = AnswerForm(name)
    parsed = form.parse(text)
    assert (parsed.content, parsed.calls) == (content, calls)
    expected = "", content, [(call.name, call.text) for call in parsed.calls]
    if text in BROKEN_OFF:  # is only known to be none once it has been sent
        expected = "", "", [("f", BROKEN_OFF[text])]
    for parts in (list(text), [text], *(random_parts(text, seed) for seed in range(20))):
        assert streamed(form, parts) == expected
    assert form.canonical(text) == canonical_answer(content, calls)
    one = AnswerForm(name, is_parallel=False)
    assert one.parse(text).calls == calls[:1] and streamed(one, list(text))[2] == expected[2][:1]


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_call_arguments_are_streamed_as_generated(name: str) -> None:
    parser = AnswerParser(AnswerForm(name))
    text = ("<tool_call>" if name == "hermes" else "") + '{"name": "f", "arguments": {"a": "bcd"}}'
    deltas = [(place, delta) for place, sign in enumerate(text) for delta in parser.push(sign)]
    begin = text.index('{"a"')
    assert [place for place, _ in deltas] == [begin, *range(begin, len(text) - 1)]
    assert [d["tool_calls"][0]["function"]["arguments"] for _, d in deltas] == ["", *text[begin:-1]]
    assert parser.finish() == []


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_tool_call_without_a_name_is_text(name: str) -> None:
    for call in ('{"name": "", "arguments": {"a": 1}}', '{"arguments": {"a": 1}, "name": ""}'):
        text = ("<tool_call>" if name == "hermes" else "") + call
        assert AnswerForm(name).parse(text) == ParsedAnswer("", text)
        assert streamed(AnswerForm(name), list(text)) == ("", text, [])


def test_tool_call_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    places = list[int]()

    def decoded(text: str, place: int) -> Any:
        places.append(len(text))
        return json_call(text, place)

    monkeypatch.setattr(tool_call_stream, "json_call", decoded)
    for call in (
        '{"arguments": {"a": [' + "{}," * 50 + '{}]}, "name": "f"}',
        '{"name": "f", "arguments": {}, "more": [' + "{}," * 50 + "{}]}",
    ):
        places.clear()
        assert len(streamed(AnswerForm("llama3_json"), list(call))[2]) == 1
        assert places == [len(call)]
    places.clear()
    broken = '{"name": 1}' + "{}," * 50
    assert streamed(AnswerForm("llama3_json"), list(broken)) == ("", broken, [])
    assert places == [len('{"name": 1}')]


def repeated(count: int) -> dict[str, tuple[AnswerForm, str]]:
    """Answers whose length is proportional to a count."""
    item = '{"a": "b\\\\c"},'
    long = '{"name": "f", "arguments": {"a": [' + item * count + "{}]}}"
    reversed_call = '{"arguments": {"a": [' + item * count + '{}]}, "name": "f"}'
    calls = f"<tool_call>{RAW_G}</tool_call> and < more" * count
    return {
        "content": (AnswerForm("hermes"), "a < b, " * 4 * count),
        "reasoning": (AnswerForm("hermes", "qwen3"), "<think>" + "hm\n</ " * 4 * count),
        "behind": (AnswerForm("llama3_json", "deepseek_r1"), "</think>" + "Yes. " * 5 * count),
        "arguments": (AnswerForm("hermes"), f"<tool_call>{long}</tool_call>"),
        "bare": (AnswerForm("llama3_json"), long),
        "arguments first": (AnswerForm("hermes"), f"<tool_call>{reversed_call}</tool_call>"),
        "calls": (AnswerForm("hermes"), calls),
        "bare calls": (AnswerForm("llama3_json"), f"{RAW_G}; " * count),
        "no call": (AnswerForm("hermes"), "<tool_call>[" + item * count),
        "whole": (AnswerForm("mistral"), f"[TOOL_CALLS][{long}]"),
        "python": (AnswerForm("pythonic"), "[f(a=[" + "1," * 10 * count + "2])]"),
    }


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of characters that each look at an answer was given."""
    counts = list[int]()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counting(*arguments: Any) -> Any:
            texts = [each for each in arguments if isinstance(each, str)]
            counts.append(len(texts[0]))
            return real(*arguments)

        monkeypatch.setattr(owner, name, counting)

    for module, name in (
        (tool_call_stream, "call_head"),
        (tool_call_stream, "json_call"),
        (reasoning_stream, "marker_start"),
        (hermes, "marker_start"),
        (tool_call_stream.ObjectScanner, "push"),
    ):
        count(module, name)
    for parser in (Hermes, Llama3Json, Mistral, Pythonic):
        for name in ("start", "later_start", "first_call", "later_call", "calls"):
            count(parser, name)
    return counts


@pytest.mark.parametrize("name", repeated(1))
def test_scanned_characters_are_proportional_to_the_answer(name: str, scanned: list[int]) -> None:
    form, text = repeated(300)[name]
    parser = AnswerParser(form)
    # The beginning of a call is looked at until its name is known, up to its 1,024th character.
    most = 20 * len(text) + (tool_call_stream.HEAD_CHARS**2 if "first" in name else 0)
    for sign in text:
        parser.push(sign)
    parser.finish()
    assert len(text) / 2 < sum(scanned) < most, sum(scanned) / len(text)


def test_equivalent_argument_spellings_are_equal() -> None:
    spellings = ('{"a":1,"b":[true,null]}', '{ "a": 1.0, "b": [ true, null ] }', F.arguments)
    assert {ToolCall.of("f", spelling) for spelling in spellings} == {F}
    assert ToolCall.of("f", "{broken") == ToolCall("f", "{broken")
    assert ToolCall.of("f", "") == ToolCall("f", "{}")
    for broken in ('{"a": 1e400}', '{"a": NaN}'):
        assert ToolCall.of("f", broken) == ToolCall("f", broken)
        answer = f'<tool_call>{{"name": "f", "arguments": {broken}}}</tool_call>'
        assert AnswerForm("hermes").parse(answer).calls == ()
    assert AnswerForm("pythonic").parse("[f(a=1e400)]").calls == ()
    long = '{"a": ' + "1" * 5000 + "}"
    assert ToolCall.of("f", long) == ToolCall("f", long)
    answer = f'<tool_call>{{"name": "f", "arguments": {long}}}</tool_call>'
    assert AnswerForm("hermes").parse(answer).calls == ()
    deep = "<tool_call>" + "[" * 5000 + "</tool_call>"
    assert AnswerForm("hermes").parse(deep).content == deep
    text = canonical_answer("Well.", (F, ToolCall("x", "{broken \ufdd1")))
    assert without_calls(text) == (
        "Well.",
        [("f", {"a": 1, "b": [True, None]}), ("x", "{broken \ufdd1")],
    )


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("qwen3", "<think>\nhm\nhm\n</think>\n\nYes.", "hm\nhm", "Yes."),
        ("qwen3", "Yes. </think> No.", "", "Yes. </think> No."),
        ("qwen3", "<think>hm", "hm", ""),
        ("qwen3", "<thin", "", "<thin"),
        ("deepseek_r1", "hm\n</think>\n\nYes.", "hm", "Yes."),
        ("deepseek_r1", "<think>\nhm\n</think>\nYes.", "hm", "Yes."),
        ("deepseek_r1", "hm", "hm", ""),
    ],
)
def test_reasoning_is_separated_from_content(
    name: str, text: str, reasoning: str, content: str
) -> None:
    form = AnswerForm(reasoning_parser=name)
    parsed = form.parse(text)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    for parts in (list(text), [text], *(random_parts(text, seed) for seed in range(20))):
        assert streamed(form, parts) == (reasoning, content, [])
    assert form.canonical(text) == content.strip()


def test_reasoning_before_tool_calls_is_separated() -> None:
    form = AnswerForm("hermes", "qwen3")
    text = f"<think>\nWhich?\n</think>\n\nThis.\n<tool_call>\n{RAW_F}\n</tool_call>"
    expected = "Which?", "This.\n", [("f", '{"a": 1.0,"b":[true,null]}')]
    for parts in (list(text), *(random_parts(text, seed) for seed in range(20))):
        assert streamed(form, parts) == expected


def test_parsers_have_defaults_and_unknown_names_are_refused() -> None:
    assert TOOL_PARSERS.names() == sorted(ANSWERS)
    assert default_tool_parser("... <tool_call> ...") == "hermes"
    assert default_tool_parser({"tool_use": "[TOOL_CALLS]"}) == "mistral"
    assert default_tool_parser("plain") == default_tool_parser(None) == ""
    with pytest.raises(UsageError, match="no tool call parser 'herms': take one of hermes, llama"):
        AnswerForm("herms")
    with pytest.raises(UsageError, match="no reasoning parser 'x': take one of deepseek_r1, qwen3"):
        AnswerForm(reasoning_parser="x")
    for name in ("mistral", "pythonic"):
        with pytest.raises(BadParameter, match="cannot be forced"):
            TOOL_PARSERS.load(name)().grammar({}, None)
