"""Tokenizer adapter: conversations, questions and answers to token ids with the chat template."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import urandom
from typing import Any

from larder.core.conversation import Conversation, PromptLayout, Question
from larder.core.observation import Lexicon
from larder.policy.providers.base import VocabularyProvider, select_providers
from larder.session.transcript.chat_template import ChatTemplate, PromptEnd, TemplateMessage

PLACEHOLDER_KEY = urandom(16).hex()  # of this process; it occurs in no text
ACKNOWLEDGEMENT = "I have read the text. Ask me anything about it."


@dataclass(frozen=True)
class TokenizedTranscript:
    """Token ids of a conversation, with the span of each message.

    Args:
        ids: token ids.
        spans: tokens [start, stop) of each message, with the header of its turn. Text that the
            template adds after the last message belongs to none.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class TokenizerAdapter:
    """Encoder of conversations, questions and answers in the chat format of a model.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._token_sets: dict[str, frozenset[int]] = {}

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables of the chat template that a conversation may set."""
        return self._template.variables

    @property
    def takes_tools(self) -> bool:
        """True if the chat template writes the tools of a conversation."""
        return self._template.takes_tools

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a bare text."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt with the special tokens that the tokenizer adds.

        None are added to a prompt that begins with the tokenizer's first token, as rendered chat
        templates do.
        """
        first = self.tokenizer.bos_token
        is_marked = bool(first) and text.startswith(first)
        encoded = self.tokenizer(text, add_special_tokens=not is_marked, verbose=False)
        return tuple(encoded["input_ids"])

    def token_starts(self, text: str) -> list[int]:
        """Index of the first character of each token of a bare text."""
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return [start for start, _ in encoded["offset_mapping"]]

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a bare text."""
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def encode_conversation(self, conversation: Conversation) -> TokenizedTranscript:
        """Encode a whole conversation.

        A document or a transcript becomes one user message with an acknowledgement, so that a
        question after it is an ordinary turn. In `PromptLayout.SINGLE_TURN` the message stays open
        for the question. A question inside (`Conversation.inside`) is the end of the context.
        """
        text, ids, starts = self._encoded(conversation)
        marked = tuple(
            replace(message, content=_placeholder(n))
            for n, message in enumerate(conversation.messages)
        )
        frame = self._context_text(replace(conversation, messages=marked))
        stops = _content_stops(text, frame, [message.content for message in conversation.messages])
        cuts = [0, *(bisect_left(starts, stop) for stop in stops)]
        return TokenizedTranscript(ids, tuple(zip(cuts, cuts[1:], strict=False)))

    def num_prefix_tokens(self, conversation: Conversation) -> int:
        """Number of tokens before the first context, in `PromptLayout.CONTEXTS`."""
        return self.count_tokens(self._separate_texts(conversation)[0])

    def render_conversation(self, conversation: Conversation) -> tuple[str, list[int]]:
        """Rendered text of a conversation, and the index of the first character of each token."""
        text, _, starts = self._encoded(conversation)
        return text, starts

    def _encoded(self, conversation: Conversation) -> tuple[str, tuple[int, ...], list[int]]:
        text, ids, starts = "", list[int](), list[int]()
        for part in self._separate_texts(conversation):
            # Not verbose: the tokenizer would warn about long texts on stderr.
            encoded = self.tokenizer(
                part, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            starts += [len(text) + start for start, _ in encoded["offset_mapping"]]
            ids += encoded["input_ids"]
            text += part
        return text, tuple(ids), starts

    def _separate_texts(self, conversation: Conversation) -> list[str]:
        """Parts of a rendered conversation that are encoded apart: one, or prefix, contexts and
        what is behind them.

        A context so has the same tokens in every prompt.
        """
        if conversation.form is not PromptLayout.CONTEXTS:
            return [self._context_text(conversation)]
        contents = [message.content for message in conversation.messages]
        mark = _placeholder(0)
        whole = replace(conversation, messages=(replace(conversation.messages[0], content=mark),))
        before, _, after = self._context_text(whole).partition(mark)
        return [before, *contents, after]

    def encode_question_about(
        self, conversation: Conversation, question: Question | str
    ) -> tuple[int, ...]:
        """Encode a question after the context of a conversation, in the conversation's prompt, up
        to the beginning of the answer and the question's own prefix of it.

        The question inside the context (`Conversation.inside`) is not repeated: only what leads to
        the answer is left of it.
        """
        question = Question(question) if isinstance(question, str) else question
        asked, answered = self._question_texts(conversation, question)
        text = answered if question == conversation.inside else asked + answered
        return self.encode(text)

    def _context_text(self, conversation: Conversation) -> str:
        """Rendered text of a conversation, with the question inside it."""
        text = self._rendered(conversation)
        if conversation.inside is not None:
            text += self._question_texts(conversation, conversation.inside)[0]
        return text

    def _rendered(self, conversation: Conversation) -> str:
        form, turns = conversation.form, _template_messages(conversation)
        if form is PromptLayout.PLAIN:
            return turns[0].content
        if form is PromptLayout.SINGLE_TURN:
            return self._around(PromptEnd.CLOSED)[0] + turns[0].content
        return self._template.render(turns, PromptEnd.CLOSED)

    def _question_texts(self, conversation: Conversation, question: Question) -> tuple[str, str]:
        """Text that asks a question after a context, and text from there to the answer."""
        text = conversation.question_prompt.format(question=question.question)
        if conversation.form is PromptLayout.PLAIN:
            return text, question.answer_prefix or "\n"
        if conversation.form is PromptLayout.SINGLE_TURN:
            return text, self._around(PromptEnd.ANSWER)[1] + question.answer_prefix
        added = self._template.user_message(text, PromptEnd.ANSWER)
        stop = _end_of_content(added, text, max(0, added.find(text.strip())))
        return added[:stop], added[stop:] + question.answer_prefix

    def _around(self, end: PromptEnd) -> tuple[str, str]:
        """Text of the template before and after the first user message."""
        placeholder = _placeholder(0)
        rendered = self._template.render([TemplateMessage("user", placeholder)], end)
        before, _, after = rendered.partition(placeholder)
        return before, after

    def lexicon(self, names: Iterable[str]) -> Lexicon:
        """Token sets of the vocabulary providers among the named ones."""
        providers = select_providers(names, VocabularyProvider)
        for name, provider in providers.items():
            if name not in self._token_sets:
                self._token_sets[name] = self._token_set(provider)
        return {name: self._token_sets[name] for name in providers}

    def _token_set(self, provider: VocabularyProvider) -> frozenset[int]:
        special = frozenset(self.tokenizer.all_special_ids)
        texts = ((token, self.tokenizer.decode([token])) for token in range(len(self.tokenizer)))
        inside = (token for token, text in texts if provider.contains(text, token in special))
        return frozenset(inside)

    def encode_question(self, text: str) -> tuple[int, ...]:
        """Encode a user message after a finished turn, up to the beginning of the answer."""
        return self.encode(self._template.user_message(text, PromptEnd.ANSWER))

    def encode_first_question(self, text: str) -> tuple[int, ...]:
        """Encode the first user message, up to the beginning of the answer."""
        return self.encode(self._template.render([TemplateMessage("user", text)], PromptEnd.ANSWER))

    def render_messages(self, turns: Sequence[TemplateMessage]) -> str:
        """Text of a whole conversation, up to the beginning of the next answer."""
        return self._template.render(turns, PromptEnd.ANSWER)

    def render_continuation(self, turns: Sequence[TemplateMessage]) -> str:
        """Text of further messages after a finished turn, up to the beginning of the answer."""
        return self._template.continuation(turns, PromptEnd.ANSWER)

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Encode an answer as it follows a question, end of turn included."""
        return self.encode(text + self._template.end_of_turn())

    def encode_answer_about(
        self, conversation: Conversation, question: Question
    ) -> tuple[int, ...]:
        """Encode the expected answer as it follows the question, end of turn included."""
        is_plain = conversation.form is PromptLayout.PLAIN
        end = "\n" if is_plain else self._template.end_of_turn()
        return self.encode(question.prefixed_answer + end)

    def end_of_turn_ids(self) -> tuple[int, ...]:
        """Token ids that end the assistant's turn."""
        return self.encode(self._template.end_of_turn())


def _template_messages(conversation: Conversation) -> list[TemplateMessage]:
    if conversation.form is PromptLayout.CHAT:
        return [TemplateMessage(message.role, message.content) for message in conversation.messages]
    lines = (conversation.opening, *(message.content for message in conversation.messages))
    text = "".join(lines)
    return [TemplateMessage("user", text), TemplateMessage("assistant", ACKNOWLEDGEMENT)]


def _placeholder(number: int) -> str:
    """Placeholder of the content of a message; no template changes it, and no text contains it."""
    return f"0mark{number}x{PLACEHOLDER_KEY}0"


def _content_stops(text: str, frame: str, contents: Sequence[str]) -> list[int]:
    """End of each content in the rendered text.

    Args:
        frame: the same rendering with placeholders for contents. The text between two placeholders
            is skipped first, so that a short content is not found in the header of its own turn.
    """
    cursor, start, stops = 0, 0, []
    for index, content in enumerate(contents):
        mark = _placeholder(index)
        if (found := frame.find(mark, start)) >= 0:
            cursor = _end_of_match(text, frame[start:found], cursor)
            cursor = _end_of_content(text, content, cursor)
            start = found + len(mark)
        stops.append(cursor)
    return stops


def _end_of_content(text: str, content: str, cursor: int) -> int:
    """End of a content, whose white space the template may have trimmed."""
    for form in (content, content.lstrip(), content.rstrip()):
        if text.startswith(form, cursor):
            return cursor + len(form)
    return _end_of_match(text, content.strip(), cursor)


def _end_of_match(text: str, part: str, cursor: int) -> int:
    found = text.find(part, cursor)
    return cursor if found < 0 else found + len(part)
