"""Compositions that no paper has: each answers within its bytes, or is refused with advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from budget_bounds import most, peaks
from larder import Engine, Policy, read_conversation
from larder.cache import SequenceCache
from larder.core import POSITION_BYTES, Conversation, SpellingError, UsageError
from larder.prefill import ChunkMemory

PARK = (
    "blockwise() > protect(sinks=4, recent=16) > sinks_and_window() > uniform() > park() > {} > "
    "lagged(tokens=4)"
)
TOKENS, BLOCK = 96, 96
COLUMN_BYTES = 4

COMPOSITIONS = {
    "fastkv_with_lazy_layers": (
        "narrowing() > protect(sinks=4, recent=8) > snapkv(window=8) > lazy_layers()"
    ),
    "a2ats_without_gaps": PARK.format("a2ats(dense=0) > compact()"),
    "graph_of_two_layers_over_4_bits": PARK.format(
        "projected(dense=0, layers=2, least=64) > quantized(bits=4, group=16)"
    ),
    "two_levels_behind_gated_chunks": (
        "blockwise() > snapkv(window=8) > entropy_chunk(size=6) > uniform() > park() > "
        "squeezed(dense=0, share=0.2, coarse=0.05) > lagged(tokens=4)"
    ),
    "heads_of_needles_refreshed_by_keys": (
        "two_passes() > protect(sinks=4, recent=4) > key_cosine(share=0.1) > uniform() > "
        'context_refresh(tokens=4, scorer="keydiff()")'
    ),
    "narrowed_layers_refreshed_over_4_bits": (
        "layerwise_narrowing() > protect(sinks=4, recent=4) > snapkv(window=8) > global() > "
        "quantized(bits=4, group=16) > context_refresh(tokens=4)"
    ),
    "turns_by_compactor": "freeze() > compactor(sinks=4) > uniform()",
    "two_passes_into_samples": (
        'two_passes() > protect(sinks=4, recent=8) > patched(prompt="question") > mean() > '
        "group_mean() > uniform() > subgen()"
    ),
    "fastgen_in_4_bits": (
        "whole() > protect(sinks=4, recent=1) > fastgen() > recovery() > "
        "quantized(bits=4, group=16)"
    ),
    "windows_by_compactor_with_merged_values": (
        'whole() > compactor(sinks=4) > window(size=4, task="found") > pyramid(layers=2) > '
        "merge_values()"
    ),
    "blended_contexts_in_lazy_layers": (
        "blended() > protect(sinks=4, recent=8) > snapkv(window=8) > lazy_layers()"
    ),
    "blended_contexts_by_keys": (
        "blended() > protect(sinks=4, recent=8) > keydiff() > global() > subgen()"
    ),
    "repetition_by_gradients_in_3_bits": (
        "whole() > protect(sinks=4, recent=8) > kvgrad(chunk=128) > global() > "
        "quantized(bits=3, group=16)"
    ),
    "own_bits_by_gradients": (
        "whole() > protect(sinks=4, recent=8) > kvgrad(chunk=128) > uniform() > qaq(group=16)"
    ),
    "utility_of_compactor_with_merged_values": (
        "whole() > compactor(sinks=4) > lukv() > merge_values()"
    ),
    "crafted_contexts_by_utility": (
        "crafted() > protect(sinks=4, recent=8) > snapkv(window=8) > lukv()"
    ),
    "anchored_contexts_in_5_bits": (
        "anchored() > protect(sinks=4, recent=8) > snapkv(window=8) > uniform() > "
        "quantized(bits=5, group=16)"
    ),
    "spans_over_8_bits": PARK.format(
        'positionless(dense=0, prefill="recalled") > quantized(bits=8, group=16)'
    ),
    "samples_in_4_bits": (
        "blockwise() > protect(sinks=4, recent=8) > non_causal() > uniform() > subgen() > "
        "quantized(bits=4)"
    ),
    "samples_without_gaps": (
        "blockwise() > protect(sinks=4, recent=8) > leverage() > uniform() > subgen() > compact()"
    ),
    "reselection_over_4_bits": PARK.format("rewatch(dense=0) > quantized(bits=4, group=16)"),
    "episodes_in_transform_codes": (
        "episodes(count=2) > episodic() > protect(sinks=4, recent=8) > "
        'patched(prompt="episode") > global() > transform()'
    ),
    "utility_in_transform_codes": (
        "whole() > protect(sinks=4, recent=8) > compactor() > lukv() > transform()"
    ),
    "gated_chunks_in_transform_codes": (
        "whole() > snapkv(window=8) > entropy_chunk(size=6) > uniform() > transform()"
    ),
    "anchored_contexts_in_transform_codes": (
        "anchored() > protect(sinks=4, recent=8) > reconstruct() > global() > transform()"
    ),
    "repetition_in_refreshed_transform_codes": (
        "whole() > reconstruct() > global() > transform() > context_refresh(tokens=4)"
    ),
    "tree_of_keys_over_transform_codes": PARK.format("dci(dense=0) > transform()"),
    "ahead_over_fixed_widths": PARK.format(
        'dci(dense=0, fetch="ahead") > transform(coder="widths", bits=4)'
    ),
    "spans_over_transform_codes": PARK.format(
        'positionless(dense=0, prefill="recalled") > transform(bits=4)'
    ),
    "share_by_repetition_over_transform_codes": (
        "whole() > protect(sinks=4, recent=8) > reconstruct() > global() > "
        'park(cut="share", size=0.5) > pq(dense=0) > transform()'
    ),
    "narrowing_at_one_layer_refreshed": (
        "narrowing() > protect(sinks=4, recent=8) > snapkv(window=8) > uniform() > "
        "context_refresh(tokens=4)"
    ),
    "episodes_refreshed": (
        "episodes(count=2) > episodic() > protect(sinks=4, recent=8) > "
        'patched(prompt="episode") > pooled() > context_refresh(tokens=4)'
    ),
    "two_passes_into_shared_directions": (
        'two_passes() > protect(sinks=4, recent=8) > patched(prompt="question") > mean() > '
        "group_mean() > uniform() > minicache()"
    ),
}
# Compositions that hold queries, codes or samples beside entries, and a budget that binds them.
NOT_ENTRIES_ALONE = (
    "heads_of_needles_refreshed_by_keys",
    "narrowed_layers_refreshed_over_4_bits",
    "samples_without_gaps",
    "reselection_over_4_bits",
    "gated_chunks_in_transform_codes",
    "repetition_in_refreshed_transform_codes",
    "narrowing_at_one_layer_refreshed",
    "episodes_refreshed",
    "two_passes_into_shared_directions",
)
BYTES = 450 << 10
REFUSED = {
    PARK.format("rewatch(dense=0) > kvquant()"): "transform() to hold offloaded entries",
    "freeze() > reconstruct() > global() > transform()": "take exact(), or another schedule",
    PARK.format("magicpig() > compact()"): "take another recall part, such as positionless",
    "blockwise() > morph() > uniform() > compact()": "leave the storage out, or take another",
    "freeze() > snapkv() > uniform() > subgen()": "take drop() or park(), or another schedule",
    "narrowing() > snapkv() > uniform() > recompute()": "take whole(), or drop()",
}


@pytest.fixture(scope="module")
def full() -> Engine:
    return Engine.load(policy="full")


@pytest.fixture(scope="module")
def dialogue() -> Conversation:
    return read_conversation(Path(__file__).parents[2] / "examples" / "conversation.json")


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_composition_answers_within_its_bytes(
    name: str, full: Engine, dialogue: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = full.under(COMPOSITIONS[name], TOKENS)
    prompts = {"question": dialogue.questions[0].question}
    is_joined = name.split("_")[1] == "contexts"
    texts = [message.content for message in dialogue.messages]
    with peaks(monkeypatch) as peak:
        if is_joined:
            half = len(texts) // 2
            contexts = ["\n".join(texts[:half]), "\n".join(texts[half:])]
            memory = engine.read(contexts=contexts, prompts=prompts, chunks=ChunkMemory(2**28))
        else:
            memory = engine.read(dialogue, prompts)
        answers = [
            engine.ask(memory, each.question, max_new_tokens=8) for each in dialogue.questions[:2]
        ]
    assert all(answer.text for answer in answers)
    cache = memory.caches.activate(0)
    resting, _ = most(memory.policy, cache, BLOCK)
    assert cache.managed_entries <= resting
    assert cache.device_nbytes <= resting * entry_bytes(cache) + dense_bytes(cache)
    if memory.policy.schedule.has_blocks:
        assert peak.entries <= most(memory.policy, cache, BLOCK)[1]


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
@pytest.mark.parametrize("name", NOT_ENTRIES_ALONE)
def test_byte_budget_counts_all_held_bytes(name: str, full: Engine, dialogue: Conversation) -> None:
    engine = full.under(COMPOSITIONS[name], f"{BYTES >> 10}KiB")
    memory = engine.read(dialogue, {"question": dialogue.questions[0].question})
    for each in dialogue.questions[:2]:
        engine.ask(memory, each.question, max_new_tokens=8)
        assert memory.caches.activate(0).device_nbytes <= BYTES


@pytest.mark.parametrize(
    ("sentence", "advice"),
    [
        ("parallel() > snapkv(window=8) > lazy_layers()", r"or take blended\(\)"),
        ("blended() > fastgen() > recovery()", r"observes every token.*take a scorer"),
    ],
)
def test_contexts_unsupported_by_a_part_are_refused(
    full: Engine, sentence: str, advice: str
) -> None:
    with pytest.raises(UsageError, match=advice):
        full.under(sentence, TOKENS).read(contexts=["My cat is called Mira."] * 2)


def entry_bytes(cache: SequenceCache) -> int:
    """Bytes of an exact entry, with its position, its columns and the bias of a page slot."""
    layer = cache.spec.layers[0]
    numbers = 2 * layer.head_dim * cache.spec.dtype.itemsize
    columns = COLUMN_BYTES * len(cache.cache_spec.ledger.columns)
    return numbers + 2 * POSITION_BYTES + columns + COLUMN_BYTES


def dense_bytes(cache: SequenceCache) -> int:
    """Bytes beside entries: tables of page slots and of quantized groups, and the
    latest queries with their positions where the policy looks at them.
    """
    layers = cache.spec.layers
    query = layers[0].query_heads * layers[0].head_dim * cache.spec.dtype.itemsize
    held = cache.cache_spec.ledger.queries * (query + 2 * POSITION_BYTES)
    return (4096 + held) * len(layers)


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused_composition_names_an_alternative(sentence: str) -> None:
    with pytest.raises(SpellingError) as refused:
        Policy.parse(sentence)
    assert REFUSED[sentence] in str(refused.value)
