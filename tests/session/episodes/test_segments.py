"""Segments leave nothing out, keep the order and respect their size."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from larder import Conversation, Message, read_conversation
from larder.core import BadParameter, PromptLayout
from larder.session import (
    LONG_CHARACTERS,
    SHORT_CHARACTERS,
    MessageSpan,
    Segment,
    SegmentUnit,
    cut_segments,
    sentences,
)
from references.session.segments import slow_utterances, slow_words
from references.session.sentences import slow_sentences

# Segments per conversation with four utterances each, as counted on the published data.
PUBLISHED = {"locomo": (93, 173), "realtalk": (103, 387)}

PROSE = st.text(alphabet=list("aB I.!?…。\"') \n1é—"), max_size=60)
LONG_PROSE = st.builds(lambda text, times: text * times, PROSE, st.integers(1, 30))


@st.composite
def messages(draw: st.DrawFn) -> Message:
    dialogue = draw(LONG_PROSE)
    header, caption = draw(st.sampled_from([("", ""), ("DATE: May\n", ""), ("", " [a photo]")]))
    role = draw(st.sampled_from(["system", "user", "assistant"]))
    speaker = draw(st.sampled_from(["", "Ann"]))
    return Message(role, header + dialogue + caption, speaker, utterance=dialogue)


# Conversations are made inside the tests: the type checker draws random items of their tuples.
MESSAGES = st.lists(messages(), max_size=8)
FORMS = st.sampled_from(PromptLayout)


def talk(dialogue: list[Message], form: PromptLayout = PromptLayout.CHAT) -> Conversation:
    return Conversation("talk", tuple(dialogue), form=form)


def vowels(text: str) -> int:
    """A stand-in for a tokenizer: cheap, and unlike both words and characters."""
    return sum(character in "aeIé" for character in text) + 1


def transcript(*texts: str) -> Conversation:
    dialogue = tuple(Message("user", text, speaker="Ann") for text in texts)
    return Conversation("talk", dialogue, form=PromptLayout.TRANSCRIPT)


def weight(segment: Segment, conversation: Conversation, unit: SegmentUnit) -> int:
    """Weigh a segment again from its characters; only for messages that are all utterance."""
    parts = [
        conversation.messages[span.message].content[span.start : span.stop]
        for span in segment.spans
        if conversation.messages[span.message].role != "system"
    ]
    words = [word for part in parts for word in part.split()]
    return len(words) if unit is SegmentUnit.WORDS else sum(map(vowels, words))


class TestEverything:
    @settings(max_examples=40)
    @given(MESSAGES, FORMS, st.sampled_from(SegmentUnit), st.integers(1, 9))
    def test_every_character_is_in_exactly_one_segment(
        self, dialogue: list[Message], form: PromptLayout, unit: SegmentUnit, size: int
    ) -> None:
        conversation = talk(dialogue, form)
        segments = cut_segments(conversation, unit, size, vowels)
        spans = [span for segment in segments for span in segment.spans]
        for index, message in enumerate(conversation.messages):
            own = [span for span in spans if span.message == index]
            assert [span.start for span in own[1:]] == [span.stop for span in own[:-1]]
            assert (own[0].start, own[-1].stop) == (0, len(message.content))
            assert "".join(message.content[p.start : p.stop] for p in own) == message.content

    @settings(max_examples=40)
    @given(MESSAGES, FORMS, st.sampled_from(SegmentUnit), st.integers(1, 9))
    def test_order_is_kept(
        self, dialogue: list[Message], form: PromptLayout, unit: SegmentUnit, size: int
    ) -> None:
        segments = cut_segments(talk(dialogue, form), unit, size, vowels)
        spans = [span for segment in segments for span in segment.spans]
        assert spans == sorted(spans, key=lambda span: (span.message, span.start))
        assert [segment.index for segment in segments] == list(range(len(segments)))
        for segment in segments:
            assert list(segment.messages) == [span.message for span in segment.spans]

    @settings(max_examples=40)
    @given(MESSAGES, st.sampled_from([SegmentUnit.WORDS, SegmentUnit.TOKENS]), st.integers(1, 9))
    def test_segment_size_is_exceeded_by_single_words_only(
        self, dialogue: list[Message], unit: SegmentUnit, size: int
    ) -> None:
        conversation = talk([Message(each.role, each.utterance) for each in dialogue])
        for segment in cut_segments(conversation, unit, size, vowels):
            words = len(segment.text.split())
            assert weight(segment, conversation, unit) <= size or words == 1 or not segment.text

    @settings(max_examples=40)
    @given(MESSAGES)
    def test_segments_of_a_text_are_not_all_empty(self, dialogue: list[Message]) -> None:
        assume(any(each.content.strip() for each in dialogue if each.role != "system"))
        assert "".join(segment.text for segment in cut_segments(talk(dialogue))).strip()


class TestUtterances:
    @settings(max_examples=40)
    @given(MESSAGES, st.integers(1, 6))
    def test_message_segments_equal_their_reference(
        self, dialogue: list[Message], size: int
    ) -> None:
        expected = slow_utterances(tuple(dialogue), size)
        assume(expected)
        segments = cut_segments(talk(dialogue, PromptLayout.TRANSCRIPT), size=size)
        assert [segment.text for segment in segments] == expected

    def test_default_segments_have_four_messages(self) -> None:
        segments = cut_segments(transcript(*"abcdefghij"))
        assert [segment.messages for segment in segments] == [range(4), range(4, 8), range(8, 10)]
        assert [segment.text for segment in segments] == ["a\nb\nc\nd", "e\nf\ng\nh", "i\nj"]

    def test_session_header_joins_the_next_segment_without_text(self) -> None:
        roles = ["system", "user", "assistant", "system", "user", "system"]
        dialogue = tuple(Message(role, f"{role} {i}") for i, role in enumerate(roles))
        segments = cut_segments(Conversation("talk", dialogue), size=2)
        assert [segment.messages for segment in segments] == [range(3), range(3, 6)]
        assert [segment.text for segment in segments] == ["user 1\nassistant 2", "user 4"]

    def test_conversation_of_headers_embeds_the_headers(self) -> None:
        (segment,) = cut_segments(Conversation("talk", (Message("system", "Be brief."),)))
        assert segment.text == "Be brief."

    def test_empty_conversation_has_no_segments(self) -> None:
        assert cut_segments(Conversation("talk", ())) == ()

    def test_headers_and_captions_are_covered_but_not_embedded(self) -> None:
        message = Message("user", "DATE: May\nHello there. [a photo]", utterance="Hello there.")
        (segment,) = cut_segments(Conversation("talk", (message,), form=PromptLayout.TRANSCRIPT))
        assert segment == Segment(0, (MessageSpan(0, 0, len(message.content)),), "Hello there.")

    def test_message_with_a_separate_utterance_is_not_split(self) -> None:
        message = Message("assistant", "Lots of words. " * 50, utterance="A summary of them.")
        (segment,) = cut_segments(Conversation("talk", (message,)))
        assert segment.text == "A summary of them."
        assert segment.spans == (MessageSpan(0, 0, len(message.content)),)

    def test_long_chat_messages_are_split_into_sentences(self) -> None:
        long = "This sentence goes on for a while. " * 16
        dialogue = (Message("user", "Tell me."), Message("assistant", long))
        assert len(long) > LONG_CHARACTERS
        chat = cut_segments(Conversation("talk", dialogue))
        assert len(chat) == 5  # 1 + 16 units
        assert chat[0].spans == (MessageSpan(0, 0, 8), MessageSpan(1, 0, 105))
        assert chat[1].messages == range(1, 2)
        assert len(cut_segments(Conversation("talk", dialogue, form=PromptLayout.TRANSCRIPT))) == 1

    def test_documents_are_split_into_sentences(self) -> None:
        text = "One sentence here.\n\nAnother paragraph. And more of it."
        document = Conversation("talk", (Message("user", text),), form=PromptLayout.DOCUMENT)
        assert [s.text for s in cut_segments(document, size=1)] == [
            "One sentence here.",
            "Another paragraph.",
            "And more of it.",
        ]

    @pytest.mark.parametrize("kind", PUBLISHED)
    def test_published_conversations_have_the_published_count(
        self, kind: str, shared_data: Path
    ) -> None:
        files = sorted((shared_data / kind).glob("*.json"))
        if not files:
            pytest.skip(f"no {kind} files")
        counts = [len(cut_segments(read_conversation(file))) for file in files]
        assert (min(counts), max(counts)) == PUBLISHED[kind]


class TestWordsAndTokens:
    @settings(max_examples=40)
    @given(MESSAGES, st.sampled_from([SegmentUnit.WORDS, SegmentUnit.TOKENS]), st.integers(1, 9))
    def test_word_segments_equal_their_reference(
        self, dialogue: list[Message], unit: SegmentUnit, size: int
    ) -> None:
        expected = slow_words(
            tuple(dialogue), size, vowels if unit is SegmentUnit.TOKENS else lambda word: 1
        )
        assume(expected)
        # An utterance of white space alone is no word, so it must weigh nothing here either.
        segments = cut_segments(
            talk(dialogue), unit, size, lambda word: vowels(word) if word.strip() else 0
        )
        assert [segment.text.split() for segment in segments] == [
            [word for _, word in group] for group in expected
        ]

    def test_word_segments_cross_messages(self) -> None:
        segments = cut_segments(transcript("one two", "three four", "five"), SegmentUnit.WORDS, 3)
        assert [segment.text for segment in segments] == ["one two\nthree", "four\nfive"]
        assert segments[0].spans == (MessageSpan(0, 0, 7), MessageSpan(1, 0, 5))
        assert segments[1].spans == (MessageSpan(1, 5, 10), MessageSpan(2, 0, 4))

    def test_word_beyond_the_size_is_its_own_segment(self) -> None:
        segments = cut_segments(
            transcript("a bbbbbbbb c d"), SegmentUnit.TOKENS, 3, lambda text: len(text.strip())
        )
        assert [segment.text for segment in segments] == ["a", "bbbbbbbb", "c d"]


class TestRefusals:
    def test_size_below_one_is_refused(self) -> None:
        with pytest.raises(BadParameter, match="segment size must be at least 1, got 0"):
            cut_segments(transcript("a"), size=0)

    def test_token_segments_without_a_tokenizer_are_refused(self) -> None:
        with pytest.raises(BadParameter, match="need `count`"):
            cut_segments(transcript("a"), SegmentUnit.TOKENS)


class TestSentences:
    @given(LONG_PROSE)
    def test_sentences_equal_their_reference(self, text: str) -> None:
        assume(text)
        assert sentences(text) == slow_sentences(text, SHORT_CHARACTERS, LONG_CHARACTERS)

    @pytest.mark.extended
    @given(st.text(max_size=200))
    def test_sentence_spans_cover_the_text(self, text: str) -> None:
        assert "".join(text[start:stop] for start, stop in sentences(text)) == text
        long = text * 20
        lengths = [len(long[start:stop].strip()) for start, stop in sentences(long)]
        assert max(lengths, default=0) <= LONG_CHARACTERS

    @pytest.mark.parametrize(
        "parts",
        [
            ["Dr. Smith said hello. ", '"Did he really?" she asked. ', "He did, indeed!"],
            ["It costs 3.50 dollars, e.g. in Rome. ", "Add 1.5 percent."],
            ["1. The first item\n", "2. The second item\n\n", "A new paragraph."],
            ["So do I. The plan of J. Doe was good. "],
            ["He waited... and waited... ", "Nobody came at all."],
            ["今天天气很好，我们去公园散步。", "明天可能会下雨，所以带伞。"],
            ["Yes. I said so before. ", "You heard me. ", "It is so. Right."],
            ["x" * 500, "x" * 100],
            ["word " * 100, "word " * 20],
        ],
    )
    def test_sentences_hand_values(self, parts: list[str]) -> None:
        text = "".join(parts)
        assert [text[start:stop] for start, stop in sentences(text)] == parts
