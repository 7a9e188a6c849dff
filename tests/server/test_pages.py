"""Sessions whose caches are in pages: shared beginnings take no bytes, and each goes alone."""

from __future__ import annotations

import gc

from larder.cache import PageArena
from larder.ops import AttentionBackend
from server_core import Served, answered, characters, told

PAGE = 8
BEGINNING = 20  # sentences of a prompt


def over_pages() -> tuple[Served, PageArena]:
    loaded = characters()
    decoder = loaded.decoder
    arena = PageArena(decoder.spec, 8, PAGE, AttentionBackend.GATHERED, max_pages=4000)
    decoder.use_pages(arena)
    return Served(loaded), arena


def taken(arena: PageArena) -> int:
    gc.collect()
    pages = arena.pages[0]
    return pages.num_pages - 1 - pages.free_pages


def test_a_session_with_the_beginning_of_another_takes_few_pages() -> None:
    plain, (served, arena) = Served(characters()), over_pages()
    turns, answers = told(0, BEGINNING), list[str]()
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
    assert served.ask(third, "second").told.cached_tokens > 0
    served.core.remove("a", "second")
    assert taken(arena) == 0
