"""Orders of contexts that maximize the shared prefix, per tenant and bounded."""

from __future__ import annotations

from itertools import permutations
from random import Random
from typing import Any

import pytest

from larder.models import LoadedModel
from larder.server import (
    MOST_ORDERS,
    ApiError,
    ChatMessage,
    ContextOrder,
    ContextOrders,
    ContextReferences,
    Request,
    chunk_id,
    context_order,
    importance_line,
    with_message_contexts,
)
from larder.store import ByteBudgets, ByteLedger, Tier
from server_core import Client, Served, user

SHARED = ContextOrder.SHARED
TEXTS = {name: f"Box {name} holds {n + 3} coins. " * 3 for n, name in enumerate("abcdef")}


def shared_size(order: tuple[str, ...], known: list[tuple[str, ...]], sizes: dict[str, int]) -> int:
    """Characters that an order shares with one of those that are known, by a slow loop."""
    most = 0
    for other in known:
        count = 0
        for one, another in zip(order, other, strict=False):
            if one != another:
                break
            count += sizes[one]
        most = max(most, count)
    return most


def test_context_order_shares_the_longest_prefix() -> None:
    rng, orders = Random(3), ContextOrders(ByteLedger())
    known = list[tuple[str, ...]]()
    for _ in range(60):
        given = rng.sample("abcdefgh", rng.randrange(1, 6))
        sizes = {each: ord(each) - 90 for each in given}
        found = orders.shared("t", sizes)
        best = max(shared_size(order, known, sizes) for order in permutations(given))
        assert shared_size(found, known, sizes) == best >= shared_size(tuple(given), known, sizes)
        assert sorted(found) == sorted(given)
        rest = found[len(found) - len(given) :]
        assert set(rest) == set(given)
        orders.add("t", found)
        known.append(found)


def test_unknown_contexts_keep_their_order() -> None:
    orders = ContextOrders(ByteLedger())
    assert orders.shared("t", dict.fromkeys("cab", 1)) == ("c", "a", "b")
    orders.add("t", ("c", "a", "b"))
    assert orders.shared("t", dict.fromkeys("zcxa", 1)) == ("c", "a", "z", "x")
    assert orders.shared("other", dict.fromkeys("zcxa", 1)) == ("z", "c", "x", "a")


def test_importance_line_ranks_context_positions() -> None:
    assert importance_line(["z", "c", "x"], ["c", "z", "x"]) == (
        "The 3 texts above, the most relevant first: 2, 1, 3."
    )
    assert importance_line(["z", "c"], ["z", "c"]) == ""


def asked(
    served: Served, names: str, question: str = "What does box a hold?", **more: Any
) -> Client:
    contexts = tuple(TEXTS[name] for name in names)
    return served.ask([user(question)], contexts=contexts, context_order=SHARED, **more)


def test_reordered_contexts_hit_the_prefix_cache(small: LoadedModel) -> None:
    served, given = Served(small), Served(small)
    first = asked(served, "abc")
    again = asked(served, "cab", "And box b?")
    prefix = "".join(f"{TEXTS[name].rstrip()}\n\n" for name in "abc")
    assert again.result.cached_tokens >= len(prefix)
    for names in ("abc", "cab"):
        contexts = tuple(TEXTS[name] for name in names)
        plain = given.ask([user("And box b?")], contexts=contexts)
    assert plain.result.cached_tokens < len(TEXTS["c"]), "the given order shares nothing"
    line = "The 3 texts above, the most relevant first: 3, 1, 2."
    whole = given.ask([user(f"{prefix}{line}\n\nAnd box b?")])
    assert again.text == whole.text and again.result.lossless
    other = asked(served, "cab", tenant="b")
    assert other.result.cached_tokens == 0 and first.result.cached_tokens == 0


def test_repeated_contexts_of_a_conversation_are_prefilled_once(small: LoadedModel) -> None:
    served = Served(small)
    asked(served, "ab")
    turns = [user("Which box is the last?")]
    contexts = tuple(TEXTS[name] for name in "cbabc")
    first = served.ask(turns, "x", contexts=contexts, context_order=SHARED)
    for name in "abc":
        assert (
            str(served.core.sessions.find("a", "x").turns[0].messages[-1].text).count(
                TEXTS[name].rstrip()
            )
            == 1
        )
    more = [*turns, ChatMessage("assistant", first.text), user("Why?")]
    second = served.ask(more, "x", contexts=contexts, context_order=SHARED)
    assert second.result.session == "x" and second.result.recomputed_tokens == 0
    assert second.result.cached_tokens > first.result.prompt_tokens


def lines(contexts: list[str], earlier: list[str]) -> list[str]:
    return ContextReferences(earlier).next_message(contexts)


def test_contexts_that_stand_above_become_references() -> None:
    long, other = TEXTS["a"] * 3, TEXTS["b"] * 3
    line = f'See the text above that begins with "{long[:60].strip()}".'
    assert lines([long, "new", long, other], [long, "x"]) == [line, "new", other]
    assert lines(["short"], ["short"]) == ["short"], "the line is longer"
    assert len(line.splitlines()) == 1
    later = ContextReferences([])
    assert [later.next_message([long]), later.next_message([long])] == [[long], [line]]


def test_texts_that_begin_alike_are_repeated() -> None:
    long = TEXTS["a"] * 3
    line, alike = lines([long], [long])[0], f"{long} But not box c."
    assert lines([long], [long, alike]) == [long], "the line could be either's"
    assert lines([alike], [long]) == [alike]
    assert lines([alike, long], [long]) == [alike, long], "both stand above the line"
    assert lines([long, alike], [long]) == [line, alike], "one stands above the line"


