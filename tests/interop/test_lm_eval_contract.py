"""Model of lm-eval over its interface: the package is not needed, and checked where it is there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch

from interop import fake_lm_eval
from interop.fake_lm_eval import Instance
from larder import Engine
from server_core import characters
from tiny_models import tiny

MODULE = "larder.interop.lm_eval"
KEYDIFF = "protect(sinks=2, recent=4) > keydiff() > uniform()"
STORY = "The harbour opened in 1871, and its master was called Ida. Ann has a dog."
CHOICES = [(STORY, " A"), (STORY + " ", "Bob"), ("", "Forty boats left")]


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type:
    """`LarderLM` over the interface of this folder."""
    for name, module in fake_lm_eval.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    found = import_module(MODULE).LarderLM
    monkeypatch.delitem(sys.modules, MODULE)  # the next import is of the package again
    return found


def instances(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [Instance(kind, {}, one, n) for n, one in enumerate(arguments)]


@torch.no_grad()
def likelihood(model: Any, context: list[int], continuation: list[int]) -> float:
    """Sum of log-probabilities of a continuation, by the model in one pass."""
    ids = torch.tensor([[*context, *continuation]])
    scores = model(ids).logits[0].double().log_softmax(-1)
    positions = range(len(context) - 1, ids.shape[1] - 1)
    return sum(float(scores[p, t]) for p, t in zip(positions, continuation, strict=True))


def test_model_is_registered(kind: type) -> None:
    assert fake_lm_eval.get_model("larder") is kind


def test_scores_under_a_full_cache_are_those_of_the_model(kind: Any) -> None:
    model, tokenizer = tiny("llama"), characters().tokenizer
    lm = kind(model, "full", tokenizer=tokenizer)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    got = lm.loglikelihood(instances("loglikelihood", CHOICES), True)
    pairs = [(STORY, " A"), (STORY, " Bob")]
    expected = [likelihood(model, encode(a), encode(b)) for a, b in pairs]
    expected.append(likelihood(model, [lm.prefix_token_id], encode(CHOICES[2][1])))
    assert [score for score, _ in got] == pytest.approx(expected, abs=1e-4)
    text = STORY[:30]
    rolling = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]), True)
    assert rolling == pytest.approx([likelihood(model, [lm.prefix_token_id], encode(text))])


def test_policy_acts_on_contexts_and_on_generation(kind: Any) -> None:
    model, tokenizer = tiny("llama"), characters().tokenizer
    lm = kind(model, KEYDIFF, tokenizer=tokenizer, budget=0.5, min_budget=8)
    lm.loglikelihood(instances("loglikelihood", CHOICES[:1]), True)
    info = lm.get_model_info()
    assert 0.4 < info["larder_kv_bytes"] / info["larder_full_kv_bytes"] < 0.8
    options = {"max_gen_toks": 6, "until": []}
    [got] = lm.generate_until(instances("generate_until", [(STORY, options)]), True)
    engine = Engine(model, tokenizer, policy=KEYDIFF, budget=0.5)
    assert got == engine.generate(STORY, max_new_tokens=6).text


WINDOWS = [
    ([1, 2, 3], 0, 8, 1),
    (list(range(20)), 99, 6, 1),
    (list(range(20)), 99, 6, 4),
    ([], 0, 4, 1),
]


def test_rolling_windows_hand_values() -> None:
    found = list(fake_lm_eval.get_rolling_token_windows([1, 2, 3, 4, 5], 0, 3, 2))
    assert found == [([0, 1, 2], [1, 2, 3]), ([2, 3, 4], [4, 5])]
    assert fake_lm_eval.make_disjoint_window(found[1]) == ([2, 3], [4, 5])


@pytest.mark.filterwarnings("ignore")  # of lm-eval and its dependencies
def test_installed_lm_eval_has_the_expected_interface() -> None:
    """Parameters of what Larder calls and overrides, and windows of tokens."""
    pytest.importorskip("lm_eval")
    model = import_module("lm_eval.api.model").TemplateLM
    utils, registry = import_module("lm_eval.utils"), import_module("lm_eval.api.registry")
    for name in ("tok_encode", "_loglikelihood_tokens", "_encode_pair", "loglikelihood"):
        assert _names(vars(model)[name]) == _names(vars(fake_lm_eval.TemplateLM)[name]), name
    for module, name in (
        (registry, "get_model"),
        (utils, "get_rolling_token_windows"),
        (utils, "make_disjoint_window"),
    ):
        assert _names(vars(module)[name]) == _names(vars(fake_lm_eval)[name]), name
    for given in WINDOWS:
        theirs = list(utils.get_rolling_token_windows(*given))
        assert list(fake_lm_eval.get_rolling_token_windows(*given)) == theirs
        for pair in theirs:
            assert fake_lm_eval.make_disjoint_window(pair) == utils.make_disjoint_window(pair)


def _names(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "kwargs"]
