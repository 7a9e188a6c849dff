"""Session index: which session a request continues, and its cached tokens."""

from __future__ import annotations

import json

import pytest
import zstandard

from larder.engine import SamplingParams
from larder.models import LoadedModel
from larder.server import ApiError, ChatMessage
from larder.server.persistence import session_file
from larder.store import Tier
from server_core import Served, answered, box_question, encode_session, user


def test_continued_conversation_is_not_prefilled_again(small: LoadedModel) -> None:
    served = Served(small)
    turns = box_question(1)
    first = served.ask(turns, "x")
    second = served.ask(answered(turns, first, "Why?"), "x")
    assert second.result.session == "x" and second.result.lossless
    unread = 2  # the last token that was chosen, and the end of the answer's turn
    assert (
        second.result.cached_tokens
        == first.result.prompt_tokens + first.result.new_tokens + 1 - unread
    )
    assert second.result.recomputed_tokens == 0 and second.result.tier == "device"


def test_session_keeps_the_generated_tokens_of_an_answer(small: LoadedModel) -> None:
    served = Served(small)
    client = served.ask(box_question(1), "x")
    session = served.core.sessions.find("a", "x")
    spaced = [*box_question(1), ChatMessage("assistant", f"  {client.text}\n"), user("Why?")]
    served.ask(spaced, "x")
    assert [each.name for each in served.core.sessions] == ["x"]
    assert tuple(session.residency.cached_ids) == tuple(
        session.transcript.ids[: len(session.residency.cached_ids)]
    )


@pytest.mark.failure(number=18)
def test_repeated_request_is_the_same_turn(small: LoadedModel) -> None:
    served = Served(small)
    turns = box_question(1)
    first = served.ask(turns, "x")
    steps = served.core.scheduler.steps
    again = served.ask(turns, "x")
    assert (again.text, again.result.session) == (first.text, "x")
    assert served.core.scheduler.steps == steps
    second = served.ask(answered(turns, first, "Why?"), "x")
    assert served.ask(answered(turns, first, "Why?"), "x").text == second.text
    assert len(served.core.sessions.find("a", "x").turns) == 2


@pytest.mark.failure(number=18)
def test_request_to_a_busy_session_is_refused(small: LoadedModel) -> None:
    served = Served(small)
    client, _ = served.submit(box_question(1), "x")
    for turns in (box_question(1), box_question(2)):
        with pytest.raises(ApiError, match="wait") as caught:
            served.submit(turns, "x")
        told_ = caught.value
        assert (told_.status, told_.code) == (409, "session_busy") and told_.retry_after
    other, _ = served.submit(box_question(1), "x", tenant="b")
    served.run()
    assert client.result.session == other.result.session == "x"
    assert len(list(served.core.sessions)) == 2


@pytest.mark.failure(number=14)
@pytest.mark.extended
@pytest.mark.parametrize("policy", ["full", "limited"])
def test_different_text_continues_in_a_fork(small: LoadedModel, policy: str) -> None:
    served, alone = Served(small, policy), Served(small, policy)
    turns = box_question(1)
    first = served.ask(turns, "x")
    served.ask(answered(turns, first, "Why?"), "x")
    before = served.core.sessions.find("a", "x")
    transcript, read = list(before.turns), bytes(before.residency.cached_ids)
    edited = answered(turns, first, "Who?")
    fork = served.ask(edited, "x")
    assert fork.result.session == "x~2"
    assert (before.turns, bytes(before.residency.cached_ids)) == (transcript, read)
    alone.ask(turns, "x")
    assert fork.text == alone.ask(edited, "x").text
    more = answered(edited, fork, "Sure?")
    assert served.ask(more, "x").result.session == "x~2"
    reseeded = served.ask(more, "x", sampling=SamplingParams(temperature=1.0, seed=3))
    assert reseeded.result.session == "x~3"


@pytest.mark.failure(number=17)
def test_conversations_with_a_common_prefix_share_its_cache(small: LoadedModel) -> None:
    served, alone = Served(small), Served(small)
    shared = ChatMessage("system", "You count coins in boxes, and you say so. " * 2)
    texts = [[shared, user(f"Number {n}?")] for n in range(2)]
    clients = [served.ask(turns) for turns in texts]
    assert clients[1].result.cached_tokens > 80
    for more in ("Why?", "Sure?"):
        texts = [answered(*pair, more) for pair in zip(texts, clients, strict=True)]
        clients = [served.ask(turns) for turns in texts]
        assert all(client.result.tier == "device" for client in clients)
        assert all(client.result.recomputed_tokens == 0 for client in clients)
    assert len(list(served.core.sessions)) == 2
    foreign = served.ask(texts[0], tenant="b")
    assert foreign.result.cached_tokens == 0
    assert foreign.text == clients[0].text == alone.ask(texts[0]).text


