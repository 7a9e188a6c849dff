"""Texts of `larder demo`, with their questions and the policies that are compared on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import as_file, files

from larder.core.conversation import Conversation, Question
from larder.session.files.loader import read_conversation

CONVERSATION_MODEL = "seed"
DOCUMENT_MODEL = "smollm2"


@dataclass(frozen=True)
class Demonstration:
    """A bundled text and the policies that read it.

    Args:
        file: its name in the package.
        text: what it is, for the introduction.
        policies: spellings of the policies with a budget, by their names in the table.
        budget_divisor: the default budget is the context divided by this.
        questions: with their answers; empty if the file has them.
    """

    file: str
    text: str
    policies: Mapping[str, str]
    budget_divisor: int
    questions: tuple[Question, ...] = ()

    @property
    def conversation(self) -> Conversation:
        """The text, with its questions."""
        with as_file(files("larder.cli.demo") / self.file) as path:
            found = read_conversation(path)
        return replace(found, questions=self.questions) if self.questions else found


CONVERSATION = Demonstration(
    file="conversation.json",
    text="a life-log",
    policies={
        "streaming_llm": "streaming_llm",
        "snapkv_blockwise": "snapkv_blockwise",
        "kvzip_blockwise": "kvzip_blockwise",
        "epicache": "epicache",
    },
    budget_divisor=6,
)
DOCUMENT = Demonstration(
    file="field_station.md",
    text="the handbook of a field station",
    policies={
        "icecache": "icecache",
        "kvzip:int4": "whole() > reconstruct() > global() > quantized(bits=4)",
        "epicache_pooled": "epicache_pooled",
        "streaming_llm": "streaming_llm",
        "snapkv": "snapkv",
    },
    budget_divisor=4,
    questions=(
        Question("What is the code of the door?", "4718"),
        Question("How many beds are there?", "11 beds"),
        Question("Where are the spare filters kept?", "blue cupboard"),
        Question("What is the customer number of the gas tank?", "20561"),
        Question("What is the name of the boat?", "Margaret"),
        Question("In which year do the measurements begin?", "1937"),
        Question("What is the password of the computer?", "heron88"),
        Question("How deep is the deepest place of the lake?", "63 met"),
        Question("What is the address of the laboratory?", "27 Mill Lane"),
        Question("What is the name of the goat?", "Bishop"),
        Question("On which channel does the radio reach the mountain rescue?", "channel 16"),
        Question("What is the telephone number of the doctor?", "55302"),
        Question("How much is the fee for each night?", "14 pounds"),
        Question("How many days does the battery on the island last?", "40 days"),
    ),
)


def demonstration(model: str) -> Demonstration:
    """The conversation for the bundled model, which was trained on such; else the document."""
    return CONVERSATION if model == CONVERSATION_MODEL else DOCUMENT
