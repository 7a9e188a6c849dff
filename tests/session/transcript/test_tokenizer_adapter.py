"""Token spans of messages, also where their text contains template headers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from larder import Conversation, Message
from larder.core import PromptLayout
from larder.models import LoadedModel
from larder.session import TokenizerAdapter


@pytest.fixture
def seed(seed_model: LoadedModel) -> LoadedModel:
    return seed_model


CONTENTS = ("hello there", "a", "s", "user", "assistant", " user ", "", "fine")


def a_chat() -> Conversation:
    roles = ("user", "assistant") * 4
    return Conversation("chat", tuple(map(Message, roles, CONTENTS)))


def test_span_of_a_short_message_is_not_in_a_header(seed: LoadedModel) -> None:
    written = TokenizerAdapter(seed.tokenizer).encode_conversation(a_chat())
    shown = [seed.tokenizer.decode(list(written.ids[a:b])) for a, b in written.spans]
    for index, (one, content) in enumerate(zip(shown, CONTENTS, strict=True)):
        # The header of its own turn, and nothing of the next one.
        header = "assistant" if index % 2 else "user"
        assert one.strip().endswith(content.strip()), (index, one)
        assert one.count("<|user|>") + one.count("<|assistant|>") == 1, (index, one)
        assert f"<|{header}|>" in one


def test_spans_of_utterances_are_not_in_the_opening(seed: LoadedModel) -> None:
    talk = replace(a_chat(), form=PromptLayout.TRANSCRIPT, opening="a user said a word:\n")
    text, starts = TokenizerAdapter(seed.tokenizer).render_conversation(talk)
    spans = TokenizerAdapter(seed.tokenizer).encode_conversation(talk).spans
    stops = [text.index(talk.opening) + len(talk.opening)]
    for content in CONTENTS:
        stops.append(stops[-1] + len(content))
    for (_, stop), expected in zip(spans, stops[1:], strict=True):
        assert expected <= starts[stop] <= expected + 12, "tokens may reach over a border"


def test_contexts_follow_the_opening(seed: LoadedModel) -> None:
    opening = "0mark00 is a word. "
    messages = (Message("user", "One. "), Message("user", "Two. "))
    contexts = Conversation("x", messages, form=PromptLayout.CONTEXTS, opening=opening)
    text, _ = TokenizerAdapter(seed.tokenizer).render_conversation(contexts)
    assert f"{opening}One. Two. " in text
