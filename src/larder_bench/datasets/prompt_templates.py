"""Prompt templates of tasks, and conversations in the layout of a wording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from larder.core import Conversation, Message, PromptLayout, Question
from larder.session import ACKNOWLEDGEMENT
from larder_bench.datasets.lifelog_sessions import relative_depth
from larder_bench.datasets.task_prompts import Wording

STRING_MATCH = "string_match"  # RULER's score
ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}
# Otherwise small models keep acknowledging, as the assistant did in the conversation.
CHAT_ANSWER = "Earlier in our conversation, you told me that the answer is"
MEMORIZE = "Make sure to memorize it. I will quiz you about the {what} afterwards.\n"
ANSWER_FROM_DOCUMENTS = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)


@dataclass(frozen=True)
class PromptTemplate:
    """Texts around a context.

    Args:
        question: format string; `{subject}` is what is asked for.
        opening: text before the context.
        answer_prefix: format string of the answer's beginning; empty if the model begins itself.
    """

    question: str
    opening: str = ""
    answer_prefix: str = ""

    def ask(self, question: Question, subject: str) -> Question:
        """Question about a subject, with the answer and the other fields of the one given."""
        text = self.question.format(subject=subject)
        prefix = self.answer_prefix.format(subject=subject)
        return replace(question, question=text, answer_prefix=prefix)


@dataclass(frozen=True)
class TaskPrompts:
    """Templates of a task: the one of the bundled models' training, and the published one."""

    seed: PromptTemplate
    published: PromptTemplate

    def of(self, wording: Wording) -> PromptTemplate:
        """Template of a wording."""
        return self.seed if wording is Wording.SEED else self.published


def worded_text(
    name: str,
    text: str,
    questions: Sequence[Question],
    wording: Wording,
    opening: str = "",
    acknowledgement: str = ACKNOWLEDGEMENT,
    starts: Sequence[int | None] = (),
) -> Conversation:
    """Conversation about one text in the layout of a wording.

    In other wordings than SEED answers are scored by string match, unless they have a scorer.

    Args:
        opening: text before it.
        acknowledgement: the assistant's message after it, in the wording SEED.
        starts: index in the text where the answer to each question stands; None where it stands
            nowhere or in several places.
    """
    if wording is Wording.SEED:
        messages = (Message("user", opening + text), Message("assistant", acknowledgement))
        conversation = Conversation(name, messages, tuple(questions))
        offset = len(opening)
    else:
        conversation = Conversation(
            name,
            (Message("user", text),),
            tuple(_string_matched(question) for question in questions),
            wording.layout,
            opening,
            question_prompt="\n{question}" if wording is Wording.INSTRUCT else "\n{question}\n",
        )
        offset = 0
    depths = [
        None if start is None else relative_depth(conversation.messages, 0, offset + start)
        for start in starts or [None] * len(questions)
    ]
    return replace(
        conversation,
        questions=tuple(
            replace(question, depth=depth)
            for question, depth in zip(conversation.questions, depths, strict=True)
        ),
    )


def worded_chat(conversation: Conversation, wording: Wording) -> Conversation:
    """Conversation in messages, with its questions as a kind of model can answer them.

    INSTRUCT keeps the messages and begins short answers; PLAIN writes them as lines of a text.
    Conversations in another layout have their own wording and are returned as they are, but
    transcripts lose their chat format in PLAIN.
    """
    if wording is Wording.PLAIN and conversation.form is PromptLayout.TRANSCRIPT:
        return worded_document(conversation, wording)
    if wording is Wording.SEED or conversation.form is not PromptLayout.CHAT:
        return conversation
    questions = tuple(_string_matched(question) for question in conversation.questions)
    if wording is Wording.INSTRUCT:
        started = (
            one if one.items else replace(one, answer_prefix=CHAT_ANSWER) for one in questions
        )
        return replace(conversation, questions=tuple(started))
    messages = tuple(
        replace(message, content=f"{ROLES[message.role]}: {message.content}\n")
        for message in conversation.messages
    )
    return replace(
        conversation,
        messages=messages,
        questions=tuple(replace(one, answer_prefix="Answer:") for one in questions),
        form=PromptLayout.PLAIN,
        question_prompt="\nQuestion: {question}\n",
    )


def worded_document(document: Conversation, wording: Wording) -> Conversation:
    """Document with a question prompt of its own, in the layout of a wording.

    INSTRUCT puts text and question into one message. PLAIN begins the answer with the last line of
    the prompt if that ends in a colon, as in LongBench's "Answer:", or else with "Answer:".
    """
    if wording is Wording.SEED:
        return document
    questions = tuple(_string_matched(question) for question in document.questions)
    prompt = f"\n\n{document.question_prompt.strip()}"
    if wording is Wording.PLAIN:
        prompt, prefix = _split_answer_prefix(prompt)
        questions = tuple(replace(one, answer_prefix=prefix) for one in questions)
    return replace(document, questions=questions, form=wording.layout, question_prompt=prompt)


def _split_answer_prefix(prompt: str) -> tuple[str, str]:
    """Prompt up to the line that begins the answer, and that line."""
    before, _, last = prompt.rpartition("\n")
    if last.endswith((":", "：")) and "{question}" not in last:
        return f"{before}\n", last.format()
    return f"{prompt}\n", "Answer:"


