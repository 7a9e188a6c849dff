"""HTML renderer of the explain page: self-contained, without network, fonts or remote scripts.

The page's text is embedded as JSON and reaches the document by `textContent` only. The content
security policy admits only the page's own style and script, by digest: markup in a conversation is
shown as text, and a script in it could not run.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from larder.explain.explanation import Explanation, PageEpisode, PageMessage

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SCRIPTS = ("page.js", "charts.js", "transcript.js", "start.js")


def render(explanation: Explanation) -> str:
    """HTML page of an explanation; deterministic."""
    style = _asset("page.css")
    script = "\n".join(_asset(name) for name in SCRIPTS)
    return Template(_asset("page.html")).substitute(
        title=_markup(explanation.title),
        style=style,
        style_digest=_digest(style),
        script=script,
        script_digest=_digest(script),
        data=_json(_page_data(explanation)),
    )


def _page_data(explanation: Explanation) -> dict[str, Any]:
    heads_width = _digits_per_count(explanation.heads_total)
    layer_width = _digits_per_count(max(explanation.heads_per_layer, default=0))
    return {
        "title": explanation.title,
        "model": explanation.model,
        "policy": explanation.policy,
        "context_tokens": explanation.context_tokens,
        "budget_tokens": explanation.budget_tokens,
        "full_kv_bytes": explanation.full_kv_bytes,
        "kv_bytes": explanation.kv_bytes,
        "active_kv_bytes": explanation.active_kv_bytes,
        "peak_kv_bytes": explanation.peak_kv_bytes,
        "heads_total": explanation.heads_total,
        "heads_per_layer": explanation.heads_per_layer,
        "heads_width": heads_width,
        "layer_width": layer_width,
        "sliding_layers": explanation.sliding_layers,
        "recalled_by": explanation.recalled_by,
        "messages": [_message(message) for message in explanation.messages],
        "episodes": [
            _episode(episode, heads_width, layer_width) for episode in explanation.episodes
        ],
        "answers": [vars(answer) for answer in explanation.answers],
    }


def _message(message: PageMessage) -> dict[str, Any]:
    return {
        "role": message.role,
        "speaker": message.speaker,
        "date": message.date,
        "tokens": message.tokens,
        "lead": message.lead_tokens,
        "tail": message.tail_tokens,
    }


def _episode(episode: PageEpisode, heads_width: int, layer_width: int) -> dict[str, Any]:
    return {
        "name": episode.name,
        "topics": episode.topics,
        "segments": episode.segments,
        "kept": _encode_counts(episode.kept_heads, heads_width),
        "layers": [_encode_counts(row, layer_width) for row in episode.kept_by_layer],
        "lengths": episode.kept_lengths,
    }


def _digits_per_count(largest: int) -> int:
    """Number of digits of `largest` in base 62, at least 1."""
    width = 1
    while len(DIGITS) ** width <= largest:
        width += 1
    return width


def _encode_counts(counts: Sequence[int], width: int) -> str:
    """Counts as one base-62 string, `width` digits each: a third of a JSON list's size."""
    base = len(DIGITS)
    spelled = [
        "".join(DIGITS[count // base**index % base] for index in reversed(range(width)))
        for count in range(max(counts, default=0) + 1)
    ]
    return "".join(spelled[count] for count in counts)


def _json(data: dict[str, Any]) -> str:
    """JSON with `<`, `>` and `&` escaped, safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _markup(text: str) -> str:
    return escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _digest(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return files("larder.explain").joinpath(name).read_text(encoding="utf-8").strip()
