"""Chats whose policy holds entries in few bits: turns are read at full precision."""

from __future__ import annotations

import pytest

from chats import BLOCK, BUDGET, SINGLE, under
from larder import Chat, Conversation, Message
from larder.models import LoadedModel

BRIEF = Conversation("a word", (Message("user", "Hello."), Message("assistant", "Hello.")))


@pytest.mark.extended
def test_turns_do_not_outgrow_the_bytes_of_the_budget(loaded: LoadedModel) -> None:
    """More entries fit than tokens at full precision, but not while they are whole."""
    chat = Chat(under(loaded, f"{SINGLE} > quantized(bits=2, group=8)"), history=BRIEF)
    allowed = loaded.decoder.spec.full_bytes(BUDGET + BLOCK)
    text = "I have been told of a dog and of a red car in lot number "
    for turn in range(4):
        chat.say(f"{text}{turn}. " * 2, max_new_tokens=2)
        assert chat.figures.active_kv_bytes <= 1.02 * allowed
    assert chat.figures.refreshes == 0, "they are cut down in place"
    assert chat.figures.log_tokens > 1.2 * (BUDGET + BLOCK)
