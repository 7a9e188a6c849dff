"""Predictions across layers: least squares, the transform of what is left, and a trained file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from larder.cache import PredictiveTables
from larder.core import BadParameter
from larder.models import load
from larder.session import TokenizerAdapter
from larder.training import PredictiveSettings, fit_side, read_corpus, train_predictive

SETTINGS = PredictiveSettings(tokens=1500, test_tokens=300, passage_tokens=300)


def test_fit_is_damped_least_squares_and_its_components_are_uncorrelated() -> None:
    source = np.random.default_rng(0)
    inputs, noise = source.normal(size=(400, 5)) + 2, source.normal(size=(400, 3)) * [1, 2, 0.5]
    numbers = inputs @ source.normal(size=(5, 3)) + noise + 7
    side = fit_side(
        torch.tensor(numbers).float(),
        [torch.tensor(inputs[:, :2]).float(), torch.tensor(inputs[:, 2:]).float()],
        torch.eye(3, dtype=torch.float64),
        1e-2,
    )
    centered = inputs - inputs.mean(0)
    squares = centered.T @ centered
    squares += 1e-2 * np.trace(squares) / 5 * np.eye(5)
    slopes = np.linalg.solve(squares, centered.T @ (numbers - numbers.mean(0)))
    np.testing.assert_allclose(side.weights.numpy(), slopes, rtol=1e-3, atol=1e-4)
    given = torch.tensor(inputs).float()
    left = side.components(torch.tensor(numbers).float(), side.predicted([given], 400))
    moments = (left.T @ left / 400).numpy()
    np.testing.assert_allclose(moments, np.diag(side.deviation.numpy() ** 2), atol=1e-3)
    assert list(side.deviation) == sorted(side.deviation, reverse=True)


def test_without_inputs_the_mean_is_predicted() -> None:
    numbers = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) + 3
    side = fit_side(numbers, [], torch.eye(4, dtype=torch.float64), 1e-3)
    assert side.weights.shape == (0, 4)
    torch.testing.assert_close(side.predicted([], 2), numbers.mean(0).expand(2, -1))
    components = side.components(numbers, side.predicted([], 50))
    restored = side.restored([], components, torch.float32)
    torch.testing.assert_close(restored, numbers, rtol=1e-4, atol=1e-4)


@pytest.mark.extended
def test_training_predicts_documents_left_out(tmp_path) -> None:
    loaded, steps = load("seed"), []
    tables, card = train_predictive(
        loaded.decoder,
        TokenizerAdapter(loaded.tokenizer),
        read_corpus(None),
        SETTINGS,
        lambda done, total: steps.append((done, total)),
    )
    layers = loaded.decoder.spec.managed
    assert len(tables.layers) == len(layers) and card.method == "predictive"
    assert card.tokens >= 1200 and steps[-1][1] == SETTINGS.tokens
    assert card.fingerprints == (loaded.decoder.spec.fingerprint,)
    assert card.metrics["test_keys_r2"] > 0.1 and card.metrics["test_values_r2"] > 0.1
    tables.save(tmp_path / "own.safetensors", {"card": card.dumps()})
    again = PredictiveTables.of(load_file(tmp_path / "own.safetensors"))
    assert again.digest == tables.digest and again.nbytes == tables.nbytes


@pytest.mark.parametrize(
    "change", [{"tokens": 0}, {"passage_tokens": 4}, {"bits": 0.0}, {"damping": 0.0}]
)
def test_invalid_settings_are_refused(change) -> None:
    with pytest.raises(BadParameter):
        replace(SETTINGS, **change)