def test_references_of_long_conversations_compare_each_text_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, opening = 0, context_order._opening

    def counted(text: str) -> str:
        nonlocal count
        count += 1
        return opening(text)

    monkeypatch.setattr(context_order, "_opening", counted)
    messages = tuple(user("Why?") for _ in range(60))
    own = {number: (f"Text {number}.",) for number in range(60)}
    request = Request("a", messages, message_contexts=own, context_order=SHARED)
    turns = with_message_contexts(request).turns
    assert turns[59].text == "Text 59.\n\nWhy?"
    assert 60 <= count <= 4 * 60


@pytest.mark.parametrize("order", ContextOrder)
def test_contexts_of_later_messages(small: LoadedModel, order: ContextOrder) -> None:
    served, plain = Served(small), Served(small)
    texts = {name: text * 3 for name, text in TEXTS.items()}
    messages = [user("What does box a hold?")]
    first = served.ask(messages, "x", message_contexts={0: (texts["a"],)}, context_order=order)
    messages += [ChatMessage("assistant", first.text), user("And box b?")]
    own = {0: (texts["a"],), 2: (texts["b"], texts["a"], texts["b"])}
    second = served.ask(messages, "x", message_contexts=own, context_order=order)
    blocks = {name: f"{text.rstrip()}\n\n" for name, text in texts.items()}
    line = f'See the text above that begins with "{texts["a"][:60].strip()}".\n\n'
    later = {
        ContextOrder.GIVEN: blocks["b"] + blocks["a"] + blocks["b"],
        ContextOrder.SHARED: blocks["b"] + line,
    }
    whole = [
        user(blocks["a"] + messages[0].text),
        messages[1],
        user(later[order] + messages[2].text),
    ]
    plain.ask(whole[:1], "y")
    expected = plain.ask(whole, "y")
    assert second.text == expected.text
    assert second.result.prompt_tokens == expected.result.prompt_tokens
    assert second.result.cached_tokens > first.result.prompt_tokens
    assert second.result.recomputed_tokens == 0 and second.result.lossless
    messages += [ChatMessage("assistant", second.text), user("Why?")]
    third = served.ask(messages, "x", message_contexts=own, context_order=order)
    assert third.result.cached_tokens > second.result.prompt_tokens


def test_contexts_of_the_first_message_are_those_of_the_request(small: LoadedModel) -> None:
    served, known = Served(small, "cacheblend"), (TEXTS["a"], TEXTS["b"])
    served.ask([user("Why?")], contexts=known)
    found = served.ask(
        [user("What does box a hold?")], contexts=known[:1], message_contexts={0: known[1:]}
    )
    assert found.result.cached_tokens >= sum(map(len, known))
    later = [user("Why?"), ChatMessage("assistant", "So."), user("What does box a hold?")]
    text = served.ask(later, message_contexts={2: known})
    blocks = "".join(f"{each.rstrip()}\n\n" for each in known)
    assert text.text == served.ask([*later[:2], user(blocks + later[2].text)]).text


def test_ids_stand_for_contexts_of_later_messages(small: LoadedModel) -> None:
    served, messages = Served(small), [user("Why?"), ChatMessage("assistant", "So."), user("Who?")]
    whole = served.ask(messages, message_contexts={2: (TEXTS["a"],)})
    by_id = served.ask(messages, message_contexts={2: (chunk_id(TEXTS["a"]),)})
    assert by_id.text == whole.text and by_id.result.prompt_tokens == whole.result.prompt_tokens
    with pytest.raises(ApiError, match="not known"):
        served.ask(messages, message_contexts={2: (chunk_id("?"),)})


def test_orders_count_on_host_memory_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_order, "MOST_ORDERS", 5)
    monkeypatch.setattr(context_order, "ORDER_SHARE", 1.0)
    assert MOST_ORDERS > 5
    ledger = ByteLedger(ByteBudgets({Tier.HOST: 100_000}))
    orders = ContextOrders(ledger)
    for number in range(9):
        orders.add("a", (f"{number}", "x"))
    assert len(orders) == 5 and orders.shared("a", {"x": 1, "3": 1}) == ("x", "3")
    assert orders.shared("a", {"x": 1, "4": 1}) == ("4", "x")
    one = ledger.used(Tier.HOST) // 5
    full = ByteLedger(ByteBudgets({Tier.HOST: 2 * one + 1}))
    orders = ContextOrders(full)
    for number in range(9):
        orders.add("a", (f"{number}", "x"))
    assert len(orders) == 2 and full.used(Tier.HOST) == 2 * one
    with full.reserve(Tier.HOST, "b", 1):
        orders.add("b", ("1", "2"))
    assert len(orders) == 2, "others make no room"


def test_orders_of_all_tenants_take_a_share_of_host_memory() -> None:
    ledger = ByteLedger(ByteBudgets({Tier.HOST: 1_000_000}))
    orders = ContextOrders(ledger)
    for number in range(60):
        orders.add("a" if number < 40 else f"t{number}", (f"{number}", "x"))
        assert orders.nbytes == ledger.used(Tier.HOST) <= 1_000_000 / 64
    assert orders.shared("t59", {"x": 1, "59": 1}) == ("59", "x")
    small = ByteLedger(ByteBudgets({Tier.HOST: 10_000}))
    orders = ContextOrders(small)
    orders.add("a", ("1", "2"))
    assert len(orders) == 0 == small.used(Tier.HOST)


def test_tenants_without_orders_are_forgotten() -> None:
    for host in (10_000, 100_000, 1_000_000):
        ledger = ByteLedger(ByteBudgets({Tier.HOST: host}))
        orders = ContextOrders(ledger)
        for number in range(100):
            orders.add(f"t{number}", ("1", "2"))
            assert len(orders._orders) == len(orders)
            assert orders.nbytes == ledger.used(Tier.HOST)