def _string_matched(question: Question) -> Question:
    return question if question.scorer else replace(question, scorer=STRING_MATCH)


NEEDLE = PromptTemplate(
    "What is the special magic number for {subject} mentioned in the provided text?",
    "A special magic number is hidden within the following text. " + MEMORIZE.format(what="number"),
    "The special magic number for {subject} mentioned in the provided text is",
)
NEEDLES = PromptTemplate(
    "What are all the special magic numbers for {subject} mentioned in the provided text?",
    "Some special magic numbers are hidden within the following text. "
    + MEMORIZE.format(what="numbers"),
    "The special magic numbers for {subject} mentioned in the provided text are",
)
VALUE = PromptTemplate(
    "What is the value of {subject} in the text above?",
    "The following text gives names and their values. " + MEMORIZE.format(what="values"),
    "The value of {subject} is",
)
# By the kind of questions. The published prompts of needles, variables, words and QA are RULER's
# (Hsieh et al., 2024, arXiv:2404.06654, appendix D), that of the pass key follows Mohtashami and
# Jaggi (2023), arXiv:2305.16300, figure 3, and that of the look-up SCBench's (Li et al., 2024,
# arXiv:2412.10319, Retr.KV in the released code).
PROMPTS: Mapping[str, TaskPrompts] = {
    "niah_magic": TaskPrompts(
        PromptTemplate("What is the special magic number for {subject} mentioned in the text?"),
        NEEDLE,
    ),
    "niah_kv": TaskPrompts(PromptTemplate("What is the value of {subject}?"), VALUE),
    "lookup": TaskPrompts(
        PromptTemplate("What is the value of {subject}?"),
        PromptTemplate(
            'Key: "{subject}"\nThe value associated with the specified key is:',
            "Extract the value corresponding to the specified key in the JSON object below.\n\n",
            '"{subject}":',
        ),
    ),
    "niah_passkey": TaskPrompts(
        PromptTemplate("What is the pass key?"),
        PromptTemplate(
            "What is the pass key?",
            "There is an important info hidden inside a lot of irrelevant text. Find it and "
            "memorize it. I will quiz you about the important information there.\n",
            "The pass key is",
        ),
    ),
    "niah_vars": TaskPrompts(
        PromptTemplate("What is the value of the variable {subject}?"),
        PromptTemplate(
            "Question: Find all variables that are assigned the value {subject} in the text above.",
            "Memorize and track the chain(s) of variable assignment hidden in the following "
            "text.\n\n",
            "Answer: According to the chain(s) of variable assignment in the text above, the "
            "variables that are assigned the value {subject} are:",
        ),
    ),
    "multi_value": TaskPrompts(
        PromptTemplate(
            "What are all the special magic numbers for {subject} mentioned in the text?"
        ),
        NEEDLES,
    ),
    "multi_query": TaskPrompts(
        PromptTemplate("What are the special magic numbers for {subject} mentioned in the text?"),
        NEEDLES,
    ),
    "common_words": TaskPrompts(
        PromptTemplate(
            "Which {subject} words come most often in the list? Name them in the order in which "
            "they first come.",
            "Below is a numbered list of words. ",
        ),
        PromptTemplate(
            "Question: What are the {subject} most common words in the above list?",
            "Below is a numbered list of words. In these words, some appear more often than "
            "others. Memorize the ones that appear most often.\n",
            "Answer: The top {subject} words that appear most often in the list are:",
        ),
    ),
    "frequent_words": TaskPrompts(
        PromptTemplate(
            "Which three words come most often in the text? Name the most frequent one first.",
            "Below is a text of coded words and dots. ",
        ),
        PromptTemplate(
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the "
            "three most frequently appeared words in the above coded text?",
            "Read the following coded text and track the frequency of each coded word. Find the "
            "three most frequently appeared coded words. ",
            "Answer: According to the coded text above, the three most frequently appeared words "
            "are:",
        ),
    ),
    "passage": TaskPrompts(
        PromptTemplate('Go on with the text after the words "{subject}".'),
        PromptTemplate(
            'Repeat the passage of the above text that begins with "{subject}", word for word.',
            "Memorize the following text. I will ask you to repeat passages of it word for word "
            "afterwards.\n",
            "{subject}",
        ),
    ),
    "few_shot": TaskPrompts(
        PromptTemplate(
            'Which label has the utterance "{subject}"?', "Below are utterances and their labels.\n"
        ),
        PromptTemplate(
            "Utterance: {subject}",
            "Please determine the label of the utterance below. Here are some examples of "
            "utterances.\n\n",
            "Label:",
        ),
    ),
    "qa": TaskPrompts(
        PromptTemplate("{subject}", "Below are documents.\n\n"),
        PromptTemplate(
            f"{ANSWER_FROM_DOCUMENTS}Question: {{subject}}",
            f"{ANSWER_FROM_DOCUMENTS}The following are given documents.\n\n",
            "Answer:",
        ),
    ),
    "code": TaskPrompts(
        PromptTemplate("What is the next line of the code?", "Below is code.\n"),
        PromptTemplate("Next line of code:", "Please complete the code given below.\n"),
    ),
}