@pytest.mark.extended
def test_prefix_with_evicted_entries_is_not_shared(small: LoadedModel) -> None:
    served = Served(small, "limited")
    shared = ChatMessage("system", "You count coins in boxes, and you say so. " * 3)
    lossy = served.ask([shared, user("Number 1?")])
    assert not lossy.result.lossless and lossy.result.evicted_tokens > 0
    assert served.ask([shared, user("Number 2?")]).result.cached_tokens == 0
    more = answered([shared, user("Number 1?")], lossy, "Why?")
    assert served.ask(more, "another").result.cached_tokens == 0
    whole = Served(small)
    more = answered(more[:2], whole.ask(more[:2]), "Why?")
    assert whole.ask(more, "another").result.cached_tokens > 0


def test_exact_request_uses_a_lossless_cache(small: LoadedModel) -> None:
    served, full = Served(small, "limited"), Served(small, "full")
    turns = box_question(1, 5)
    lossy = served.ask(turns, "x")
    assert not lossy.result.lossless
    exact = served.ask(turns, "y", exact=True)
    assert exact.result.lossless and exact.text == full.ask(turns, "y").text
    more = answered(turns, lossy, "Why?")
    again = served.ask(more, "x", exact=True)
    assert again.result.lossless and again.result.session != "x"


def test_follows_continues_a_session_by_name(small: LoadedModel) -> None:
    served, whole = Served(small), Served(small)
    turns = box_question(1)
    first = served.ask(turns, "x")
    whole.ask(turns, "x")
    second = served.ask([user("Why?")], follows="x")
    assert second.text == whole.ask(answered(turns, first, "Why?"), "x").text
    assert served.ask([user("Why?")], follows="x").text == second.text
    assert len(served.core.sessions.find("a", "x").turns) == 2
    with pytest.raises(ApiError) as caught:
        served.submit([user("Why?")], follows="x", tenant="b")
    assert (caught.value.status, caught.value.code) == (404, "session_not_found")


def test_raw_prompt_continues_its_session(small: LoadedModel) -> None:
    served = Served(small)
    first = served.ask([], raw_prompt="Once upon a time there was a box")
    longer = served.ask([], raw_prompt="Once upon a time there was a box" + first.text)
    assert longer.result.cached_tokens >= first.result.prompt_tokens
    with pytest.raises(ApiError, match="empty"):
        served.submit([], raw_prompt="")


@pytest.mark.failure(number=16)
def test_fully_cached_prompt_is_answered_like_a_new_one(
    small: LoadedModel,
) -> None:
    text, served = "Once upon a time there was a box of coins", Served(small)
    served.ask([], raw_prompt=text)
    for wanted in (text, text[:-1], text[:30], text[:1]):
        client = served.ask([], raw_prompt=wanted, sampling=SamplingParams(seed=len(wanted)))
        assert client.text == Served(small).ask([], raw_prompt=wanted).text
        assert client.result.cached_tokens < client.result.prompt_tokens
        assert (client.result.cached_tokens > 16) == (len(wanted) > 20)


@pytest.mark.parametrize("turns", [[], [ChatMessage("assistant", "Hello.")]])
def test_invalid_turn_sequences_are_refused(small: LoadedModel, turns: list[ChatMessage]) -> None:
    served = Served(small)
    with pytest.raises(ApiError) as caught:
        served.submit(turns, "x")
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert not list(served.core.sessions)


@pytest.mark.parametrize("name", ["", "a" * 256, "a\nb", "a\0b"])
def test_invalid_session_names_are_refused(small: LoadedModel, name: str) -> None:
    with pytest.raises(ApiError, match="must"):
        Served(small).submit(box_question(1), name)


@pytest.mark.failure(number=14)
def test_session_with_the_longer_prefix_is_found(
    small: LoadedModel,
) -> None:
    served = Served(small)
    turns = answered(box_question(1), served.ask(box_question(1)), "Why?")
    edited = [*turns[:-2], ChatMessage("assistant", "It holds 5."), user("Why?")]
    second = served.ask(edited)
    more = served.ask(answered(edited, second, "Sure?"))
    assert more.result.session == second.result.session
    assert more.result.recomputed_tokens == 0 and len(served.core.sessions) == 2


