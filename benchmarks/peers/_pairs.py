"""Pairs of methods to compare: a peer's, and the nearest policy of Larder.

Both read the whole context first, because kvpress prefills in one pass, and neither side protects
entries beyond those that the method itself keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from larder.core import UnknownName, unknown_name_message

KVPRESS, TRANSFORMERS, LARDER = "kvpress", "transformers", "larder"
_READ = "whole() > protect(sinks=0, recent=0)"


@dataclass(frozen=True)
class PeerPair:
    """Peer and the corresponding policy of Larder.

    Args:
        peer: name in tables.
        made: constructor call of its package, without the compression ratio.
        name: name of Larder's policy in tables.
        ours: policy without a budget, or a preset.
        share: fixed share of the full cache's bytes; empty if the peer takes a budget.
    """

    peer: str
    made: str
    name: str
    ours: str
    share: str = ""

    @property
    def package(self) -> str:
        """Package that the peer needs."""
        marks = {"Press(": KVPRESS, '"quanto"': "optimum-quanto", '"hqq"': "hqq"}
        return next((name for mark, name in marks.items() if mark in self.made), TRANSFORMERS)


def _cache(name: str, made: str, ours: str, policy: str, share: str = "1/1") -> PeerPair:
    return PeerPair(f"{TRANSFORMERS}:{name}", made, ours, policy, share)


def _quantized(name: str, made: str, bits: int) -> PeerPair:
    """Pair at equal bytes: a float32 scale and a zero point for 64 numbers are one bit each."""
    policy = f"{_READ} > sinks_and_window() > uniform() > quantized(bits={bits})"
    return _cache(name, made, f"{LARDER}:int{bits}", policy, f"{bits + 1}/32")


def _press(name: str, made: str, ours: str, policy: str) -> PeerPair:
    return PeerPair(f"{KVPRESS}:{name}", made, f"{LARDER}:{ours}", f"{_READ} > {policy}")


_SNAPKV = "SnapKVPress(window_size=32, kernel_size=7)"
_OUR_SNAPKV = "snapkv(window=32, kernel=7)"
_EXPECTED = "ExpectedAttentionPress(epsilon=0.01)"
_OUR_EXPECTED = "expected(epsilon=0.01)"
PAIRS = (
    _cache("dynamic", "DynamicCache()", "full", "full"),
    _cache("offloaded", "DynamicCache(offloading=True)", "full", "full"),
    _quantized("quanto-int4", 'QuantizedCache(backend="quanto", nbits=4)', 4),
    _quantized("quanto-int2", 'QuantizedCache(backend="quanto", nbits=2)', 2),
    _quantized("hqq-int8", 'QuantizedCache(backend="hqq", nbits=8, axis_key=1, axis_value=1)', 8),
    _quantized("hqq-int4", 'QuantizedCache(backend="hqq", nbits=4, axis_key=1, axis_value=1)', 4),
    _press("random", "RandomPress(seed=0)", "random", "random() > uniform()"),
    _press("knorm", "KnormPress()", "keynorm", "keynorm() > uniform()"),
    _press(
        "streaming_llm",
        "StreamingLLMPress(n_sink=4)",
        "sinks_and_window",
        "sinks_and_window(sinks=4) > uniform()",
    ),
    _press("snapkv", _SNAPKV, "snapkv", f"{_OUR_SNAPKV} > uniform()"),
    _press("tova", "TOVAPress()", "last_query", "last_query() > uniform()"),
    _press("keydiff", "KeyDiffPress()", "keydiff", "keydiff() > uniform()"),
    _press("lagkv", "LagKVPress(n_sink=4)", "lagkv", "lagkv(sinks=4, lag=128) > uniform()"),
    _press("expected", _EXPECTED, "expected", f"{_OUR_EXPECTED} > uniform()"),
    _press("observed", "ObservedAttentionPress()", "column_mass", "column_mass() > uniform()"),
    _press("leverage", "LeverageScorePress()", "leverage", "leverage() > uniform()"),
    _press("compactor", "CompactorPress()", "compactor", "compactor() > uniform()"),
    _press(
        "pyramidkv",
        "PyramidKVPress(window_size=32, kernel_size=7)",
        "snapkv pyramid",
        f"{_OUR_SNAPKV} > pyramid()",
    ),
    _press(
        "criticalkv",
        f"CriticalKVPress({_SNAPKV})",
        "snapkv criticality",
        f"{_OUR_SNAPKV} > criticality() > uniform()",
    ),
    _press(
        "adakv snapkv",
        f"AdaKVPress({_SNAPKV}, alpha_safeguard=0.0)",
        "snapkv pooled",
        f"{_OUR_SNAPKV} > pooled()",
    ),
    _press(
        "adakv expected",
        f"AdaKVPress({_EXPECTED}, alpha_safeguard=0.0)",
        "expected pooled",
        f"{_OUR_EXPECTED} > pooled()",
    ),
    _press("kvzip", "KVzipPress()", "reconstruct global", "reconstruct() > global()"),
)


def pairs_of(names: list[str], pairs: Sequence[PeerPair] = PAIRS) -> list[PeerPair]:
    """Pairs with one of these names, all if there are none; a package name selects all of its
    pairs.

    Raises:
        UnknownName: a name does not exist.
    """
    known = {pair.peer: pair for pair in pairs}
    sides = (KVPRESS, TRANSFORMERS)
    for name in names:
        if name not in known and name not in sides:
            raise UnknownName(unknown_name_message("peer", name, [*sides, *known]))
    chosen = [p for p in pairs if {p.peer, p.peer.partition(":")[0]} & set(names)]
    return chosen if names else list(pairs)
