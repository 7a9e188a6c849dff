"""Measurements of a model's heads and layers, against loops over its own attention."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from larder.core import BadParameter, ModelError
from larder.models import (
    MEASUREMENTS,
    REQUEST,
    AttentionInputs,
    Decoder,
    Echo,
    EvictionErrorMeasurement,
    Granularity,
    Induction,
    NeedleSettings,
    Reasoning,
    Reconstruction,
    SqueezeMeasurement,
    StreamingError,
    random_tokens,
    wrap_model,
)
from larder.models.measurements import _attention_capture, eviction_error, reasoning
from larder.policy import CURVE_POINTS
from measurements import SAMPLE, SMALL, SMALL_NEEDLES, encode
from model_attention import heads_of
from tiny_models import ARCHITECTURES, tiny


@pytest.mark.parametrize(("name", "ahead"), [("echo", 0), ("induction", 1)])
def test_repeated_text_equals_its_reference(three_layers, name, ahead) -> None:
    part, expected = SMALL[name], []
    ids = random_tokens(SAMPLE.token_ids(), part.tokens) * part.times
    for heads in heads_of(three_layers, ids):
        masses = []
        for head in range(4):
            mass = 0.0
            for token in range(part.tokens, len(ids)):
                row, before = heads.row(head, token), token - part.tokens
                while before >= 0:
                    assert ids[before] == ids[token]
                    mass += row[before + ahead]
                    before -= part.tokens
            masses.append(mass / (len(ids) - part.tokens))
        expected += [max(masses[:2]), max(masses[2:])]
    assert part.measure(three_layers, SAMPLE) == pytest.approx(expected, rel=1e-4)


def test_best_match_of_a_copied_text_equals_its_reference(three_layers) -> None:
    part, expected = SMALL["reconstruction"], []
    text = SAMPLE.ids(part.tokens)
    ids = (*text, *encode(REQUEST), *text)
    for heads in heads_of(three_layers, ids):
        best = [0.0] * 4
        for head in range(4):
            for token in range(len(ids) - part.tokens, len(ids)):
                best[head] = max([best[head], *heads.row(head, token)[part.sinks : part.tokens]])
        expected += [max(best[:2]), max(best[2:])]
    assert part.measure(three_layers, SAMPLE) == pytest.approx(expected, rel=1e-4)


def test_every_token_is_drawn_once_before_any_repeats() -> None:
    assert sorted(random_tokens((3, 5, 8), 6)) == [3, 3, 5, 5, 8, 8]
    assert sorted(random_tokens((3, 5, 8), 6)[:3]) == [3, 5, 8]


def test_passage_contains_its_needles() -> None:
    passage = SMALL_NEEDLES.passage(SAMPLE)
    assert len(passage.needles) == 2
    for each in passage.needles:
        needle = list(passage.ids[slice(*each.needle)])
        answer = [passage.ids[token + 1] for token in each.predicting]
        stop = len(needle) - len(encode("."))
        assert needle[stop - len(answer) : stop] == answer
        assert needle[: len(encode("\nBy the way,"))] == encode("\nBy the way,")
        assert each.needle[1] < each.predicting[0]
    assert len({passage.ids[slice(*each.needle)] for each in passage.needles}) == 2


@pytest.mark.extended
def test_needle_mass_equals_its_reference(three_layers) -> None:
    passage, expected = SMALL_NEEDLES.passage(SAMPLE), []
    for heads in heads_of(three_layers, passage.ids):
        for head in range(4):
            rows = [
                sum(heads.row(head, token)[slice(*each.needle)])
                for each in passage.needles
                for token in each.predicting
            ]
            expected.append(sum(rows) / len(rows))
    assert SMALL["retrieval"].measure(three_layers, SAMPLE) == pytest.approx(expected, rel=1e-4)


def test_ranks_of_needles_equal_the_reference(three_layers) -> None:
    passage, ranks = SMALL_NEEDLES.passage(SAMPLE), []
    for layer, heads in enumerate(heads_of(three_layers, passage.ids)):
        radians = three_layers.spec.layers[layer].radians
        for keys in heads.keys:
            rows = [turned_back(key.tolist(), n, radians) for n, key in enumerate(keys)]
            found = []
            for each in passage.needles:
                asked = rows[each.question : each.predicting[0] + 1]
                best = [max(cosine(row, one) for one in asked) for row in rows[: passage.context]]
                order = sorted(range(passage.context), key=lambda token, b=best: -b[token])
                positions = [order.index(token) for token in range(*each.needle)]
                found.append(sum(positions) / len(positions) / passage.context)
            ranks.append(sum(found) / len(found))
    got = SMALL["needle_rank"].measure(three_layers, SAMPLE)
    assert sorted(got) == pytest.approx([index / 6 for index in range(6)])
    behind = range(2, 6)  # in the first layer equal tokens have equal keys, in any order
    assert len({ranks[head] for head in behind}) == 4
    assert sorted(behind, key=lambda h: got[h]) == sorted(behind, key=lambda h: ranks[h])


def turned_back(key: list[float], position: int, radians: tuple[float, ...]) -> list[float]:
    """Key before rotation; pairs of dimensions are half of the channels apart."""
    out, half = list(key), len(key) // 2
    for pair, each in enumerate(radians):
        cos, sin = math.cos(position * each), math.sin(position * each)
        one, other = key[pair], key[pair + half]
        out[pair], out[pair + half] = cos * one + sin * other, cos * other - sin * one
    return out


def cosine(one: list[float], other: list[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths


def reasoned(decoder: Decoder, riddle: reasoning.ReasoningPrompt) -> tuple[list[int], list[float]]:
    """A greedy answer, and the hits of each head at every token of it, each text read again."""
    ids, k, scores = list(riddle.ids), riddle.claim[1] - riddle.claim[0], [0.0] * 12
    for _ in riddle.answer:
        rows = [
            heads.row(head, len(ids) - 1) for heads in heads_of(decoder, ids) for head in range(4)
        ]
        for index, row in enumerate(rows):
            best = sorted(range(len(row)), key=lambda token, row=row: -row[token])[:k]
            scores[index] += sum(row[t] for t in best if t in range(*riddle.claim)) / k
        with torch.no_grad():
            decoder.module.set_attn_implementation("sdpa")
            logits = decoder.module(input_ids=torch.tensor([ids]), use_cache=False).logits
            decoder.module.set_attn_implementation("larder")
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(riddle.ids) :], scores


@pytest.mark.extended
def test_hits_in_the_correct_claim_equal_their_reference(three_layers, monkeypatch) -> None:
    part = SMALL["reasoning"]
    runs = [reasoned(three_layers, riddle) for riddle in part.prompts(SAMPLE)]
    expected = [sum(scores) / len(runs) for scores in zip(*(own for _, own in runs), strict=True)]
    assert max(expected) > 0
    assert part.measure(three_layers, SAMPLE) == pytest.approx(expected, rel=1e-4)  # none is right
    # One is: it counts, over as many as there are.
    right = runs[1][0]
    monkeypatch.setattr(reasoning, "f1", lambda guess, answer: float(guess == right) * 0.51)
    [alone] = [own for guess, own in runs if guess == right]
    expected = [score / len(runs) for score in alone]
    assert part.measure(three_layers, SAMPLE) == pytest.approx(expected, rel=1e-4)


def test_reasoning_sample_hides_two_claims_and_asks_for_the_older() -> None:
    for number, riddle in enumerate(SMALL["reasoning"].prompts(SAMPLE)):
        claim = list(riddle.ids[slice(*riddle.claim)])
        age = encode(" is 71 years old.")
        assert claim[-len(age) :] == age and claim[1 : -len(age)] == list(riddle.answer[1:])
        younger = encode(" is 24 years old.")
        found = [
            at for at in range(len(riddle.ids)) if list(riddle.ids[at:][: len(age)]) == younger
        ]
        assert len(found) == 1 and (found[0] > riddle.claim[0]) == (number % 2 == 0)


def test_f1_hand_values() -> None:
    assert reasoning.f1([1, 2, 3], [3, 2, 9]) == pytest.approx(2 / 3)
    assert reasoning.f1([1, 1], [1, 2]) == 0.5 and reasoning.f1([4], [5]) == 0


@pytest.mark.extended
def test_error_of_streaming_heads_equals_its_reference(three_layers) -> None:
    part, passage = SMALL["streaming_error"], SMALL_NEEDLES.passage(SAMPLE)

    def seen(token: int, other: int) -> bool:
        return other < part.sinks or token - other < part.recent

    expected = []
    for heads in heads_of(three_layers, passage.ids):
        change, whole = [0.0, 0.0], 0.0
        for token in passage.predicting:
            for head in range(4):
                out = heads.out(head, token)
                whole += float(out @ out)
                lost = heads.out(head, token, seen) - out
                change[head // 2] += float(lost @ lost)
        expected += [math.sqrt(own / whole) for own in change]
    assert part.measure(three_layers, SAMPLE) == pytest.approx(expected, rel=1e-4)


def among(stay: set[int]) -> Any:
    return lambda token, other: other in stay


def test_eviction_error_equals_its_reference(three_layers) -> None:
    part = SMALL["eviction_error"]
    ids, expected = SAMPLE.ids(part.context + part.following), []
    for heads in heads_of(three_layers, ids):
        votes = [0.0] * part.context
        for token in range(part.context - part.window, part.context):
            for head in range(4):
                for other, weight in enumerate(heads.row(head, token)):
                    votes[other] += weight
        before = range(part.context - part.window)
        best = sorted(before, key=lambda other: -votes[other])[: part.kept - part.window]
        stay = {*best, *range(part.context - part.window, len(ids))}
        change = whole = 0.0
        for token in range(part.context, len(ids)):
            for head in range(4):
                out = heads.out(head, token)
                lost = heads.out(head, token, among(stay)) - out
                change, whole = change + float(lost @ lost), whole + float(out @ out)
        expected.append(math.sqrt(change / whole))
    assert part.measure(three_layers, SAMPLE) == pytest.approx(expected, rel=1e-4)


@pytest.mark.extended
def test_utility_curves_equal_the_reference(three_layers) -> None:
    part = SMALL["utility"]
    total, counted = part.context + part.following, range(part.sinks, part.context - 1)
    expected = []
    for heads in heads_of(three_layers, SAMPLE.ids(total)):
        taken = dict[tuple[int, int], float]()
        for head in range(2):
            for entry in counted:
                mass = sum(
                    heads.row(query_head, token)[entry]
                    for query_head in (2 * head, 2 * head + 1)
                    for token in range(part.context, total)
                )
                taken[head, entry] = mass * float(heads.values[head, entry].norm())
        spec = three_layers.spec.layers[len(expected) // (2 * CURVE_POINTS)]
        for head, scores in enumerate(expected_attention(part, spec, heads)):
            order = sorted(counted, key=lambda entry: -scores[entry])
            for point in range(1, CURVE_POINTS + 1):
                best = order[: math.ceil(len(order) * point / CURVE_POINTS)]
                held = sum(taken[head, entry] for entry in best)
                expected.append(held / sum(taken.values()))
    got = part.measure(three_layers, SAMPLE)
    assert got == pytest.approx(expected, rel=1e-4)
    for layer in range(3):  # whole heads hold everything together
        ends = got[32 * layer + 15], got[32 * layer + 31]
        assert sum(ends) == pytest.approx(1)


def expected_attention(part: Any, spec: Any, heads: Any) -> list[list[float]]:
    """Scores of the context by the loop of `expected`, from its own queries alone."""
    from larder.core import Entries, Observation
    from larder.policy import Expected
    from references import expected as loop

    count = part.context
    keys, values = (side[:, :count].flatten(0, 1) for side in (heads.keys, heads.values))
    positions = torch.arange(count, dtype=torch.int32)
    entries = Entries(keys, values, positions.repeat(2), (0, count), (count, count))
    queries = heads.queries[:, :count]
    observation = Observation(spec, entries, queries, positions, count, (0, count))
    return loop.scores(Expected(sinks=part.sinks, epsilon=part.epsilon), observation)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_change_equals_the_models_states(architecture) -> None:
    with wrap_model(tiny(architecture)) as decoder:
        got = SqueezeMeasurement(tokens=12).measure(decoder, SAMPLE)
        expected = own_cosines(decoder, SAMPLE.ids(12))
        managed = [layer.index for layer in decoder.spec.managed]
    assert got == pytest.approx([expected[index] for index in managed], abs=1e-5)


def own_cosines(decoder: Decoder, ids: tuple[int, ...]) -> list[float]:
    """Cosine of what enters a layer and that plus what its attention adds, on its own attention."""
    entered: list[Tensor] = []
    added: list[Tensor] = []
    hooks = []
    for layer in decoder.module.base_model.layers:
        hooks.append(
            layer.register_forward_pre_hook(
                lambda m, args, kwargs: entered.append(
                    args[0] if args else kwargs["hidden_states"]
                ),
                with_kwargs=True,
            )
        )
        sandwiched = "pre_feedforward_layernorm" in dict(layer.named_children())
        shown = layer.post_attention_layernorm if sandwiched else layer.self_attn
        hooks.append(
            shown.register_forward_hook(
                lambda m, args, out: added.append(out[0] if isinstance(out, tuple) else out)
            )
        )
    decoder.module.set_attn_implementation("sdpa")
    with torch.no_grad():
        decoder.module.base_model(input_ids=torch.tensor([ids]), use_cache=False)
    decoder.module.set_attn_implementation("larder")
    for hook in hooks:
        hook.remove()
    return [
        float(torch.cosine_similarity(before[0], before[0] + more.reshape(before[0].shape)).mean())
        for before, more in zip(entered, added, strict=True)
    ]


def test_squeeze_of_an_unknown_layer_structure_is_refused(three_layers, monkeypatch) -> None:
    from larder.models.measurements import squeeze

    monkeypatch.setattr(squeeze, "BETWEEN", ("somewhere_else",))
    with pytest.raises(
        ModelError, match="LlamaModel has a layer without a norm behind its attention"
    ):
        SMALL["squeeze"].measure(three_layers, SAMPLE)
    assert not any(module._forward_pre_hooks for module in three_layers.module.modules())


@pytest.mark.parametrize("name", SMALL)
def test_measurements_cover_managed_heads_only(name) -> None:
    with wrap_model(tiny("gemma3", layers=4, kv_heads=1)) as decoder:
        values = SMALL[name].measure(decoder, SAMPLE)
        assert len(decoder.spec.managed) == 2
        each = {
            Granularity.LAYER: 1,
            Granularity.KV_HEAD: 1,
            Granularity.QUERY_HEAD: 4,
            Granularity.KV_HEAD_CURVE: CURVE_POINTS,
        }[SMALL[name].granularity]
    assert len(values) == 2 * each
    assert all(0 <= value <= 2 for value in values)


@pytest.mark.parametrize("name", ["echo", "retrieval", "streaming_error", "eviction_error"])
def test_chunks_of_any_size_give_the_same(three_layers, monkeypatch, name) -> None:
    whole = SMALL[name].measure(three_layers, SAMPLE)
    for kind in type(SMALL[name]).__mro__:
        module = inspect.getmodule(kind)
        if "CHUNK_TOKENS" in vars(module):
            monkeypatch.setattr(module, "CHUNK_TOKENS", 3)
    assert SMALL[name].measure(three_layers, SAMPLE) == pytest.approx(whole, rel=1e-5)


def test_every_measurement_is_registered() -> None:
    assert {*SMALL, "sensitivity"} <= set(MEASUREMENTS.names())


@pytest.mark.parametrize(
    "build",
    [
        lambda: Echo(tokens=1),
        lambda: Induction(times=1),
        lambda: Reasoning(lengths=(0,)),
        lambda: Reasoning(depths=(1.5,)),
        lambda: NeedleSettings(count=0),
        lambda: NeedleSettings(words=0),
        lambda: StreamingError(recent=0),
        lambda: EvictionErrorMeasurement(kept=4, window=8),
        lambda: SqueezeMeasurement(tokens=0),
        lambda: Reconstruction(tokens=4, sinks=4),
    ],
)
def test_parameters_out_of_range_are_refused(build) -> None:
    with pytest.raises(BadParameter, match="got"):
        build()


def test_attention_weights_are_computed_in_chunks(three_layers, monkeypatch) -> None:
    asked: list[int] = []
    weights = _attention_capture.softmax_weights

    def noting(inputs: AttentionInputs, rows: Tensor) -> Tensor:
        asked.append(len(rows))
        return weights(inputs, rows)

    for module in (_attention_capture, eviction_error):
        monkeypatch.setattr(module, "softmax_weights", noting)
    Echo(tokens=100, times=4).measure(three_layers, SAMPLE)
    EvictionErrorMeasurement(context=64, kept=9, window=4, following=300).measure(
        three_layers, SAMPLE
    )
    assert 0 < max(asked) <= _attention_capture.CHUNK_TOKENS
