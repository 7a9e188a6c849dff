"""Chat backend: every preset is served and answers as `larder chat`."""

from __future__ import annotations

import pytest

from larder import Chat, Conversation, Engine, Message
from larder.core import UsageError
from larder.models import LoadedModel
from larder.server import ChatMessage, cached_positions
from larder.server.session_info import session_info
from larder.store import Tier
from server_chats import HISTORY, KINDS, REFUSED, SAID, TOKENS, WIDE, asked, ways
from server_core import Served, answered, box_question, characters, user


def serving(
    loaded: LoadedModel, policy: str, tokens: int = TOKENS, **options: int | None
) -> Served:
    return Served(loaded, **asked(policy, tokens), **options)  # pyright: ignore


@pytest.fixture(scope="session")
def deep() -> LoadedModel:
    """So many layers that presets which leave the first two alone park something."""
    return characters(layers=3)


@pytest.mark.parametrize("name", ways())
def test_every_preset_is_served_or_refused_at_the_start(deep: LoadedModel, name: str) -> None:
    if name in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[name]) as refused:
            serving(deep, name)
        assert "\n" not in str(refused.value)
        return
    served = serving(deep, name, tokens=192 if name in WIDE else TOKENS)
    texts = {n: [user(f"My dog number {n} is called Rex and eats apples.")] for n in (1, 2)}
    for turn in range(2):
        clients = {n: served.submit(t, f"n{n}", max_new_tokens=2)[0] for n, t in texts.items()}
        served.run()
        assert all(client.result.new_tokens for client in clients.values())
        assert {client.result.cached_tokens > 0 for client in clients.values()} == {turn > 0}
        texts = {n: answered(texts[n], clients[n], "The car? It is red.") for n in texts}
    assert len(list(served.core.sessions)) == 2


def talked(
    served: Served, name: str, history: list[ChatMessage], questions: list[str]
) -> list[str]:
    """The answers."""
    turns, texts = [*history, user(questions[0])], list[str]()
    for more in [*questions[1:], ""]:
        client = served.ask(turns, name, max_new_tokens=5)
        texts.append(client.text.strip())
        turns = answered(turns, client, more)
    return texts


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_answers_match_a_local_chat(deep: LoadedModel, kind: str) -> None:
    served = serving(deep, kind, device=None)
    engine = Engine(deep, policy=KINDS[kind], budget=str(TOKENS))
    engine.runtime = served.core.engine.runtime
    messages = tuple(Message(turn.role, turn.text) for turn in HISTORY)
    chat = Chat(engine, history=Conversation("x", messages))
    expected = [chat.say(text, max_new_tokens=5).text for text in SAID]
    assert talked(served, "x", HISTORY, SAID) == expected
    session = served.core.sessions.find("a", "x")
    assert session.residency.chat_cache is not None
    session.residency.chat_cache.refresh()  # a chat does so before it is asked again
    assert session.residency.chat_cache.state.refreshes == chat.figures.refreshes
    assert len(session.residency.chat_cache.caches) == len(chat.episodes)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["d2o", "epicache", "snapkv"])
def test_dropped_caches_are_recomputed(small: LoadedModel, kind: str) -> None:
    kept, lost = serving(small, kind), serving(small, kind)
    turns = [*HISTORY[:2], user(SAID[0])]
    for more in [*SAID[1:3], ""]:
        client, other = kept.ask(turns, "x"), lost.ask(turns, "x")
        assert other.text == client.text
        turns = answered(turns, client, more)
        lost.core.tiers.drop(lost.core.sessions.find("a", "x"))
        assert lost.core.ledger.used(Tier.DEVICE) == 0
    assert other.result.recomputed_tokens > 0 == other.result.cached_tokens


@pytest.mark.parametrize(("kind", "steps"), [("epicache", 1), ("epicache", 9), ("d2o", 6)])
def test_cancelled_turn_leaves_the_chat_unchanged(
    small: LoadedModel, kind: str, steps: int
) -> None:
    served, other = serving(small, kind), serving(small, kind)
    before = [*HISTORY[:4], user(SAID[0])]
    turns = answered(before, served.ask(before, "x"), SAID[1])
    other.ask(before, "x")
    used = served.core.ledger.used(Tier.DEVICE)
    client, ticket = served.submit([*turns[:-1], *box_question(5)], "x", max_new_tokens=40)
    beside, _ = served.submit(box_question(1), "y", max_new_tokens=6)
    for _ in range(steps):
        served.step()
    ticket.cancel()
    served.step()
    assert client.result.reason == "cancelled"
    served.run()
    assert beside.text == other.ask(box_question(1), "y", max_new_tokens=6).text
    assert served.core.reservations.bytes_of(served.core.sessions.find("a", "x").key) <= used
    assert served.ask(turns, "x").text == other.ask(turns, "x").text


@pytest.mark.extended
def test_message_longer_than_the_budget_is_prefilled_in_blocks(small: LoadedModel) -> None:
    served = serving(small, "icecache")
    short, _ = served.submit(box_question(1, 1), max_new_tokens=24)
    while not short.text:
        served.step()
    long, _ = served.submit(box_question(2, 18), max_new_tokens=2)
    served.run()
    assert long.result.prompt_tokens > 4 * served.core.serving.block
    between = [after - before for before, after in zip(short.steps, short.steps[1:], strict=False)]
    assert max(between) <= 2
    assert served.core.ledger.used(Tier.HOST) > 0


@pytest.mark.extended
def test_edited_message_continues_from_the_turn_before(small: LoadedModel) -> None:
    served, alone = serving(small, "epicache"), serving(small, "epicache")
    first = [*HISTORY[:4], user(SAID[0])]
    turns = answered(first, served.ask(first, "x"), SAID[1])
    alone.ask(first, "x")
    served.ask(turns, "x")
    edited = [*turns[:-1], user("The sea is 5.")]
    client = served.ask(edited, "x")
    assert client.text == alone.ask(edited, "x").text
    # A plan has dropped some of what came before the latest turn: all of that is read again.
    assert client.result.cached_tokens == 0 < client.result.recomputed_tokens
    assert len(served.core.sessions) == 2
    roomy = serving(small, "epicache", tokens=512)
    turns = answered(first, roomy.ask(first, "x"), SAID[1])
    roomy.ask(turns, "x")
    edited = [*turns[:-1], user("The sea is 5.")]
    assert roomy.ask(edited, "x").result.cached_tokens > 0, "the latest turn is cut off a copy"


def test_kept_view_shows_episodes_and_offloaded_entries(small: LoadedModel) -> None:
    served = serving(small, "epicache")
    talked(served, "x", HISTORY, SAID[:2])
    session = served.core.sessions.find("a", "x")
    held = cached_positions(session)
    assert [each.number for each in held.episodes] == list(range(len(held.episodes)))
    assert [each.is_active for each in held.episodes].count(True) == 1
    assert all(each.about and each.segments for each in held.episodes)
    assert held.tokens == session.transcript.tokens
    assert (
        max(max(head) for layer in held.layers for head in layer) == session.transcript.tokens - 1
    )
    parking = serving(small, "icecache")
    parking.ask(box_question(2, 12), "x", max_new_tokens=2)
    held = cached_positions(parking.core.sessions.find("a", "x"))
    both = zip(held.layers[1], held.parked[1], strict=True)
    assert all(sorted({*fast, *slow}) == list(range(held.tokens)) for fast, slow in both)
    assert session_info(parking.core.sessions.find("a", "x")).evicted_tokens == 0
