"""Reader of LoCoMo conversations.

Adyasha Maharana, Dong-Ho Lee, Sergey Tulyakov, Mohit Bansal, Francesco Barbieri and Yuwei Fang,
"Evaluating Very Long-Term Conversational Memory of LLM Agents" (2024), arXiv 2402.17753.
"""

from __future__ import annotations

from larder.core.conversation import Adversarial, Conversation, PromptLayout, Question
from larder.core.errors import InputError
from larder.session.files import dialogue
from larder.session.files.dialogue import Utterance
from larder.session.files.json_fields import Fields, fields_of, list_of, text_of, text_or_number_of

SHAPE = 'LoCoMo {"conversation": {"speaker_a", "speaker_b", "session_1", ...}, "qa"}'
KINDS = {1: "multi_hop", 2: "temporal", 3: "open_domain", 4: "single_hop", 5: "adversarial"}
ADVERSARIAL = 5
REFUSAL = "not mentioned"

# LoCoMo's own prompt adds a hint about dates to temporal questions alone. That would tell the model
# the category and put words into the question that episodes are matched with, so here every
# question carries it, in the prompt, and `Question.question` stays bare.
PROMPT = (
    "Answer the question below from the conversation above, in a few words and with the "
    "conversation's own words where you can. If it asks when something happened, work the answer "
    "out from the dates of the sessions.{refusal}\nQuestion: {{question}}"
)
REFUSAL_INSTRUCTION = f' If the conversation does not tell, answer "{REFUSAL}".'


def matches(data: object) -> bool:
    """Test for the format: an object with `conversation`."""
    return isinstance(data, dict) and "conversation" in data


def read(data: object, name: str, adversarial: Adversarial) -> Conversation:
    """Read transcript and questions; with adversarial questions the prompt permits a refusal."""
    fields = fields_of(data, "the file")
    talk = fields_of(fields["conversation"], "'conversation'")
    first, second = (text_of(talk, key, "'conversation'") for key in ("speaker_a", "speaker_b"))
    refusal = REFUSAL_INSTRUCTION if adversarial is Adversarial.ASKED else ""
    return Conversation(
        name=name,
        messages=dialogue.messages(dialogue.sessions(talk, "'conversation'", _utterance)),
        questions=_questions(list_of(fields.get("qa", []), "'qa'"), adversarial),
        form=PromptLayout.TRANSCRIPT,
        opening=dialogue.opening(first, second),
        question_prompt=PROMPT.format(refusal=refusal),
    )


def _utterance(entry: object, location: str, date: str) -> Utterance:
    fields = fields_of(entry, location)
    # Some releases have a corrected version of the text beside the original.
    text = text_of(fields, "clean_text" if "clean_text" in fields else "text", location)
    caption = text_or_number_of(fields, "blip_caption", location).strip()
    picture = f"and shared {caption}" if caption else ""
    return Utterance(text_of(fields, "speaker", location), text, date, picture)


def _questions(entries: list[object], adversarial: Adversarial) -> tuple[Question, ...]:
    questions: list[Question] = []
    for number, entry in enumerate(entries, start=1):
        where = f"qa {number}"
        fields = fields_of(entry, where)
        category = category_of(fields, KINDS, where)
        if category != ADVERSARIAL:
            answer = text_or_number_of(fields, "answer", where)
        elif adversarial is Adversarial.ASKED:
            answer = text_or_number_of({"answer": REFUSAL, **fields}, "answer", where)
        else:
            continue
        questions.append(Question(text_of(fields, "question", where), answer, KINDS[category]))
    return tuple(questions)


def category_of(fields: Fields, kinds: dict[int, str], location: str) -> int:
    """Category of a question, a key of `kinds`."""
    category = fields.get("category")
    if not isinstance(category, int) or category not in kinds:
        known = ", ".join(f"{number} ({kind})" for number, kind in kinds.items())
        raise InputError(f"{location}: unknown category {category!r}; it is one of {known}.")
    return category
