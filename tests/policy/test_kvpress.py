"""Presses of kvpress as scorers: where they equal ours, and where they differ.

Most of it is run where kvpress is installed, which is of no use to the other tests.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from builders import a_layer, a_plan, a_view, runnable
from larder import Policy
from larder.cache import merge_entries
from larder.core import (
    LOG_COUNT,
    BadParameter,
    DependencyError,
    LayerScores,
    Observation,
    ScoreError,
    UnknownName,
)
from larder.ops import rotate
from larder.policy import (
    AttentionModuleAdapter,
    CapKV,
    ColumnMass,
    CurDKV,
    Expected,
    KeyDiff,
    KeyNorm,
    Kvpress,
    LagKV,
    LastQuery,
    Leverage,
    Leverages,
    MergeValues,
    ProtectedTokens,
    SinksAndWindow,
    SnapKV,
    Within,
)

TOKENS = 60
with_kvpress = pytest.mark.skipif(not runnable(["kvpress"]), reason="kvpress is not installed")


def whole(kv_heads: int = 2, group: int = 2, index: int = 1) -> Observation:
    """A text that was read in one piece."""
    observation = a_view(
        a_layer(kv_heads, group, index=index), [list(range(TOKENS))] * kv_heads, TOKENS
    )
    keys = torch.stack([observation.entries.head_keys(head) for head in range(kv_heads)])
    return replace(observation, keys=keys)


def heads(scores: torch.Tensor) -> torch.Tensor:
    return scores.view(-1, TOKENS)


def kept(scores: torch.Tensor, count: int) -> list[set[int]]:
    """The best of each head; of equals the later one, as a budget has it."""
    ranked = [sorted(range(TOKENS), key=lambda i: (-float(h[i]), -i)) for h in heads(scores)]
    return [set(head[:count]) for head in ranked]


def scored_evenly(observation: Observation) -> LayerScores:
    count = sum(observation.entries.lengths)
    return LayerScores(torch.zeros(count), torch.zeros(count).bool(), observation.entries.lengths)


def test_press_spelling_has_its_parameters() -> None:
    sentence = 'whole() > kvpress(press="SnapKVPress(window_size=8)", seed=3) > uniform(tokens=20)'
    policy = Policy.parse(sentence)
    assert Policy.parse(str(policy)) == policy
    assert policy.scorer == Kvpress("SnapKVPress(window_size=8)", seed=3)


@pytest.mark.parametrize("press", ["", "1", "A() > B()", "SnapKVPress(8)", "A(x=[1])"])
def test_invalid_presses_are_refused(press) -> None:
    with pytest.raises(BadParameter, match=r"kvpress\.press"):
        Kvpress(press)


def test_presses_declare_their_required_inputs() -> None:
    asked = {
        press: (part.required_providers(), part.observes_whole_text())
        for press in ("SnapKVPress(window_size=8)", "CompactorPress", "KVzapPress")
        for part in [Kvpress(press, model="some/model")]
    }
    assert asked == {
        "SnapKVPress(window_size=8)": (frozenset(), False),
        "CompactorPress": (frozenset(), True),
        "KVzapPress": ({"states"}, True),
    }
    with pytest.raises(BadParameter, match="name it on the hub"):
        Kvpress("QFilterPress")


def test_missing_kvpress_package_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    for ask in (lambda: Kvpress().protected_tokens(), lambda: Kvpress().score(whole())):
        with pytest.raises(DependencyError, match=r"pip install \"larder\[kvpress\]\""):
            ask()


def test_attention_module_rotates_queries_as_the_model() -> None:
    """Turned again, what it projects gives the logits that attention had."""
    observation = whole(group=3)
    standing = AttentionModuleAdapter(observation, [0, 1])
    cosine, sine = standing.position_embeddings
    flat = standing.q_proj(standing.numbers)
    queries = flat.view(TOKENS, len(standing.query_heads), -1).transpose(0, 1)
    first, second = queries.chunk(2, dim=-1)
    turned = queries * cosine + torch.cat([-second, first], dim=-1) * sine
    got = turned @ standing.keys[0].repeat_interleave(3, 0).mT / standing.head_dim**0.5
    keys = torch.stack([observation.entries.head_keys(h) for h in (0, 1)]).repeat_interleave(3, 0)
    torch.testing.assert_close(got, observation.queries @ keys.mT * observation.layer.scaling)
    assert torch.equal(standing.rotary_emb(flat, torch.arange(TOKENS)[None])[0], cosine)


def test_attention_module_continues_positions() -> None:
    observation = a_view(a_layer(), [list(range(TOKENS))] * 2, 10)
    standing = AttentionModuleAdapter(observation, [0, 1])
    next_of_pass = standing.rotary_emb(observation.queries, torch.tensor([[10]]))
    angles = TOKENS * torch.tensor(observation.layer.radians)
    assert next_of_pass[0][0, 0, :3].tolist() == pytest.approx(angles.cos().tolist(), abs=1e-5)


def test_attention_module_weights_are_causal_and_count_entries() -> None:
    observation = whole()
    rows = torch.zeros(len(observation.entries.keys))
    rows[observation.entries.starts[1] + 4] = 50.0
    counted = replace(observation, entries=observation.entries.with_columns({LOG_COUNT: rows}))
    weights = AttentionModuleAdapter(counted, [0, 1]).weights()[0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, TOKENS))
    assert not weights.triu(1).any()
    assert weights[2:, 4:, 4].amin() > 0.99 and weights[2:, :4, 4].amax() == 0


@with_kvpress
def test_windows_and_sinks_of_a_press_are_protected() -> None:
    assert Kvpress("SnapKVPress(window_size=8)").protected_tokens() == ProtectedTokens(last=8)
    assert Kvpress("CompactorPress").protected_tokens() == ProtectedTokens(8, 4)
    assert Kvpress("ExpectedAttentionPress(n_sink=3)").protected_tokens() == ProtectedTokens(3)


@with_kvpress
def test_key_scorers_equal_their_presses() -> None:
    seen = whole()
    torch.testing.assert_close(Kvpress("KnormPress").score(seen), KeyNorm().score(seen))
    torch.testing.assert_close(Kvpress("KeyDiffPress").score(seen), KeyDiff().score(seen))


@with_kvpress
def test_snapkv_without_pooling_equals_its_press_up_to_a_factor() -> None:
    observation = whole()
    theirs = heads(Kvpress("SnapKVPress(window_size=6, kernel_size=1)").score(observation))
    ours = heads(SnapKV(window=6, kernel=1).score(observation))
    torch.testing.assert_close(theirs[:, :-6], ours[:, :-6] / (6 * observation.layer.group))
    assert (theirs[:, -6:] > theirs[:, :-6].max()).all()


@with_kvpress
def test_snapkv_pooling_differs_from_its_press() -> None:
    seen = whole()
    theirs = Kvpress("SnapKVPress(window_size=6, kernel_size=5)").score(seen)
    assert kept(theirs, 20) != kept(SnapKV(window=6, kernel=5).score(seen), 20)


@with_kvpress
def test_expected_attention_equals_its_press() -> None:
    parameters = "n_future_positions=9, n_sink=3, epsilon=0.02"
    theirs = heads(Kvpress(f"ExpectedAttentionPress({parameters})").score(whole()))
    ours = heads(Expected(future=9, sinks=3, epsilon=0.02).score(whole()))
    torch.testing.assert_close(theirs[:, 3:], ours[:, 3:], rtol=1e-5, atol=1e-6)
    assert (theirs[:, :3] > theirs[:, 3:].max()).all() and ours[:, :3].isinf().all()


@with_kvpress
@pytest.mark.parametrize("by", list(Leverages))
def test_curdkv_equals_its_press(by) -> None:
    names = {Leverages.PRODUCT: "kv_product", Leverages.MEAN: "kv_avg"}
    leverage = names.get(by, by.value.removesuffix("s"))
    theirs = heads(Kvpress(f'CURPress(num_sinks=3, leverage_type="{leverage}")').score(whole()))
    ours = heads(CurDKV(sinks=3, by=by).score(whole()))
    torch.testing.assert_close(theirs[:, 3:], ours[:, 3:])
    assert (theirs[:, :3] == 1).all() and ours[:, :3].isinf().all()


@with_kvpress
def test_capkv_equals_its_press() -> None:
    parameters = "tau=2.0, n_future_positions=9, n_sink=3"
    theirs = heads(Kvpress(f"CapPress({parameters})").score(whole(group=3)))
    ours = heads(CapKV(tau=2.0, future=9, sinks=3).score(whole(group=3)))
    torch.testing.assert_close(theirs[:, 3:], ours[:, 3:], rtol=1e-4, atol=1e-6)
    assert (theirs[:, :3] > theirs[:, 3:].max()).all() and ours[:, :3].isinf().all()


@with_kvpress
def test_tova_equals_its_press_except_the_last_token() -> None:
    theirs, ours = heads(Kvpress("TOVAPress").score(whole())), heads(LastQuery().score(whole()))
    torch.testing.assert_close(theirs[:, :-1], ours[:, :-1])
    assert (theirs[:, -1] > theirs[:, :-1].max()).all()


@with_kvpress
@pytest.mark.parametrize("within", list(Within))
def test_lagkv_equals_its_press_in_compared_partitions(within) -> None:
    crossing = int(within is Within.HEAD)
    theirs = Kvpress(f"LagKVPress(n_sink=4, lag_size=8, cross_scoring={crossing})").score(whole())
    ours = LagKV(sinks=4, lag=8, within=within).score(whole())
    compared = slice(4, 4 + 6 * 8)
    own = heads(ours)[:, compared]
    own = (own * 8).floor() / 8 if within is Within.PARTITION else own  # without what breaks ties
    torch.testing.assert_close(heads(theirs)[:, compared], own)
    assert (heads(theirs)[:, 4 + 6 * 8 :] == 1).all()  # the latest, whose age ours tell apart


@with_kvpress
def test_streaming_llm_equals_its_press() -> None:
    theirs = Kvpress("StreamingLLMPress(n_sink=3, compression_ratio=0.75)").score(whole())
    assert kept(theirs, 15) == kept(SinksAndWindow(sinks=3).score(whole()), 15)


@with_kvpress
def test_observed_attention_equals_its_press() -> None:
    observation = whole()
    standing = AttentionModuleAdapter(observation, [0, 1])
    mass = standing.weights()[0].sum(1).view(2, observation.layer.group, TOKENS).sum(1)
    entries = observation.entries.with_columns({"mass": observation.entries.unpack(mass.flatten())})
    ours = heads(ColumnMass().score(replace(observation, entries=entries)))
    lookers = torch.arange(TOKENS, 0, -1) * observation.layer.group
    theirs = heads(Kvpress("ObservedAttentionPress").score(observation))
    torch.testing.assert_close(theirs, ours / lookers)


def test_leverage_equals_the_press_under_one_sketch_and_ridge() -> None:
    """Formula of LeverageScorePress: keys before rotation, centered and sketched; the diagonal of
    X (X'X + .01)^-1 X'. kvpress draws its sketch each time; our ridge is a share of the diagonal.
    """
    observation, drawn = whole(kv_heads=1), Leverage(sketch=5)
    positions, radians = (
        observation.entries.effective_rope_positions,
        torch.tensor(observation.layer.radians),
    )
    keys = rotate(
        observation.entries.head_keys(0)[None], -positions[observation.entries.rows(0)], radians
    )[0]
    sketched = (keys - keys.mean(0)) @ drawn._sketch(keys)  # pyright: ignore
    gram = sketched.T @ sketched
    inverse = torch.linalg.inv(gram + 0.01 * torch.eye(5))  # pyright: ignore
    theirs = (sketched @ inverse * sketched).sum(1)
    share = 0.01 / float(gram.diagonal().mean())
    assert torch.allclose(replace(drawn, ridge=share).score(observation), theirs, atol=1e-5)
    assert not torch.allclose(
        replace(drawn, ridge=100 * share).score(observation), theirs, atol=1e-5
    )
    assert not torch.allclose(
        replace(drawn, ridge=share, seed=1).score(observation), theirs, atol=1e-2
    )


@with_kvpress
def test_leverage_correlates_with_its_press() -> None:
    theirs = heads(Kvpress("LeverageScorePress(sketch_dimension=64)").score(whole()))
    ours = heads(Leverage(sketch=64).score(whole()))
    together = torch.corrcoef(torch.stack([theirs.flatten(), ours.flatten()]))
    assert together[0, 1] > 0.9


@with_kvpress
def test_value_merging_equals_its_press() -> None:
    from kvpress import MergingPress, SnapKVPress

    observation, keeps = whole(), [list(range(0, TOKENS, 3))] * 2
    plan = MergeValues(threshold=0.2).compensate(
        a_plan(keeps, observation.entries.lengths), observation.entries, scored_evenly(observation)
    )
    merged = merge_entries(plan, observation.entries)
    before = observation.entries.pack(observation.entries.values)
    ours = before.clone()
    ours[merged.targets] = merged.values
    stacked = [
        torch.stack([rows[observation.entries.rows(head)] for head in (0, 1)])[None]
        for rows in (observation.entries.keys, observation.entries.values)
    ]
    press = MergingPress(SnapKVPress(0.5), similarity_threshold=0.2)
    _, theirs = press.merge(*stacked, torch.tensor(keeps)[None])
    torch.testing.assert_close(theirs[0].flatten(0, 1), ours)
    assert not torch.equal(ours, before)


@with_kvpress
def test_random_press_is_seeded_and_keeps_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    first = Kvpress("RandomPress", seed=1).score(whole())
    assert torch.equal(Kvpress("RandomPress", seed=1).score(whole()), first)
    assert not torch.equal(Kvpress("RandomPress", seed=2).score(whole()), first)
    assert not torch.equal(Kvpress("RandomPress", seed=1).score(whole(index=2)), first)
    assert torch.equal(torch.random.get_rng_state(), before)


@with_kvpress
def test_uneven_heads_are_passed_one_by_one() -> None:
    layer = a_layer(2, 2)
    uneven = a_view(layer, [list(range(30)), list(range(10, 30))], 12)
    scores = Kvpress("SnapKVPress(window_size=4, kernel_size=1)").score(uneven)
    ours = SnapKV(window=4, kernel=1).score(uneven)
    for theirs, own in zip(scores.split([30, 20]), ours.split([30, 20]), strict=True):
        torch.testing.assert_close(theirs[:-4], own[:-4] / (4 * layer.group))


@with_kvpress
@pytest.mark.parametrize(
    ("press", "error", "message"),
    [
        ("SnapPress()", UnknownName, "Did you mean 'SnapKVPress'"),
        ("SnapKVPress(window=8)", UnknownName, "Did you mean 'window_size'"),
        ("CriticalKVPress()", BadParameter, "does more than score"),
        ("AdaKVPress()", BadParameter, "does more than score"),
    ],
)
def test_unsupported_presses_are_refused(press, error, message) -> None:
    with pytest.raises(error, match=message):
        Kvpress(press).protected_tokens()


@with_kvpress
def test_error_of_a_failing_press_names_its_cause() -> None:
    block = a_view(a_layer(), [list(range(TOKENS))] * 2, 10)
    with pytest.raises(ScoreError, match=r"only supports prefill.*put whole\(\) in front"):
        Kvpress("NonCausalAttnPress").score(block)
    with pytest.raises(ScoreError, match="should be greater than the window size"):
        Kvpress("SnapKVPress").score(block)
    unknown = replace(whole(), layer=replace(whole().layer, radians=None))
    with pytest.raises(ScoreError, match="rotates its queries"):
        Kvpress("TOVAPress").score(unknown)
    assert Kvpress("KnormPress").score(unknown).shape == (2 * TOKENS,)


@with_kvpress
def test_press_with_its_own_networks_gets_hidden_states(tmp_path, monkeypatch) -> None:
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel

    config = KVzapConfig(input_dim=6, output_dim=2, n_modules=3, hidden_dim=4)
    model: Any = KVzapModel(config)
    model.save_pretrained(tmp_path / "nvidia" / "KVzap-mlp-model")
    monkeypatch.chdir(tmp_path)
    press, states = Kvpress("KVzapPress", model="some/model"), torch.randn(TOKENS, 6)
    with torch.no_grad():
        got = press.score(replace(whole(), inputs={"states": states}))
        expected = model.layers[1](states).T.flatten()
    torch.testing.assert_close(got, expected)
    with pytest.raises(ScoreError, match="judges by hidden states"):
        press.score(replace(whole(), inputs={}))