def import_file(served: Served, tenant: str, name: str, data: bytes) -> None:
    served.core.import_(tenant, name, served.core.restorer.decode(data))


def test_session_round_trips_through_export_and_import(small: LoadedModel) -> None:
    served, other = Served(small, "limited"), Served(small, "limited")
    turns = box_question(1)
    first = served.ask(turns, "x")
    data = encode_session(served.core.sessions.find("a", "x"))
    import_file(other, "b", "y", data)
    more = answered(turns, first, "Why?")
    assert other.ask(more, "y", tenant="b").text == served.ask(more, "x").text
    for damaged in (data[:-1], data[:40], b"", b"PK" + data, data.replace(data[20:21], b"\0")):
        with pytest.raises(ApiError) as caught:
            import_file(other, "b", "z", damaged)
        assert caught.value.status == 400
    assert [each.name for each in other.core.sessions] == ["y"]


@pytest.mark.failure(number=30)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("root", "a\nb"),
        ("root", "\ud800"),
        ("root", ""),
        ("root", 7),
        ("opening", [{"role": "king", "text": "x"}]),
        ("opening", [{"role": "user", "text": "\udfff"}]),
        ("opening", [{"role": "user", "text": 7}]),
        ("opening", {"role": "user"}),
        ("said", [7]),
        ("said", None),
        ("version", 10**30),
        ("format", []),
    ],
)
def test_malicious_session_file_is_refused(small: LoadedModel, field: str, value: object) -> None:
    served = Served(small)
    served.ask(box_question(1), "x")
    document = json.loads(zstandard.decompress(encode_session(served.core.find("a", "x"))))
    for place in (document, *document["said"]):
        if field in place:
            place[field] = value
    data = zstandard.compress(json.dumps(document).encode())
    with pytest.raises(ApiError) as caught:
        import_file(served, "a", "y", data)
    assert caught.value.status == 400
    assert [each.name for each in served.core.sessions] == ["x"]


@pytest.mark.failure(number=30)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", "\ud800"),
        ("prompt", [5000]),
        ("prompt", [1.5]),
        ("prompt", [2**40]),
        ("prompt", "abc"),
        ("answer", [-1]),
        ("unread", 10**9),
        ("unread", "x"),
        ("sampling", {"temperature": "hot"}),
        ("sampling", {"heat": 1}),
        ("stop", "\ud800"),
        ("stop", 3),
        ("turns", [["user", "x"]]),
        ("reason", None),
    ],
)
def test_malicious_exchange_of_a_session_file_is_refused(
    small: LoadedModel, field: str, value: object
) -> None:
    test_malicious_session_file_is_refused(small, field, value)


@pytest.mark.failure(number=30)
@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", [str(n) for n in range(2000)]), ("text", "x" * 10**5), ("reason", "x" * 10**5)],
)
def test_small_file_with_long_decompressed_texts_is_refused(
    small: LoadedModel, field: str, value: object
) -> None:
    served = Served(small)
    served.ask(box_question(1), "x")
    document = json.loads(zstandard.decompress(encode_session(served.core.find("a", "x"))))
    document["said"][0][field] = value
    data = zstandard.compress(json.dumps(document).encode())
    limit = session_file.SessionFileLimit(session_file.IMPORT_BYTES, 1024)
    with pytest.raises(ApiError, match="characters") as caught:
        served.core.restorer.decode(data, limit=limit)
    assert caught.value.status == 400


@pytest.mark.failure(number=30)
@pytest.mark.parametrize("text", [b"[" * 10**6, b"1" * 10**6, b" " * (1 << 27), b"\xff"])
def test_decompression_bomb_is_refused(small: LoadedModel, text: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        import_file(Served(small), "a", "y", zstandard.compress(text))
    assert caught.value.status == 400 and len(str(caught.value)) < 400


@pytest.mark.failure(number=22)
def test_ten_thousand_idle_sessions_stay_within_host_memory(small: LoadedModel) -> None:
    served = Served(small, host=3_000_000)
    for number in range(10_000):
        try:
            served.core.open("a", f"n{number}", [user("Hello.")])
        except ApiError as error:
            assert error.code == "kv_budget_exceeded"
            break
    held = len(list(served.core.sessions))
    assert held < 3_000 and served.core.ledger.used(Tier.HOST) <= 3_000_000
    for number in range(held):
        served.core.forget(served.core.sessions.find("a", f"n{number}"))
    assert served.core.ledger.used(Tier.HOST) == 0
