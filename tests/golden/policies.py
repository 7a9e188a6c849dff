"""Goldens of the public spelling of policies: presets, parts, parameters and their defaults."""

from __future__ import annotations

import json
from typing import Any

from golden.access import families, run
from golden.comparison import Golden, masked
from larder import Policy

PROSE = ("summary", "meaning", "where", "beyond_budget")  # for people
SENTENCES = (
    "snapkv",
    "epicache",
    "blockwise(tokens=64) > keydiff() > pooled(tokens=64)",
    'episodes(embedder="tokens", count=2) > blockwise() > patched() > pooled()',
    "blockwise() > snapkv(window=16) > max() > group_mean() > ada(tokens=128) > fold_ema()",
    "blockwise() > keydiff() > uniform(kept=0.25) > park() > flat() > lagged(tokens=16)",
    "blockwise() > keydiff() > pooled() > quantized(bits=4)",
)


def listing() -> dict[str, Any]:
    """`larder policy list --json`: every preset as kept and in full, every part and parameter."""
    return masked(_document("policy", "list"), PROSE)


def pages() -> dict[str, Any]:
    """`larder policy show --json` of one preset, one part, and a name that is both."""
    names = ("epicache", "icecache", "pooled", "snapkv", "protect")
    result = {name: _document("policy", "show", name) for name in names}
    return masked(result, PROSE)


def citations() -> dict[str, Any]:
    """`larder policy cite --json` of every preset."""
    names = [preset["name"] for preset in _document("policy", "list")["presets"]]
    result = {name: _document("policy", "cite", name)["citations"] for name in names}
    return masked(result, PROSE)


def spellings() -> dict[str, str]:
    """Sentences, spelled in full as in stores and documents."""
    return {sentence: str(Policy.parse(sentence)) for sentence in SENTENCES}


def _document(*words: str) -> Any:
    return json.loads(run(*words, "--json").stdout)


SLOW: dict[str, Golden] = {"policy_cite": citations}
GOLDENS: dict[str, Golden] = {
    "policy_list": listing,
    "policy_show": pages,
    "policy_spellings": spellings,
    "families": families,
}
