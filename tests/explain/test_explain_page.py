"""The page holds exactly what it was given, and nothing in it can act."""

import json
import random
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import pytest

from larder.explain import Explanation, PageAnswer, PageEpisode, PageMessage, render
from larder.explain.page import DIGITS

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "]]>--!><img src=x onerror=alert(1)>",
    "$data $style ${script} $$",
    "</title><style>*{display:none}</style>",
    "&lt;b&gt; &amp; \u2028 \u2029 \x00 \x1b[31m \"'`\\",
    "\ud83d lone, \u202e turned, \U0001f370 whole",
)


class Elements(HTMLParser):
    """Every element of a page, with its attributes and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))

    def handle_data(self, data: str) -> None:
        if self.found:
            self.found[-1][2].append(data)

    def tags(self) -> list[str]:
        return [tag for tag, _, _ in self.found]

    def text(self, tag: str, **attributes: str) -> str:
        (text,) = [
            "".join(text)
            for found, has, text in self.found
            if found == tag and attributes.items() <= has.items()
        ]
        return text


def page_data(page: str) -> dict[str, Any]:
    return json.loads(Elements(page).text("script", id="explanation"))


def decode(text: str, width: int) -> tuple[int, ...]:
    base = len(DIGITS)
    counts = []
    for start in range(0, len(text), width):
        count = 0
        for digit in text[start : start + width]:
            count = count * base + DIGITS.index(digit)
        counts.append(count)
    return tuple(counts)


def with_text(small: Explanation, text: str) -> Explanation:
    """Explanation with one text in every field that holds a text."""
    return replace(
        small,
        title=text,
        model=text,
        policy=text,
        messages=tuple(
            replace(m, role=text, speaker=text, date=text, tokens=(text,) * len(m.tokens))
            for m in small.messages
        ),
        episodes=tuple(
            replace(e, name=text, segments=(text,), topics=(text,)) for e in small.episodes
        ),
        answers=(PageAnswer(text, text, text, 0, False),),
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(small: Explanation, text: str) -> None:
    page = render(with_text(small, text))
    assert Elements(page).tags() == Elements(render(small)).tags()
    data = page_data(page)
    assert data["title"] == data["policy"] == data["answers"][0]["answer"] == text
    assert data["episodes"][0]["segments"] == [text]
    assert data["messages"][1]["tokens"] == [text] * 6
    page.encode("utf-8")


def test_data_never_holds_a_sign_of_markup(small: Explanation) -> None:
    for text in HOSTILE:
        page = render(with_text(small, text))
        data = page.split('id="explanation">', 1)[1].split("</script>", 1)[0]
        assert not set("<>&") & set(data)
        assert data.isascii()


def test_title_is_escaped(small: Explanation) -> None:
    title = "</title><b>\u00e9 & co"
    assert Elements(render(replace(small, title=title))).text("title").strip() == title


def test_policy_of_the_page_admits_its_own_script_and_style_only(small: Explanation) -> None:
    page = render(small)
    elements = Elements(page)
    (policy,) = [
        has["content"]
        for tag, has, _ in elements.found
        if tag == "meta" and has.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    script = page.rsplit("<script>", 1)[1].rsplit("</script>", 1)[0]
    style = page.split("<style>", 1)[1].split("</style>", 1)[0]
    for text in (script, style):
        assert b64encode(sha256(text.encode()).digest()).decode() in policy


def test_page_needs_nothing_from_elsewhere(small: Explanation) -> None:
    page = render(small)
    assert not re.search(r"\b(src|href)=|@import|url\(|\bfetch\(|\bimport\b", page)
    assert set(re.findall(r"https?://[^\"\s]+", page)) == {"http://www.w3.org/2000/svg"}


def test_script_never_parses_text_as_markup(small: Explanation) -> None:
    page = render(small)
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|\beval\(|Function\("
    assert not re.search(markup, page)


def test_transcript_reassembles_exactly(small: Explanation) -> None:
    data = page_data(render(small))
    pieces = [token for message in data["messages"] for token in message["tokens"]]
    assert "".join(pieces) == "<|system|>Session 1<|end|><|user|>na\u00efve\n<|end|>"
    assert tuple(pieces) == tuple(t for message in small.messages for t in message.tokens)


def test_counts_round_trip(small: Explanation) -> None:
    data = page_data(render(small))
    for shown, given in zip(data["episodes"], small.episodes, strict=True):
        assert decode(shown["kept"], data["heads_width"]) == given.kept_heads
        layers = tuple(decode(row, data["layer_width"]) for row in shown["layers"])
        assert layers == given.kept_by_layer
        assert tuple(map(tuple, shown["lengths"])) == given.kept_lengths


@pytest.mark.parametrize("heads", [1, 61, 62, 640, 3844])
def test_counts_round_trip_for_any_number_of_heads(small: Explanation, heads: int) -> None:
    kept = (heads, 0, heads // 2, 1, heads - 1, 0, heads, 1, 0, heads)
    episode = PageEpisode("all", kept, ((1,) * heads,), (), (), (kept,))
    wide = replace(small, episodes=(episode,), answers=(), sliding_layers=())
    data = page_data(render(wide))
    assert decode(data["episodes"][0]["kept"], data["heads_width"]) == kept
    assert decode(data["episodes"][0]["layers"][0], data["layer_width"]) == kept


def test_figures_are_those_given(small: Explanation) -> None:
    data = page_data(render(small))
    for name in ("context_tokens", "budget_tokens", "full_kv_bytes", "kv_bytes"):
        assert data[name] == getattr(small, name)
    assert (data["active_kv_bytes"], data["peak_kv_bytes"]) == (1024, 1536)
    assert (data["heads_total"], data["sliding_layers"]) == (4, [1])
    assert data["recalled_by"] == ""


def test_equal_explanations_give_equal_pages(small: Explanation) -> None:
    assert render(small) == render(replace(small))
    assert render(small) != render(replace(small, budget_tokens=5))


def test_empty_transcript_renders(small: Explanation) -> None:
    episode = PageEpisode("nothing", (), ((0, 0), (0, 0)))
    empty = replace(small, messages=(), episodes=(episode,), answers=())
    assert page_data(render(empty))["episodes"][0]["kept"] == ""


def test_long_transcript_stays_small(small: Explanation) -> None:
    """30,000 tokens in four episodes, six layers of two heads: about the text and its counts."""
    tokens, layers = 30_000, 6
    draw = random.Random(0)
    words = tuple(draw.choice((" the", " soup", ".", " Velmirsa")) for _ in range(tokens))
    by_layer = tuple(tuple(draw.choices(range(3), k=tokens)) for _ in range(layers))
    kept = tuple(map(sum, zip(*by_layer, strict=True)))
    episode = PageEpisode("soup", kept, ((900, 800),) * layers, (), (), by_layer)
    messages = tuple(
        PageMessage("user", "", "", words[start : start + 50]) for start in range(0, tokens, 50)
    )
    long = replace(small, messages=messages, episodes=(episode,) * 4, answers=())
    text_bytes = sum(map(len, words))
    counts_bytes = 4 * tokens * (layers + 1)
    assert len(render(long)) < text_bytes + counts_bytes + 3 * tokens + 120_000
