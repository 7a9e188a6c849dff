"""Log-likelihoods of lm-eval's `local-completions` client."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from larder import Engine
from larder.models import LoadedModel
from larder.server import Archive, HttpSettings, LocalEngineClient, LoopbackAuth, create_app
from server.http.running_server import listening
from tiny_models import tiny

PAIRS = [
    ("The harbour opened in 1871. Its master was called", " Ida."),
    ("Ann has a dog. Her dog is called", " Rex, and it is old."),
    ("x", " y"),
    ("", "Once upon a time"),
]


def own_likelihood(ids: list[int], num_scored: int) -> tuple[float, bool]:
    """Log-likelihood of the last tokens of a text by the plain model, and if each is the best."""
    with torch.no_grad():
        logits = tiny("qwen3", layers=2)(torch.tensor([ids])).logits[0].float()
    scored, before = ids[-num_scored:], logits[-num_scored - 1 : -1]
    own = before.log_softmax(-1)[range(num_scored), scored]
    return own.sum().item(), before.argmax(-1).tolist() == scored


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_likelihoods_match_the_model(
    small: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
    backend: str,
) -> None:
    pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
    client_type = import_module("lm_eval.models.openai_completions").LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", "-")
    small.tokenizer.save_pretrained(tmp_path)
    hub = LocalEngineClient(Engine(small, policy="full"))
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings())
    with listening(app) as url:
        client: Any = client_type(
            model="characters",
            base_url=f"{url}/v1/completions",
            tokenizer=str(tmp_path) if backend == "huggingface" else None,
            tokenizer_backend=backend,
            batch_size=batch_size,
            max_length=512,
        )
        requests = [SimpleNamespace(args=pair) for pair in PAIRS]
        found = client.loglikelihood(requests, disable_tqdm=True)
    encode = small.tokenizer.encode
    for (context, continuation), (number, is_greedy) in zip(PAIRS, found, strict=True):
        before = encode(context) if context else [client.prefix_token_id]
        after = encode(continuation)
        wanted, is_best = own_likelihood([*before, *after], len(after))
        assert number == pytest.approx(wanted, abs=1e-4)
        assert is_greedy is is_best
