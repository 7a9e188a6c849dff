"""Exchanges look like the turns of a chat, and know which segments share their text."""

from __future__ import annotations

from larder import Conversation, Message
from larder.core import PromptLayout
from larder.session import DialogueSession, Utterance, cut_segments, history_turns, messages


def test_history_turn_is_a_question_with_its_answer() -> None:
    result = [("system", "s"), ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("user", "q3")]
    chat = Conversation("chat", tuple(Message(role, text) for role, text in result))
    found = history_turns(chat, cut_segments(chat, size=3))
    assert [one.text for one in found] == ["q1\na1", "q2", "q3"]
    assert [one.segment_indices for one in found] == [(0,), (0,), (1,)]


def test_turn_across_a_segment_boundary_has_both_segments() -> None:
    chat = Conversation("chat", (Message("user", "q"), Message("assistant", "a")))
    assert history_turns(chat, cut_segments(chat, size=1))[0].segment_indices == (0, 1)


def test_history_turns_have_no_speaker_names() -> None:
    utterances = [
        Utterance("Ann", "Hello.", "May"),
        Utterance("Bo", 'A "hi".', "May", "and shared it"),
    ]
    talk = Conversation(
        "talk",
        messages([DialogueSession("May", (*utterances, utterances[0]))]),
        form=PromptLayout.TRANSCRIPT,
    )
    found = history_turns(talk, cut_segments(talk))
    assert [one.text for one in found] == ['Hello.\nA "hi".', "Hello."]
    assert [one.segment_indices for one in found] == [(0,), (0,)]


def test_document_is_split_into_pairs_of_sentences() -> None:
    text = "".join(f"This is the sentence with the number {n} in it. " for n in range(8))
    paper = Conversation("paper", (Message("user", text),), form=PromptLayout.DOCUMENT)
    found = history_turns(paper, cut_segments(paper))
    assert len(found) == 4 and found[0].text.count("sentence") == 2
    assert [one.segment_indices for one in found] == [(0,), (0,), (1,), (1,)]
