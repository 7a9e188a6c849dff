"""Few-shot classification: labelled utterances, and the question for the label of a new one.

The form is that of TREC in Yushi Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long
Context Understanding" (2023), arXiv:2308.14508, section 3; here the utterances open dialogues of
`--corpus` (Abhinav Rastogi et al., "Towards Scalable Multi-domain Conversational Agents: The
Schema-Guided Dialogue Dataset" (2020), arXiv:1909.05855), and a label is what the dialogue is
about. Labels have equally many examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random

from larder.core import BadParameter, Conversation, Question
from larder.session import ACKNOWLEDGEMENT
from larder_bench.datasets.corpus import Dialogue
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.prompt_templates import PROMPTS, worded_text
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask

KIND = "few_shot"
EXAMPLE = "Utterance: {utterance}\nLabel: {label}\n"


@dataclass(frozen=True)
class FewShot(BenchTask):
    """Examples, as many as fit or as the corpus has.

    Args:
        questions: number of utterances to classify.
        labels: number of labels; all if the corpus has fewer.
    """

    questions: int = 8
    labels: int = 6

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"few_shot.questions must be 1 or more, got {self.questions}.")
        if self.labels < 2:
            raise BadParameter(f"few_shot.labels must be 2 or more, got {self.labels}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, count = Random(seed), sources.count_tokens
        prompt = PROMPTS[KIND].of(sources.wording)
        pool = self._pool(sources.dialogues, random)
        labels = list(pool)
        turns = islice(cycle(labels), self.questions)
        asked = [(pool[label].pop(), label) for label in turns]
        left = tokens - count(prompt.opening) - count(ACKNOWLEDGEMENT) - 2 * MESSAGE_MARKER_TOKENS
        examples = list[str]()
        for utterances in zip(*pool.values(), strict=False):
            pairs = random.sample(list(zip(utterances, labels, strict=True)), len(labels))
            added = [EXAMPLE.format(utterance=text, label=label) for text, label in pairs]
            left -= sum(map(count, added))
            if left < 0:
                break
            examples += added
        if not examples:
            raise BadParameter(
                f"few_shot.tokens must hold an example of each of {len(labels)} labels, got "
                f"{tokens}: take more tokens or fewer labels."
            )
        classes = tuple(labels)
        questions = [
            prompt.ask(Question("", label, KIND, scorer="classes", classes=classes), utterance)
            for utterance, label in random.sample(asked, len(asked))
        ]
        name = f"{KIND}-{tokens}-{seed}"
        return worded_text(name, "".join(examples), questions, sources.wording, prompt.opening)

    def _pool(self, dialogues: Sequence[Dialogue], random: Random) -> dict[str, list[str]]:
        """Utterances of randomly drawn labels, in random order.

        Raises:
            BadParameter: the corpus has too few for the questions.
        """
        each = -(-self.questions // self.labels)
        known = {
            label: texts
            for label, texts in labelled_utterances(dialogues).items()
            if len(texts) > each
        }
        if len(known) < 2:
            raise BadParameter(
                f"few_shot.questions is {self.questions}, but the corpus has {len(known)} labels "
                f"with more than {each} utterances: ask fewer."
            )
        drawn = random.sample(list(known), min(self.labels, len(known)))
        return {label: random.sample(known[label], len(known[label])) for label in drawn}


def labelled_utterances(dialogues: Sequence[Dialogue]) -> Mapping[str, list[str]]:
    """First utterances of dialogues about one thing, by the thing's name.

    Things whose name contains that of another are left out: they are hard to tell apart.
    """
    found = dict[str, dict[str, None]]()
    for dialogue in dialogues:
        nouns = {booking.noun for booking in dialogue.bookings}
        if len(nouns) == 1 and dialogue.messages[0].role == "user":
            found.setdefault(nouns.pop(), {})[" ".join(dialogue.messages[0].content.split())] = None
    return {
        noun: list(texts)
        for noun, texts in sorted(found.items())
        if not any(other in noun for other in found if other != noun)
    }


Part = FewShot
