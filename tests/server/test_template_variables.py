"""Variables of the chat template, which belong to one conversation."""

from __future__ import annotations

import pytest

from larder.core import InputError, ModelError
from larder.models import LoadedModel
from larder.server import ChatMessage
from larder.session import VARIABLES_ROLE, ChatTemplate, PromptEnd, TemplateMessage
from server_core import LIMITED, Client, Served, characters, encode_session, user

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if mood is defined %}({{ mood }}){% endif %}"
    "{% if depth %}{{ depth }}{% endif %}{% endif %}"
)


@pytest.fixture
def templated() -> LoadedModel:
    loaded = characters()
    loaded.tokenizer.chat_template = TEMPLATE
    return loaded


def mood_variable(mood: str) -> ChatMessage:
    return ChatMessage(VARIABLES_ROLE, f'{{"mood": "{mood}"}}')


def prompt_of(served: Served, client: Client) -> str:
    """Text of a session up to its last answer."""
    session = served.core.find("a", client.result.session)
    ids = [*session.transcript.ids][: -len(session.turns[-1].answer_ids)]
    return served.core.engine.tokenizer.decode(ids)


def test_template_lists_its_variables(templated: LoadedModel) -> None:
    assert ChatTemplate(templated.tokenizer).variables == {"mood", "depth"}
    assert ChatTemplate(characters().tokenizer).variables == frozenset()


def test_unsafe_template_variables_are_ignored(templated: LoadedModel) -> None:
    given = '{"messages": [], "add_generation_prompt": false, "bos_token": "?", "mood": "x"}'
    turns = [TemplateMessage(VARIABLES_ROLE, given), TemplateMessage("user", "Hi")]
    assert ChatTemplate(templated.tokenizer).render(turns, PromptEnd.ANSWER) == (
        "[user]Hi\n[assistant](x)"
    )
    with pytest.raises(ModelError, match="JSON"):
        broken = [TemplateMessage(VARIABLES_ROLE, "{"), TemplateMessage("user", "Hi")]
        ChatTemplate(templated.tokenizer).render(broken, PromptEnd.ANSWER)


@pytest.mark.parametrize("policy", ["full", LIMITED])
def test_variables_apply_to_all_turns_of_a_conversation(
    templated: LoadedModel, policy: str
) -> None:
    served = Served(templated, policy, tokens=64)
    messages = [mood_variable("calm"), user("One?")]
    first = served.ask(messages)
    messages = [*messages, ChatMessage("assistant", first.text), user("Two?")]
    second = served.ask(messages)
    assert second.result.session == first.result.session
    assert prompt_of(served, second).endswith("[user]Two?\n[assistant](calm)")
    assert second.result.cached_tokens > len("[user]One?\n[assistant](calm)")


def test_different_variables_make_a_different_session(templated: LoadedModel) -> None:
    served = Served(templated)
    first = served.ask([mood_variable("calm"), user("One?")])
    answer = ChatMessage("assistant", first.text)
    others = (
        served.ask([mood_variable("wild"), user("One?"), answer, user("Two?")]),
        served.ask([user("One?"), answer, user("Two?")]),
    )
    sessions = {each.result.session for each in (first, *others)}
    assert len(sessions) == 3
    assert "(calm)" not in prompt_of(served, others[0]) + prompt_of(served, others[1])


def test_variables_are_restored_with_a_session(templated: LoadedModel) -> None:
    served, other = Served(templated), Served(templated)
    first = served.ask([mood_variable("calm"), user("One?")], "x")
    data = encode_session(served.core.find("a", "x"))
    other.core.import_("a", "x", other.core.restorer.decode(data))
    messages = [
        mood_variable("calm"),
        user("One?"),
        ChatMessage("assistant", first.text),
        user("Two?"),
    ]
    assert prompt_of(other, other.ask(messages, "x")).endswith("Two?\n[assistant](calm)")
    with pytest.raises((InputError, ModelError)):
        wrong = [ChatMessage(VARIABLES_ROLE, "["), user("One?")]
        other.ask(wrong)
