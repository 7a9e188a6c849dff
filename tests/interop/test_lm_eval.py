"""Model of lm-eval beside lm-eval's own `HFLM`; skipped where lm-eval is not installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from larder import Engine
from larder.core import BudgetError, InputError, UsageError
from larder.engine import ContinuationRequest, LikelihoodScorer
from larder.engine import engine as engine_module
from server_core import characters
from test_docstrings import run_example
from tiny_models import tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and its dependencies
pytest.importorskip("lm_eval")
Instance = import_module("lm_eval.api.instance").Instance
get_model = import_module("lm_eval.api.registry").get_model
HFLM = import_module("lm_eval.models.huggingface").HFLM
LarderLM = import_module("larder.interop.lm_eval").LarderLM

KEYDIFF = "protect(sinks=2, recent=4) > keydiff() > uniform()"
STORY = "The harbour opened in 1871, and its master was called Ida. Ann has a dog."
CHOICES = [(STORY, " A"), (STORY, " Bob"), (STORY, " A cat"), ("x", " y"), ("", "Forty boats left")]
TEXTS = ["Forty boats left on Monday, nine on Tuesday; two came back.", "Ann.", ""]


def instances(kind: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [Instance(kind, {}, one, n) for n, one in enumerate(arguments)]


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Without a padding token, which nothing here needs."""
    own = characters().tokenizer
    own.pad_token = None
    return own


def larder_lm(module: Any, tokenizer: Any, policy: str = "full", **options: Any) -> Any:
    return LarderLM(module, policy, tokenizer=tokenizer, **options)


def hf_lm(module: Any, **options: Any) -> Any:
    return HFLM(module, tokenizer=characters().tokenizer, batch_size=3, **options)


@pytest.mark.parametrize("max_length", [2048, 40])
@pytest.mark.parametrize("batch_size", [1, "auto"])
def test_full_cache_scores_equal_hf(
    module: Any, tokenizer: Any, max_length: int, batch_size: Any
) -> None:
    own = larder_lm(module, tokenizer, max_length=max_length, batch_size=batch_size)
    theirs = hf_lm(module, max_length=max_length)
    asked = instances("loglikelihood", CHOICES)
    got, expected = own.loglikelihood(asked, True), theirs.loglikelihood(asked, True)
    for (ours_sum, ours_greedy), (theirs_sum, theirs_greedy) in zip(got, expected, strict=True):
        assert ours_sum == pytest.approx(theirs_sum, abs=1e-4)
        assert ours_greedy == theirs_greedy
    asked = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    assert own.loglikelihood_rolling(asked, True) == pytest.approx(
        theirs.loglikelihood_rolling(asked, True), abs=1e-4
    )


def test_long_text_score_equals_hf_in_float64(module: Any, tokenizer: Any) -> None:
    """Summed in float32, as `hf` does by default, rounding adds up over the tokens of a text."""
    asked = instances("loglikelihood_rolling", [(STORY * 15,)])
    got = larder_lm(module, tokenizer).loglikelihood_rolling(asked, True)
    expected = hf_lm(module, softmax_dtype="float64").loglikelihood_rolling(asked, True)
    assert got == pytest.approx(expected, abs=1e-4)


def test_full_cache_generation_equals_hf(module: Any, tokenizer: Any) -> None:
    own, theirs = larder_lm(module, tokenizer, batch_size=2), hf_lm(module)
    whole = theirs.generate_until(
        instances("generate_until", [(STORY, {"max_gen_toks": 12, "until": []})]), True
    )[0]
    options = [{"max_gen_toks": 12, "until": []}, {"max_gen_toks": 12, "until": [whole[4:6]]}]
    asked = instances(
        "generate_until", [(text, one) for text in (STORY, TEXTS[0]) for one in options]
    )
    assert own.generate_until(asked, True) == theirs.generate_until(asked, True)


def test_policy_acts_on_each_context_once(module: Any, tokenizer: Any) -> None:
    lm = larder_lm(module, tokenizer, KEYDIFF, budget=0.5, min_budget=8)
    got = lm.loglikelihood(instances("loglikelihood", CHOICES), True)
    engine = Engine(module, tokenizer, policy=KEYDIFF, budget=0.5)
    scorer = LikelihoodScorer(engine.runtime, engine.policy, engine.sizes)
    encode = engine.tokenizer.encode
    request = ContinuationRequest(encode(STORY), tuple(encode(text) for _, text in CHOICES[:3]))
    expected = scorer.score_continuations([request])[0]
    sums = [score.log_likelihood for score in expected.scores]
    assert [one for one, _ in got[:3]] == pytest.approx(sums, abs=1e-4)
    full = larder_lm(module, tokenizer).loglikelihood(instances("loglikelihood", CHOICES), True)
    assert abs(full[1][0] - got[1][0]) > 1e-2
    assert got[3:] == [pytest.approx(one) for one in full[3:]]  # within min_budget
    info = lm.get_model_info()
    assert info["larder_contexts"] == 3
    assert 0.4 < info["larder_kv_bytes"] / info["larder_full_kv_bytes"] < 0.8


def test_example_of_the_lm_eval_model_runs(
    seed_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a few requests in place of a task, and the bundled model in place of SmolLM2."""

    def evaluate(lm: Any, tasks: Sequence[str]) -> None:
        assert tasks == ["piqa"]
        scores.extend(lm.loglikelihood(instances("loglikelihood", CHOICES), True))

    scores = list[Any]()
    monkeypatch.setattr(engine_module, "load", lambda *_, **__: seed_model)
    names = {"LarderLM": LarderLM, "lm_eval": SimpleNamespace(simple_evaluate=evaluate)}
    result = run_example("LarderLM", LarderLM.__doc__, names)
    assert result.attempted == 2 and not result.failed
    assert len(scores) == len(CHOICES)


def test_model_is_registered() -> None:
    assert get_model("larder") is LarderLM


def test_context_below_what_the_policy_protects_is_refused_at_once(
    module: Any, tokenizer: Any
) -> None:
    lm = larder_lm(module, tokenizer, KEYDIFF, budget=0.25)
    with pytest.raises(BudgetError, match=r"shortest context has 1 tokens.* give min_budget"):
        lm.loglikelihood(instances("loglikelihood", CHOICES), True)
    with pytest.raises(InputError, match="A continuation has no tokens"):
        larder_lm(module, tokenizer).loglikelihood(instances("loglikelihood", [("a", "")]), True)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no policy": ({"policy": None}, UsageError, "needs a policy: give policy=full"),
    "no model": ({"pretrained": None}, UsageError, "needs pretrained"),
    "unknown policy": ({"policy": "kvzap_"}, UsageError, "kvzap"),
    "budget": ({"budget": "much"}, UsageError, "budget 'much' is not a size"),
    "two budgets": ({"budget": 0.5}, UsageError, "contradicts unlimited"),
    "misspelled": ({"buget": 0.5}, UsageError, "No argument of the model larder named 'buget'"),
    "batch": ({"batch_size": "many"}, UsageError, "batch_size must be a number"),
    "dtype": ({"dtype": "float16"}, UsageError, "dtype given for a model in memory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(module: Any, tokenizer: Any, case: str) -> None:
    given, kind, result = WRONG[case]
    with pytest.raises(kind, match=result):
        LarderLM(**{"pretrained": module, "policy": "full", "tokenizer": tokenizer, **given})
