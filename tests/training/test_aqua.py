"""Training of AQUA-KV: least squares on decoded inputs, errors by layer, a cache that uses it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from larder.cache import AquaPredictions, ResidualCoder
from larder.core import BadParameter, Mode, ModelError
from larder.models import BatchSegment, LoadedModel, learned_file, load, load_learned
from larder.ops import VectorQuantizer
from larder.session import Policy, TokenizerAdapter, empty_cache
from larder.training import (
    AquaTraining,
    CorpusSplit,
    Passage,
    PassageLimits,
    read_corpus,
    read_samples,
    select_passages,
    train_on_passages,
)

LIMITS = PassageLimits(tokens=1500, test_tokens=300, passage_tokens=300)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("seed")


def nothing(done: int, total: int) -> None:
    del done, total


@pytest.mark.extended
def test_predictions_are_damped_least_squares_on_decoded_inputs(loaded) -> None:
    adapter, spec = TokenizerAdapter(loaded.tokenizer), loaded.decoder.spec
    passages = select_passages(read_corpus(None).passages(adapter, 300), LIMITS)[CorpusSplit.TRAIN]
    method = AquaTraining(damping=1e-2)
    layers = method.fit(loaded.decoder, passages, 0, nothing)
    samples = read_samples(loaded.decoder, passages)
    first, (keys, values) = AquaPredictions.of(layers[0]), samples.layer(0)
    torch.testing.assert_close(first.keys.bias, keys.mean(0))
    coder = ResidualCoder(first, VectorQuantizer(keys.shape[1], 4))
    none = torch.zeros(0, 1, len(keys))
    tier = coder.encode((keys, values), (), torch.zeros(len(keys), dtype=torch.int32), none)
    below = coder.decode(tier, ())
    inputs, targets = below[0].double().numpy(), samples.layer(1)[0].double().numpy()
    centered = inputs - inputs.mean(0)
    squares = centered.T @ centered
    squares += 1e-2 * np.trace(squares) / len(squares) * np.eye(len(squares))
    slopes = np.linalg.solve(squares, centered.T @ (targets - targets.mean(0)))
    np.testing.assert_allclose(layers[1]["keys.weight"].numpy(), slopes, rtol=1e-2, atol=1e-4)
    width = keys.shape[1]
    assert layers[1]["values.weight"].shape == (2 * width, width)
    assert len(layers) == len(spec.managed)


@pytest.mark.extended
def test_predictions_reduce_the_error_of_every_layer(loaded) -> None:
    adapter, spec = TokenizerAdapter(loaded.tokenizer), loaded.decoder.spec
    method, corpus = AquaTraining(), read_corpus(None)
    learned = train_on_passages(method, loaded.decoder, adapter, corpus, LIMITS, nothing)
    metrics = learned.card.metrics
    assert metrics["test_keys_layers_without_gain"] == 0.0
    assert metrics["test_values_layers_without_gain"] == 0.0
    assert metrics["test_keys_error"] < 0.5 * metrics["test_keys_error_unpredicted"]
    learned.save(learned_file(spec.fingerprint, "aqua"))
    assert load_learned(spec, "aqua", method).card == learned.card
    assert_continues(loaded, next(corpus.passages(adapter, 330, seed=1)).ids)


def assert_continues(loaded: LoadedModel, ids: tuple[int, ...]) -> None:
    """Check that coded tokens are attended to nearly as exact ones."""
    found, held = list[torch.Tensor](), 0
    for sentence in ("full", "whole() > sinks_and_window() > uniform(tokens=330) > aqua()"):
        policy = Policy.parse(sentence).with_sizes(330, None, 330)
        cache = empty_cache(policy, loaded.decoder.spec)
        for first in (0, 300):
            segment = BatchSegment(cache, ids[first : first + 300])
            rows = [*range(len(segment.ids))]
            logits = loaded.decoder.forward_logits([segment], Mode.APPEND, rows)
        found.append(logits.float().log_softmax(-1))
        held = cache.full_precision_lengths()[0][0]
    assert held < 200
    divergence = (found[0].exp() * (found[0] - found[1])).sum(-1).mean()
    assert 1e-7 < float(divergence) < 0.05


@pytest.mark.parametrize("change", [{"bits": 5}, {"first_bits": 0}, {"damping": 0.0}])
def test_invalid_settings_are_refused(change) -> None:
    with pytest.raises(BadParameter, match=f"aqua\\.{next(iter(change))}"):
        AquaTraining(**change)


def test_passages_of_sinks_only_are_refused(loaded) -> None:
    short = Passage("short", "texts", CorpusSplit.TRAIN, 0, (5, 6, 7, 8))
    with pytest.raises(ModelError, match="more passage_tokens"):
        read_samples(loaded.decoder, [short])
