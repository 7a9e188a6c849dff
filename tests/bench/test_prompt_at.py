"""A prompt of what was said, so near to the question as stated, stands where the question would."""

from __future__ import annotations

from typing import Any

import pytest

from larder.bench import prompt_at
from larder.bench.models import open_model
from larder.bench.prompt_at import PromptAt
from larder.bench.sources import Sources
from larder.bench.subject import Scope
from larder.bench.subjects import subject
from larder.bench.workbench import Workbench
from larder.core.conversation import Conversation, Message, Question
from larder.core.errors import BadParameter, SpellingError, UnknownName
from larder.engine.engine import Engine

SAID = [f"The code of box {number} is {number}{number}." for number in range(9)]
TALK = Conversation("talk", tuple(Message("user", text) for text in SAID))
ASKED = Question("What is the code of box 7?", "77")


def test_utterances_around_a_rank_in_the_order_they_were_said() -> None:
    ranked = [7, 3, 0, 8, 1, 2, 4, 5, 6, 9]
    assert PromptAt(percentile=0, utterances=3).chosen(ranked) == [0, 3, 7]
    assert PromptAt(percentile=50, utterances=2).chosen(ranked) == [1, 2]
    assert PromptAt(percentile=100, utterances=3).chosen(ranked) == [5, 6, 9]
    assert PromptAt(percentile=50, utterances=99).chosen(ranked) == sorted(ranked)


def test_the_prompt_is_what_the_rank_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(open_model("random:qwen3-tiny"), "full")
    bench = Workbench(engine, Sources(engine.scribe.length))
    seen: list[tuple[str, int | None]] = []
    read = prompt_at.read

    def noted(desk: Any, talk: Any, policy: Any, sizes: Any, prompts: Any) -> Any:
        memory = read(desk, talk, policy, sizes, prompts)
        text = engine.scribe.decode(prompts["question"])
        seen.append((text, memory.figures.budget_tokens))
        return memory

    monkeypatch.setattr(prompt_at, "read", noted)
    for percentile in (0, 100):
        one = subject(f'prompt_at(percentile={percentile}, utterances=1, embedder="tokens")')
        assert one.scope is Scope.EACH
        one.read(bench, TALK, 40, ASKED)
    (near, budget), (far, _) = seen
    assert SAID[7] in near and not any(text in near for text in SAID[:7]) and budget == 40
    assert any(text in far for text in SAID) and SAID[7] not in far


@pytest.mark.parametrize(
    ("spelling", "error", "said"),
    [
        ("prompt_at(percentile=101)", BadParameter, "prompt_at.percentile must be 0 to 100"),
        ("prompt_at(utterances=0)", BadParameter, "prompt_at.utterances must be 1 or more"),
        ("prompt_at(rank=5)", UnknownName, "no parameter 'rank'"),
        ("prompt_at() > drop()", SpellingError, "nothing can stand behind it"),
    ],
)
def test_what_is_written_wrong(spelling: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        subject(spelling)
