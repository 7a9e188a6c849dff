"""Sessions with paged caches: shared prefixes and offload."""

from __future__ import annotations

import gc

import pytest

from larder.cache import PageArena
from larder.ops import AttentionBackend
from server_core import Served, answered, box_question, characters

PAGE = 8
BEGINNING = 20  # sentences of a prompt


def over_pages(device: int | None = None, host: int | None = None) -> tuple[Served, PageArena]:
    loaded = characters()
    decoder = loaded.decoder
    arena = PageArena(decoder.spec, 8, PAGE, AttentionBackend.GATHERED, max_pages=4000)
    decoder.use_pages(arena)
    return Served(loaded, device=device, host=host), arena


def taken(arena: PageArena) -> int:
    gc.collect()
    pages = arena.pages[0]
    return pages.num_pages - 1 - len(pages._free)


@pytest.mark.extended
def test_sessions_with_a_common_prefix_share_pages() -> None:
    plain, (served, arena) = Served(characters()), over_pages()
    turns, answers = box_question(0, BEGINNING), list[str]()
    for own in (plain, served):
        first = own.ask(turns, "first")
        more = answered(turns, first, "And the last box?")
        if own is served:
            alone = taken(arena)
        answers.append(first.text + own.ask(more, "second").text)
    assert answers[0] == answers[1]
    heads = served.core.engine.loaded.decoder.spec.layers[0].kv_heads
    held = [served.core.find("a", name).residency.active for name in ("first", "second")]
    assert held[0] is not None and held[1] is not None
    new_tokens = held[1].next_position - held[0].next_position
    del held
    assert taken(arena) - alone <= heads * (-(-new_tokens // PAGE) + 1) < alone
    both = taken(arena)
    served.core.remove("a", "first")
    assert both > taken(arena) >= alone
    served.check()
    third = answered(more, served.ask(more, "second"), "And now?")
    assert served.ask(third, "second").result.cached_tokens > 0
    served.core.remove("a", "second")
    assert taken(arena) == 0


@pytest.mark.extended
def test_paged_sessions_are_offloaded_and_restored() -> None:
    plain, (served, _) = Served(characters()), over_pages(device=250_000, host=150_000)
    turns = {f"s{number}": box_question(number, 3) for number in range(5)}
    for _ in range(2):
        for name, own in turns.items():
            client, expected = served.ask(own, name), plain.ask(own, name)
            assert client.text == expected.text
            held = [each.residency for each in served.core.sessions if each.residency.is_resident]
            parked = [own for own in held if own.tier == "host"]
            assert [own.reserved_bytes for own in parked] == [own.host_bytes for own in parked]
            turns[name] = answered(own, client, "And the last box?")
    assert served.core.tiers.restored["host"]
