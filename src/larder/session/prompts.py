"""The prompts that policies judge by, written for a model: names to token ids.

The requests are ours; what they ask for follows the papers: KVzip repeats the context
(arXiv:2505.23416), InfiniPot asks for what matters (arXiv:2410.01518), EpiCache asks for the key
facts of an episode and then shows its segments where the answer would stand (arXiv:2509.17396 and
its released code). OracleKV (Zhu et al., 2025, ICML workshop on long-context foundation models)
tells the model what users are known to ask for, from statistics of real dialogues that it does not
publish; ours is a guess at them, so what is judged by it is like OracleKV, not the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from larder.core.errors import UsageError
from larder.core.observation import Prompts
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

REPEAT = "Repeat the previous context exactly."
SUMMARIZE = "Summarize the previous context, with its most important parts."
GUIDANCE = (
    "Somebody will ask about the previous context, but not yet known is what. Most questions ask "
    "who, what, when, where, how many, why or how; for names, places, dates, numbers, prices, "
    "things owned and bought, tastes, opinions, plans, promises, reasons and results; for the "
    "latest state of what has changed; for a summary, a comparison or a list. Recall all that "
    "would answer such questions."
)
EPISODE = (
    "List the key facts of this part of the conversation: names, persons, dates, events, personal "
    "details, plans, opinions and feelings."
)


def common_prompts(scribe: TokenizerAdapter) -> dict[str, tuple[int, ...]]:
    """The prompts that depend on nothing but the model."""
    texts = {"repeat": REPEAT, "summarize": SUMMARIZE, "guidance": GUIDANCE}
    return {name: scribe.question(text) for name, text in texts.items()}


def episode_prompt(scribe: TokenizerAdapter, texts: Sequence[str]) -> tuple[int, ...]:
    """A request for key facts, answered with the episode's representative segments."""
    return scribe.question(EPISODE) + scribe.encode("\n\n".join(texts))


def require_prompts(book: Prompts, names: frozenset[str]) -> None:
    """Raises: UsageError: a prompt is needed that nothing provides."""
    for name in sorted(names - book.keys()):
        way = {
            "question": "it needs the question before reading: use it where questions are known",
            "episode": "it needs episodes: put episodes() in front",
        }.get(name, f"only {', '.join(sorted(book))} are known: give its text with prompts={{...}}")
        raise UsageError(f"The policy looks for the prompt {name!r}, but {way}.")
