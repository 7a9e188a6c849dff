"""One small explanation that every test of the page starts from."""

import pytest

from larder.explain import Explanation, PageAnswer, PageEpisode, PageMessage

MESSAGES = (
    PageMessage("system", "", "", ("<|system|>", "Session", " 1", "<|end|>"), 1, 1),
    PageMessage("user", "Ann", "8 May 2023", ("<|user|>", "na", "", "ïve", "\n", "<|end|>"), 1, 1),
)


def episode(name: str, kept_heads: tuple[int, ...]) -> PageEpisode:
    first = tuple(min(kept, 2) for kept in kept_heads)
    second = tuple(max(kept - 2, 0) for kept in kept_heads)
    return PageEpisode(
        name, kept_heads, ((5, 4), (3, 2)), ("How naïve!",), ("words",), (first, second)
    )


@pytest.fixture
def small() -> Explanation:
    return Explanation(
        title="A small talk",
        model="tiny",
        policy="snapkv(window=8) > uniform()",
        context_tokens=10,
        budget_tokens=4,
        full_kv_bytes=4096,
        kv_bytes=2048,
        active_kv_bytes=1024,
        peak_kv_bytes=1536,
        messages=MESSAGES,
        episodes=(
            episode("greetings", (4, 0, 1, 2, 3, 4, 0, 0, 1, 2)),
            episode("words", (0, 4, 4, 0, 0, 1, 1, 3, 2, 0)),
        ),
        answers=(PageAnswer("Who?", "Ann", "Ann", 1, True), PageAnswer("When?", "never")),
        sliding_layers=(1,),
    )
