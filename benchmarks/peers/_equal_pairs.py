"""Presses of kvpress with their own defaults, and the policy of Larder with the same parameters.

kvpress protects nothing beyond what a press does by itself, and reads the whole context first.
"""

from __future__ import annotations

from _pairs import KVPRESS, LARDER, PeerPair

KVZIP = "KVzipPress()"
KVCOMPOSE = "KVComposePress()"
KVGRAD = "KVgradPress()"
# Presses that a threshold gives their size: of a layer's attention, and of an entry's score.
LAZY, DMS = "SimLayerKVPress", "DMSPress"
# Presses whose weights come from a hub; here they are given Larder's.
Q_FILTERS, KVZAP = "QFilterPress()", 'KVzapPress(model_type="linear")'
FASTKVZIP, LUKV = "FastKVzipPress()", "LUKVPress()"
DUO = "DuoAttentionPress(head_compression_ratio=0.5)"
DUO_ON_THE_FLY = "DuoAttentionPress(head_compression_ratio=0.5, on_the_fly_scoring=True)"
THINK = "ThinKPress(key_channel_compression_ratio=0.5)"
FINCH = "FinchPress(rerotate_keys=False)"
# First and latest entries of streaming heads: those of Larder's measurement, and of kvpress's own.
STREAMING = {DUO: (16, 64), DUO_ON_THE_FLY: (128, 256)}
_SNAPKV = 'snapkv(window=64, kernel=5, pool="mean")'
_EXPECTED = "expected(future=512, sinks=4, epsilon={})"


def _equal(made: str, policy: str, recent: int = 0, sinks: int = 0) -> PeerPair:
    read = f"whole() > protect(sinks={sinks}, recent={recent})"
    return PeerPair(f"{KVPRESS}:{made}", made, f"{LARDER}:as {made}", f"{read} > {policy}")


def _lazy(threshold: float, recent: int = 128) -> PeerPair:
    """SimLayerKV; a lazy layer of the press keeps one entry less than it looks at."""
    made = f"{LAZY}(lazy_threshold={threshold}, n_recent={recent})"
    budget = f"sinks_and_window(sinks=4) > lazy_layers(threshold={threshold})"
    return _equal(made, budget, recent - 1, 4)


EQUAL_PAIRS = (
    PeerPair("transformers:DynamicCache", "DynamicCache()", "larder:full cache", "full", "1/1"),
    _equal("StreamingLLMPress()", "sinks_and_window(sinks=4) > uniform()"),
    _equal("KnormPress()", "keynorm() > uniform()"),
    _equal("KeyDiffPress()", "keydiff() > uniform()"),
    _equal("SnapKVPress()", f"{_SNAPKV} > uniform()"),
    _equal("PyramidKVPress()", f"{_SNAPKV} > uniform()"),
    _equal("TOVAPress()", "last_query() > uniform()", recent=1),
    _equal("ObservedAttentionPress()", "column_mass() > uniform()"),
    _equal("LagKVPress()", "lagkv(sinks=4, lag=128) > uniform()"),
    _equal("LagKVPress(cross_scoring=True)", 'lagkv(sinks=4, lag=128, within="head") > uniform()'),
    _equal("ExpectedAttentionPress()", f"{_EXPECTED.format(0)} > uniform()"),
    _equal("ExpectedAttentionPress(epsilon=0.01)", f"{_EXPECTED.format(0.01)} > uniform()"),
    _equal("AdaKVPress(SnapKVPress())", f"{_SNAPKV} > ada(safeguard=0.2)"),
    _equal(
        "AdaKVPress(ExpectedAttentionPress(epsilon=0.01))",
        f"{_EXPECTED.format(0.01)} > ada(safeguard=0.2)",
    ),
    _equal(
        "CriticalKVPress(SnapKVPress())",
        f"{_SNAPKV} > mean() > group_mean() > criticality(epsilon=0.0001, first=0.5) > uniform()",
    ),
    _equal(
        "CriticalAdaKVPress(SnapKVPress())",
        f"{_SNAPKV} > mean() > group_mean() > criticality(epsilon=0.0001, first=0.5) > "
        "ada(safeguard=0.2)",
    ),
    _equal("ChunkKVPress(SnapKVPress())", f"{_SNAPKV} > layer_mean() > chunk(size=20) > uniform()"),
    _equal(
        "EntropyGatedChunkKVPress(SnapKVPress())",
        f"{_SNAPKV} > layer_mean() > entropy_chunk() > uniform()",
    ),
    _equal("LeverageScorePress()", "leverage(sketch=48) > uniform()"),
    _equal("LeverageScorePress(sketch_dimension=64)", "leverage(sketch=64) > uniform()"),
    _equal("CURPress()", "curdkv() > uniform()"),
    _equal("CapPress()", "capkv() > uniform()"),
    _equal("NonCausalAttnPress()", "non_causal() > uniform()"),
    _equal("CompactorPress()", "compactor() > uniform()"),
    _equal("MergingPress(SnapKVPress())", f"{_SNAPKV} > uniform() > merge_values()"),
    _equal(Q_FILTERS, "q_filters() > uniform()"),
    _equal(KVZAP, "kvzap() > uniform()"),
    _equal(KVCOMPOSE, 'reconstruct(opening=0, variant="code") > group_and_layer() > composite()'),
    _equal(KVZIP, 'reconstruct(opening=4, variant="code") > global()'),
    _equal(KVGRAD, 'kvgrad(opening=4, variant="code") > global()'),
    _lazy(0.65),
    _lazy(0.9),
    _equal(
        f"{DMS}(KnormPress(), threshold=-12)",
        "keynorm() > fixed_threshold(score=-12)",
        recent=128,
    ),
)


def pyramid_pair(kept: int, window: int = 8, beta: float = 20) -> PeerPair:
    """PyramidKV with a window that is small enough for its pyramid to fit.

    There the top layer has `kept / beta` entries with the window, here `(kept - window) / beta`
    beside it.
    """
    ours = (kept - window) / (kept / beta - window)
    snapkv = f'snapkv(window={window}, kernel=5, pool="mean")'
    return _equal(f"PyramidKVPress(window_size={window})", f"{snapkv} > pyramid(beta={ours:.6g})")


def informed_pairs(length: int) -> tuple[PeerPair, ...]:
    """Presses that need more than a text: a question, gates, classes of heads, or curves.

    ThinK prunes channels of keys and removes no entry.

    Args:
        length: tokens of the context.
    """
    finch = 'patched(prompt="question", variant="paper") > scaled_mean() > group_mean()'
    window = max(1, int(length * 0.02))
    return (
        _equal(FINCH, f"{finch} > uniform()"),
        _equal(FASTKVZIP, "fast_kvzip() > global()", window, 4),
        *(_streaming_pair(made, *ends) for made, ends in STREAMING.items()),
        _equal(THINK, f"{_SNAPKV} > uniform() > think(channels=0.5)"),
        _equal(LUKV, "expected(future=512, sinks=4, epsilon=0.02) > lukv()", 1, 4),
    )


def _streaming_pair(made: str, sinks: int, recent: int) -> PeerPair:
    heads = 'retrieval_heads(share=0.5, trial="passkeys")'
    return _equal(made, f"{_SNAPKV} > {heads}", recent, sinks)
