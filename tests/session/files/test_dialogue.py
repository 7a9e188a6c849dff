"""LoCoMo and RealTalk files become transcripts, with every published question."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from larder import Message, Question, read_conversation
from larder.core import Adversarial, PromptLayout
from larder.session import find_files
from session.files.conversation_files import complaint, text_of, write

LOCOMO = {
    "conversation": {
        "speaker_a": "Ann",
        "speaker_b": "Bo",
        "session_2_date_time": "9 May, 2023",
        "session_2": [{"speaker": "Bo", "text": "Still here?"}],
        "session_10_date_time": "1 June, 2023",
        "session_10": [{"speaker": "Ann", "text": "Yes."}],
        "session_1_date_time": "8 May, 2023",
        "session_1": [
            {"speaker": "Ann", "text": "Hello\n\nBo.\n"},
            {
                "speaker": "Bo",
                "text": "Hi!",
                "clean_text": "Hi.",
                "blip_caption": "a photo of a dog",
            },
        ],
        "session_99_date_time": "never",
    },
    "qa": [
        {"question": "Which year?", "answer": 2022, "category": 2},
        {"question": "Who flew?", "adversarial_answer": "Ann", "category": 5},
        {"question": "Is it hers?", "answer": "No", "category": 5},
        {"question": "Who barked?", "answer": "the dog", "category": 1},
    ],
}
REALTALK = {
    "name": {"speaker_1": "Ann", "speaker_2": "Bo"},
    "session_1_date_time": "29.12.2023, 00:51:12",
    "session_1": [
        {
            "clean_text": "Look",
            "text": "Lok",
            "speaker": "Ann",
            "date_time": "29.12.2023, 00:52:00",
            "blip_caption": "there is a stream",
        },
        {"text": "Nice", "speaker": "Bo", "date_time": "29.12.2023, 00:53:00"},
    ],
    "qa": [{"question": "Why?", "answer": "Joy", "category": 3}],
}


class TestLoCoMo:
    def test_text_is_laid_out_by_session(self, tmp_path: Path) -> None:
        conversation = read_conversation(write(tmp_path, LOCOMO))
        assert conversation.form is PromptLayout.TRANSCRIPT
        assert "Ann" in conversation.opening and "Bo" in conversation.opening
        assert text_of(conversation).removeprefix(conversation.opening) == (
            "DATE: 8 May, 2023\nCONVERSATION:\n"
            'Ann said, "Hello Bo."\nBo said, "Hi."\nand shared a photo of a dog\n'
            '\nDATE: 9 May, 2023\nCONVERSATION:\nBo said, "Still here?"\n'
            '\nDATE: 1 June, 2023\nCONVERSATION:\nAnn said, "Yes."\n'
        )

    def test_utterances_have_no_header(self, tmp_path: Path) -> None:
        messages = read_conversation(write(tmp_path, LOCOMO)).messages
        assert [m.utterance for m in messages[:2]] == ['Ann said, "Hello Bo."', 'Bo said, "Hi."']
        assert [(m.speaker, m.date) for m in messages[1:3]] == [
            ("Bo", "8 May, 2023"),
            ("Bo", "9 May, 2023"),
        ]

    def test_adversarial_questions_are_skipped(self, tmp_path: Path) -> None:
        assert read_conversation(write(tmp_path, LOCOMO)).questions == (
            Question("Which year?", "2022", "temporal"),
            Question("Who barked?", "the dog", "multi_hop"),
        )

    def test_adversarial_questions_are_included_on_request(self, tmp_path: Path) -> None:
        path = write(tmp_path, LOCOMO)
        asked = read_conversation(path, Adversarial.ASKED)
        assert [(q.answer, q.kind) for q in asked.questions[1:3]] == [
            ("not mentioned", "adversarial"),
            ("No", "adversarial"),
        ]
        assert "not mentioned" in asked.question_prompt
        assert "not mentioned" not in read_conversation(path).question_prompt

    def test_published_conversations_have_the_known_counts(self, shared_data: Path) -> None:
        found = [read_conversation(path) for path in find_files([shared_data / "locomo"])]
        kinds = Counter(q.kind for conversation in found for q in conversation.questions)
        assert kinds == {"multi_hop": 282, "temporal": 321, "open_domain": 96, "single_hop": 841}
        lengths = [len(conversation.messages) for conversation in found]
        assert (len(found), min(lengths), max(lengths)) == (10, 369, 689)
        assert all(q.answer for conversation in found for q in conversation.questions)

    def test_published_adversarial_questions_have_the_known_count(self, shared_data: Path) -> None:
        paths = find_files([shared_data / "locomo"])
        found = [read_conversation(path, Adversarial.ASKED) for path in paths]
        kinds = Counter(q.kind for conversation in found for q in conversation.questions)
        assert kinds["adversarial"] == 446
        assert kinds.total() == 1986


class TestRealTalk:
    def test_text_is_laid_out_by_session(self, tmp_path: Path) -> None:
        conversation = read_conversation(write(tmp_path, REALTALK))
        assert conversation.form is PromptLayout.TRANSCRIPT
        assert text_of(conversation).removeprefix(conversation.opening) == (
            "DATE: 29.12.2023, 00:51:12\nCONVERSATION:\n"
            'Ann said, "Look"\nAnn shared an image of there is a stream\nBo said, "Nice"\n'
        )
        assert conversation.messages[0] == Message(
            role="user",
            content="DATE: 29.12.2023, 00:51:12\nCONVERSATION:\n"
            'Ann said, "Look"\nAnn shared an image of there is a stream\n',
            speaker="Ann",
            date="29.12.2023, 00:52:00",
            utterance='Ann said, "Look"',
        )

    def test_questions_have_answer_kind_and_prompt(self, tmp_path: Path) -> None:
        conversation = read_conversation(write(tmp_path, REALTALK))
        assert conversation.questions == (Question("Why?", "Joy", "commonsense"),)
        assert "Question: Why?" in conversation.question_prompt.format(question="Why?")

    def test_published_conversations_have_the_known_counts(self, shared_data: Path) -> None:
        found = [read_conversation(path) for path in find_files([shared_data / "realtalk"])]
        kinds = Counter(q.kind for conversation in found for q in conversation.questions)
        assert kinds == {"multi_hop": 301, "temporal": 319, "commonsense": 108}
        lengths = [len(conversation.messages) for conversation in found]
        assert (len(found), min(lengths), max(lengths)) == (10, 410, 1548)
        captions = [text_of(conversation).count(" shared an image of ") for conversation in found]
        assert sum(captions) == 313


class TestBadTranscripts:
    @pytest.mark.parametrize("source", [LOCOMO, REALTALK])
    def test_invalid_transcript_questions_are_refused(
        self, tmp_path: Path, source: dict[str, object]
    ) -> None:
        path = write(tmp_path, {**source, "qa": [{"answer": "x", "category": 1}]})
        assert "qa 1 has no 'question'" in complaint(path)
        path = write(tmp_path, {**source, "qa": [{"question": "x", "category": 9}]})
        assert "qa 1: unknown category 9; it is one of 1 (multi_hop)" in complaint(path)

    def test_transcript_without_utterances_is_refused(self, tmp_path: Path) -> None:
        talk = {"speaker_a": "Ann", "speaker_b": "Bo"}
        assert "no session holds an utterance" in complaint(write(tmp_path, {"conversation": talk}))
        talk = {**talk, "session_1": [{"speaker": "Ann", "text": "x"}]}
        message = complaint(write(tmp_path, {"conversation": talk}))
        assert "'conversation' has no 'session_1_date_time'" in message
