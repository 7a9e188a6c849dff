"""Arguments of the model of lm-eval, which need no lm-eval."""

from __future__ import annotations

import pytest

from larder.core import UsageError
from larder.interop import GenerationOptions, batch_size_of


def test_options_of_generation_are_read_as_lm_eval_writes_them() -> None:
    plain = GenerationOptions.of({"until": "\n", "max_new_tokens": 9, "do_sample": False}, 256)
    assert plain == GenerationOptions(("\n",), 9, 0.0, 1.0, 0)
    sampled = GenerationOptions.of({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, 256)
    assert sampled == GenerationOptions((), 256, 0.7, 0.9, 0)
    with pytest.raises(UsageError, match="No argument of generation named 'beams'"):
        GenerationOptions.of({"beams": 2}, 256)


def test_generation_options_are_converted_for_the_engine() -> None:
    given = {"until": ["a", ""], "max_gen_toks": 5, "do_sample": True, "top_k": 3}
    options = GenerationOptions.of(given, 256).for_engine(seed=4)
    assert (options.max_new_tokens, options.stops) == (5, ("a",))
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (1.0, 3, 4)


def test_batch_sizes_are_numbers_or_auto() -> None:
    assert [batch_size_of(given) for given in (3, "4", "auto", "auto:2")] == [3, 4, 8, 8]
    for wrong in ("many", 0, "-1"):
        with pytest.raises(UsageError, match="batch_size must be a number of contexts or auto"):
            batch_size_of(wrong)
