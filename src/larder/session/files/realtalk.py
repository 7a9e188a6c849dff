"""Reader of RealTalk conversations.

Dong-Ho Lee, Adyasha Maharana, Jay Pujara, Xiang Ren and Francesco Barbieri, "REALTALK: A 21-Day
Real-World Dataset for Long-Term Conversation" (2025), arXiv 2502.13270.
"""

from __future__ import annotations

from larder.core.conversation import Conversation, PromptLayout, Question
from larder.session.files import dialogue
from larder.session.files.dialogue import Utterance
from larder.session.files.json_fields import fields_of, list_of, text_of, text_or_number_of
from larder.session.files.locomo import category_of

SHAPE = 'RealTalk {"name": {"speaker_1", "speaker_2"}, "session_1", ..., "qa"}'
KINDS = {1: "multi_hop", 2: "temporal", 3: "commonsense"}
PROMPT = (
    "From the conversation above, answer the question below with a short phrase. Where a date is "
    "wanted, infer it, be it only approximate, from the dates of the sessions.\n"
    "Question: {question}\nAnswer:"
)


def matches(data: object) -> bool:
    """Test for the format: an object with sessions at the top, beside the names of the speakers."""
    return isinstance(data, dict) and "name" in data and "session_1" in data


def read(data: object, name: str) -> Conversation:
    """Read transcript and questions."""
    fields = fields_of(data, "the file")
    names = fields_of(fields["name"], "'name'")
    first, second = (text_of(names, key, "'name'") for key in ("speaker_1", "speaker_2"))
    questions = list_of(fields.get("qa", []), "'qa'")
    return Conversation(
        name=name,
        messages=dialogue.messages(dialogue.sessions(fields, "the file", _utterance)),
        questions=tuple(_question(entry, f"qa {n}") for n, entry in enumerate(questions, start=1)),
        form=PromptLayout.TRANSCRIPT,
        opening=dialogue.opening(first, second),
        question_prompt=PROMPT,
    )


def _utterance(entry: object, location: str, date: str) -> Utterance:
    fields = fields_of(entry, location)
    speaker = text_of(fields, "speaker", location)
    text = text_of(fields, "clean_text" if "clean_text" in fields else "text", location)
    caption = text_or_number_of(fields, "blip_caption", location).strip()
    return Utterance(
        speaker=speaker,
        text=text,
        date=text_or_number_of(fields, "date_time", location) or date,
        picture=f"{speaker} shared an image of {caption}" if caption else "",
    )


def _question(entry: object, location: str) -> Question:
    fields = fields_of(entry, location)
    return Question(
        question=text_of(fields, "question", location),
        answer=text_or_number_of(fields, "answer", location),
        kind=KINDS[category_of(fields, KINDS, location)],
    )
