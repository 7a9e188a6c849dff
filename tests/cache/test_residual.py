"""Residual layers: tokens decoded layer by layer, in how many bytes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from builders import a_layer, a_plan, a_spec, draw
from cache_stores import assert_close, same_bits
from larder.cache import AquaPredictions, NewTokens, ResidualLayer, SequenceCache, tables_path
from larder.core import (
    CacheError,
    Folds,
    Ledger,
    MissingWeights,
    Mode,
    ModelSpec,
    Plan,
    ResidualSpec,
)
from larder.models import Card
from larder.ops import gaussian_grid
from references import aqua as reference
from references.transform import attention
from second_device import OTHER, SecondDevice

LAYERS = tuple(a_layer(2, 2, index=index) for index in range(3))
WIDTH, SPEC = 16, ResidualSpec(bits=2, first_bits=4, sinks=2, recent=5)
LONG = 90  # tokens, of which 83 are coded
EXACT = [0, 1, *range(85, 90)]
CARD = {"card": Card("aqua", ("",)).dumps()}


def half(number: float) -> float:
    return float(torch.tensor(number).half())


def save_predictions(seed: int = 0) -> None:
    """Predictions of any numbers, as `larder train aqua` would save them."""
    source = torch.Generator().manual_seed(seed)
    tensors = dict[str, Tensor]()
    for place in range(len(LAYERS)):
        rows = (0, 0) if not place else (WIDTH, 2 * WIDTH)
        for side, inputs in zip(("keys", "values"), rows, strict=True):
            weight = torch.randn(inputs, WIDTH, generator=source) / 8
            tensors[f"layers.{place}.{side}.weight"] = weight
            tensors[f"layers.{place}.{side}.bias"] = torch.randn(WIDTH, generator=source)
    path = tables_path("", "aqua")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, CARD)


@pytest.fixture(autouse=True)
def predictions() -> None:
    save_predictions()


def a_cache(ledger: Ledger = Ledger(), spec: ResidualSpec = SPEC) -> SequenceCache:  # noqa: B008
    return SequenceCache(a_spec(*LAYERS), "residual", ledger, residual=spec)


def read(cache: SequenceCache, count: int, start: int | None = None) -> list[Tensor]:
    """Attention of new tokens in every layer, which are appended."""
    first = cache.next_position if start is None else start
    outs = list[Tensor]()
    for index, layer in enumerate(LAYERS):
        new = draw(layer, count, first, seed=index)
        numbers = new.queries, new.keys, new.values, new.positions
        outs.append(cache.attend(index, NewTokens(*numbers, Mode.APPEND)))
    cache.advance(count)
    return outs


def filled(count: int = LONG, ledger: Ledger = Ledger()) -> SequenceCache:  # noqa: B008
    cache = a_cache(ledger)
    read(cache, count)
    return cache


def numbers(cache: SequenceCache, layer: int) -> Tensor:
    """Keys and values [T, 2 D] of a layer."""
    entries = cache.entries(layer)
    return torch.cat([entries.pack(entries.keys), entries.pack(entries.values)], 1)


def loop_token(position: int) -> list[tuple[list[float], list[float]]]:
    """Decoded keys before rotation and values of a token of `filled`, layer by layer."""
    below: tuple[list[float], ...] = ()
    found = list[tuple[list[float], list[float]]]()
    for place, layer in enumerate(LAYERS):
        new = draw(layer, LONG, 0, seed=place)
        keys = [
            number
            for head in range(2)
            for number in reference.unrotated(
                new.keys[head, position].tolist(), layer.radians or (), position
            )
        ]
        token = keys, new.values[:, position].flatten().tolist()
        own = AquaPredictions.load(layer, place, "", torch.device("cpu"))
        sides = [(side.weights.tolist(), side.bias.tolist()) for side in (own.keys, own.values)]
        grid = gaussian_grid(16 if place else 256).tolist()
        below = reference.decoded_layer(token, sides, below, grid, half)
        found.append((below[0], below[1]))
    return found


@pytest.mark.extended
def test_first_and_latest_tokens_are_exact_and_others_coded() -> None:
    cache = filled()
    assert cache.lengths() == ((LONG, LONG),) * 3
    assert cache.full_precision_lengths() == ((7, 7),) * 3
    for index, layer in enumerate(LAYERS):
        entries, new = cache.entries(index), draw(layer, LONG, 0, seed=index)
        assert entries.head_positions(1).tolist() == [*range(LONG)]
        assert torch.equal(entries.head_keys(1)[EXACT], new.keys[1, EXACT])
        assert torch.equal(entries.head_values(0)[EXACT], new.values[0, EXACT])
        coded = [int(grade) for grade in entries.grades[:LONG]]
        assert [place for place, grade in enumerate(coded) if not grade] == EXACT


@pytest.mark.extended
def test_coded_tokens_equal_their_reference() -> None:
    cache = filled()
    for position in (2, 40, 84):
        for index, (keys, values) in enumerate(loop_token(position)):
            stored = cache.layers[index]
            assert isinstance(stored, ResidualLayer)
            decoded = stored.decoded()
            assert_close(decoded[0][position - 2], torch.tensor(keys))
            assert_close(decoded[1][position - 2], torch.tensor(values))
            shown = cache.entries(index).head_keys(1)[position].tolist()
            plain = reference.unrotated(shown, LAYERS[index].radians or (), position)
            assert_close(torch.tensor(plain), torch.tensor(keys[8:]))


@pytest.mark.parametrize("queries", [1, 3])
def test_attention_equals_that_over_decoded_entries(queries) -> None:
    cache = filled()
    held = [cache.entries(index) for index in range(3)]
    outs = read(cache, queries)
    for index, layer in enumerate(LAYERS):
        new = draw(layer, queries, LONG, seed=index)
        for query_head in range(4):
            head = query_head // 2
            keys = torch.cat([held[index].head_keys(head), new.keys[head, :1]])
            values = torch.cat([held[index].head_values(head), new.values[head, :1]])
            asked = new.queries[query_head, 0].tolist()
            expected = attention(asked, keys.tolist(), values.tolist(), layer.scaling)
            assert_close(outs[index][query_head, 0], torch.tensor(expected))


def test_decoding_order_of_layers_does_not_matter() -> None:
    one, other = filled(), filled()
    expected = [numbers(one, index) for index in range(3)]
    assert_close(numbers(other, 2), expected[2])
    assert_close(numbers(other, 1), expected[1])


def test_generated_tokens_are_coded_64_at_a_time() -> None:
    cache, whole = a_cache(), filled(76)
    read(cache, 4)
    most = 0
    for _ in range(72):
        read(cache, 1)
        most = max(most, cache.full_precision_lengths()[0][0])
    assert most == 2 + 63 + 5
    assert cache.full_precision_lengths() == ((12, 12),) * 3  # two, five waiting, five latest
    positions = cache.entries(2).head_positions(0)
    assert positions.tolist() == [*range(76)]
    assert cache.lengths() == whole.lengths()


def test_bytes_are_those_of_codes_and_exact_tokens() -> None:
    cache = filled()
    exact = 7 * 2 * (2 * 8 * 4 + 4) + 2 * 2 * 8  # starts and lengths of the ragged part
    coded = [83 * SPEC.token_bytes(WIDTH, place) for place in range(3)]
    # Sixteen numbers in 4 bits, and in 2; a scale of each side, and the position.
    assert coded == [83 * (2 * (8 + 2) + 4), 83 * (2 * (4 + 2) + 4), 83 * (2 * (4 + 2) + 4)]
    assert cache.nbytes == 3 * exact + sum(coded)


def test_decoded_tensors_are_freed_after_a_forward_pass() -> None:
    cache = filled()
    before = cache.nbytes
    slack = filled()
    slack.reserve(1)
    reserved = slack.nbytes - before
    read(slack, 1)
    assert slack.nbytes == before + reserved
    numbers(cache, 0)
    assert cache.nbytes == before + 83 * 2 * WIDTH * 4  # until layer 1 has used it
    numbers(cache, 1)
    numbers(cache, 2)
    assert cache.nbytes == before


@pytest.mark.extended
def test_restored_copy_continues_identically() -> None:
    cache = filled()
    back = SequenceCache.restore(cache.spec, cache.state(), cache.meta())
    assert same_bits(cache.state(), back.state())
    fork = cache.fork()
    assert fork.nbytes - fork.shared_nbytes < 400  # lengths and starts
    for _ in range(70):
        outs = [read(twin, 1) for twin in (cache, back, fork)]
        for own, *others in zip(*outs, strict=True):
            assert all(torch.equal(own, other) for other in others)
    assert same_bits(cache.state(), back.state()) and same_bits(cache.state(), fork.state())


def test_state_of_other_predictions_is_refused() -> None:
    cache = filled()
    state = cache.state()
    save_predictions(seed=7)
    from larder.cache import residual_tier

    residual_tier._read.cache_clear()
    with pytest.raises(CacheError, match="trained again since: build the cache again"):
        SequenceCache.restore(cache.spec, state, cache.meta())


def test_model_without_predictions_is_refused() -> None:
    tables_path("", "aqua").unlink()
    with pytest.raises(MissingWeights, match="larder train aqua"):
        a_cache()
    with pytest.raises(CacheError, match="rotary"):
        SequenceCache(
            ModelSpec((replace(LAYERS[0], radians=None),), torch.float32, torch.device("cpu")),
            "residual",
            residual=SPEC,
        )


@pytest.mark.parametrize(
    "changed",
    [
        {"layers.1.keys.weight": (0, WIDTH)},
        {"layers.1.values.weight": (WIDTH, WIDTH)},
        {"layers.0.values.weight": (WIDTH, WIDTH)},
        {"layers.2.keys.bias": (WIDTH - 1,)},
        {"layers.2.keys.weight": ()},
    ],
)
def test_predictions_of_other_shapes_are_refused(changed: dict[str, tuple[int, ...]]) -> None:
    path = tables_path("", "aqua")
    tensors = load_file(path) | {name: torch.zeros(shape) for name, shape in changed.items()}
    save_file(tensors, path, CARD)
    with pytest.raises(CacheError, match="have shapes .*larder train aqua"):
        a_cache()


def keep(cache: SequenceCache, tokens: list[int], mode: str) -> None:
    """Keep these tokens in all heads of all layers."""
    lengths = cache.lengths()
    plans = {index: a_plan([tokens, tokens], own) for index, own in enumerate(lengths)}
    for index, plan in cache.fit_plans(plans).items():
        getattr(cache, mode)(index, plan)


@pytest.mark.parametrize("mode", ["apply", "evict"])
def test_eviction_keeps_the_codes_of_others(mode) -> None:
    cache, whole = filled(), filled()
    kept = [0, 3, 4, 50, 84, 85, 89]
    keep(cache, kept, mode)
    rows = [head * LONG + token for head in range(2) for token in kept]
    for index in range(3):
        assert_close(numbers(cache, index), numbers(whole, index)[rows])
    assert cache.full_precision_lengths() == ((3, 3),) * 3
    read(cache, 1)
    assert cache.entries(1).head_positions(0).tolist() == [*kept, LONG]


def test_truncating_and_dropping_keep_the_codes_of_the_others() -> None:
    cache, whole = filled(), filled()
    cache.truncate(60)
    cache.drop_range(10, 20)
    stays = [*range(10), *range(20, 60)]
    rows = [head * LONG + token for head in range(2) for token in stays]
    for index in range(3):
        assert_close(numbers(cache, index), numbers(whole, index)[rows])
    read(cache, 30)
    assert cache.entries(2).head_positions(0).tolist() == [*stays, *range(60, 90)]


def test_forward_pass_after_an_interrupted_one_equals_an_uninterrupted_cache() -> None:
    cache, whole = filled(40), filled(40)
    for index, layer in enumerate(LAYERS[:2]):  # the third layer never sees the block
        new = draw(layer, 50, 40, seed=index)
        given = new.queries, new.keys, new.values, new.positions
        cache.attend(index, NewTokens(*given, Mode.APPEND))
    cache.truncate(40)
    for twin in (cache, whole):
        read(twin, 50)
    assert cache.full_precision_lengths() == ((52, 52),) * 3  # 45 wait for others
    for index in range(3):
        assert_close(numbers(cache, index)[:40], numbers(whole, index)[:40])


def test_columns_stay_with_their_tokens() -> None:
    cache = filled(ledger=Ledger(("mass",)))
    column = torch.arange(2.0 * LONG)
    for index in range(3):
        cache.write_columns(index, {"mass": column})
    assert cache.entries(1).column("mass").tolist() == column.tolist()
    keep(cache, [0, 7, 88], "apply")
    expected = [0.0, 7.0, 88.0, 90.0, 97.0, 178.0]
    assert cache.entries(2).column("mass").tolist() == expected
    cache.write_columns(1, {"mass": torch.arange(6.0)})
    assert cache.entries(1).column("mass").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_plans_that_differ_by_head_or_layer_or_merge_are_refused_unchanged() -> None:
    cache = filled()
    before = cache.state()
    lengths = cache.lengths()[0]
    alike, other = a_plan([[0, 5], [0, 5]], lengths), a_plan([[0, 5], [0, 6]], lengths)
    elsewhere = a_plan([[0, 6], [0, 6]], lengths)
    one = torch.ones(1)
    folds = Folds(torch.tensor([1]), torch.tensor([0]), one, one)
    with pytest.raises(CacheError, match="different heads: take a scorer"):
        cache.fit_plans({0: other, 1: other, 2: other})
    with pytest.raises(CacheError, match="layer 1 than in the layers before: take a scorer"):
        cache.fit_plans({0: alike, 1: elsewhere, 2: alike})
    with pytest.raises(CacheError, match="merges entries.*: take a scorer"):
        cache.apply(0, replace(alike, folds=folds))
    with pytest.raises(CacheError, match="different grades"):
        cache.apply(0, replace(alike, grades=torch.ones(4, dtype=torch.int8)))
    assert same_bits(cache.state(), before)


def test_layers_with_different_tokens_are_refused() -> None:
    cache = filled()
    cache.apply(0, a_plan([[0, 5], [0, 5]], cache.lengths()[0]))
    with pytest.raises(CacheError, match="the layer below does not hold"):
        cache.entries(1)


def test_non_finite_entries_are_refused() -> None:
    cache, new = a_cache(), draw(LAYERS[0], LONG)
    keys = new.keys.clone()
    keys[0, 30, 2] = torch.inf
    with pytest.raises(CacheError, match="must be finite"):
        cache.attend(0, NewTokens(new.queries, keys, new.values, new.positions, Mode.APPEND))


def test_plan_that_keeps_all_changes_nothing() -> None:
    cache = filled()
    before = cache.state()
    cache.apply(1, Plan(torch.arange(2 * LONG), (LONG, LONG)))
    assert same_bits(cache.state(), before)


def test_second_device_holds_the_same_entries() -> None:
    expected = numbers(filled(), 2)
    with SecondDevice():
        cache = SequenceCache(ModelSpec(LAYERS, torch.float32, OTHER), "residual", residual=SPEC)
        for index, layer in enumerate(LAYERS):
            new = draw(layer, LONG, 0, seed=index)
            sides = (new.queries, new.keys, new.values, new.positions)
            cache.attend(index, NewTokens(*(side.to(OTHER) for side in sides), Mode.APPEND))
        cache.advance(LONG)
        found = numbers(cache, 2)
        assert found.device == OTHER
        assert_close(found.cpu(), expected)
