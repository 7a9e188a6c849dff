"""Restored sessions: equal generation, and refusal for other models, policies and texts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Mode, Plan
from larder.models import BatchSegment, Decoder
from larder.store import (
    CODECS,
    CacheRequirements,
    CacheSnapshot,
    ModelIdentity,
    Store,
    digest_of_weights,
)
from larder.store.model_identity import model_identity
from store.caches import IDS, POLICY, SECRET, TALK, WHO, asking, load, save, store_at
from tiny_models import tiny

pytestmark = pytest.mark.usefixtures("small_chunks")
TEXT = tuple((7 * n) % 101 + 3 for n in range(22))
TOLERANCE = {"raw": 0.0, "int8": 0.05} | dict.fromkeys(  # of logits within +-4
    ("int4", "entropy", "predictive", "predictive12", "predictive16", "kvtc", "kvtc16"), 1.0
)
TOLERANCE |= {"q4": 1.0, "cachegen": 1.0, "entropy_fine": 0.3, "entropy_coarse": 2.0}


def a_decoder(seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(tiny("llama", seed=seed, dtype=dtype))


def identity(decoder: Decoder) -> ModelIdentity:
    weights = digest_of_weights(decoder.module.named_parameters())
    return model_identity(decoder.spec, decoder.module.config.to_dict(), weights, "tokenizer")


def read(decoder: Decoder, ids: Sequence[int], form: str = "dense") -> SequenceCache:
    cache = SequenceCache(decoder.spec, form)
    decoder.read([BatchSegment(cache, tuple(ids))], Mode.APPEND)
    return cache


def halved(decoder: Decoder, ids: Sequence[int]) -> SequenceCache:
    cache = read(decoder, ids, "ragged")
    for layer in decoder.spec.layers:
        held = cache.lengths()[layer.index]
        cache.apply(layer.index, Plan.from_mask(torch.arange(sum(held)) % 2 == 0, held))
    return cache


def next_logits(decoder: Decoder, cache: SequenceCache, token: int) -> Tensor:
    return decoder.forward_logits([BatchSegment(cache, (token,))], Mode.APPEND, [0])[0]


def greedy(decoder: Decoder, cache: SequenceCache, token: int, count: int = 6) -> list[int]:
    answers = []
    for _ in range(count):
        token = int(next_logits(decoder, cache, token).argmax())
        answers.append(token)
    return answers


def store_of(folder: Path) -> Store:
    return store_at(folder)


@pytest.mark.failure(number=15)
@pytest.mark.parametrize("codec", CODECS.names())
def test_restored_next_token_logits_are_within_tolerance(tmp_path: Path, codec: str) -> None:
    decoder, store = a_decoder(), store_of(tmp_path)
    cache = halved(decoder, TEXT)
    snapshot = CacheSnapshot(cache, identity(decoder), POLICY, codec)
    store.sessions.save(WHO, TALK, TEXT, snapshot)
    loaded = store.sessions.load(
        WHO, TALK, CacheRequirements(identity(decoder), POLICY, decoder.spec)
    )
    assert loaded is not None and loaded.cache is not None
    before, after = (next_logits(decoder, each, 5) for each in (cache, loaded.cache))
    assert float((before - after).abs().max()) <= TOLERANCE[codec]


@pytest.mark.failure(number=8)
def test_restored_session_generates_the_same_tokens(tmp_path: Path) -> None:
    decoder = a_decoder()
    cache = read(decoder, TEXT)
    store = store_of(tmp_path)
    store.sessions.save(WHO, TALK, TEXT, CacheSnapshot(cache.fork(), identity(decoder), POLICY))
    answers = greedy(decoder, cache, 5)
    store.close()
    again = a_decoder()
    for home in ("home", "another machine"):
        store = store_at(tmp_path, home=home)
        loaded = store.sessions.load(
            WHO, TALK, CacheRequirements(identity(again), POLICY, again.spec)
        )
        assert loaded is not None and loaded.cache is not None
        assert greedy(again, loaded.cache, 5) == answers
        prefix = store.prefixes.match_prefix(WHO, (*TEXT, 5), identity(again), again.spec)
        assert prefix is not None and prefix.next_position == 20
        rest = decoder.forward_logits([BatchSegment(prefix, (*TEXT[20:], 5))], Mode.APPEND, [2])[0]
        assert int(rest.argmax()) == answers[0]


@pytest.mark.failure(number=12)
def test_model_with_other_weights_gets_no_cache(tmp_path: Path) -> None:
    one, other = a_decoder(0), a_decoder(1)
    store = store_of(tmp_path)
    store.sessions.save(WHO, TALK, TEXT, CacheSnapshot(read(one, TEXT), identity(one), POLICY))
    loaded = store.sessions.load(WHO, TALK, CacheRequirements(identity(other), POLICY, other.spec))
    assert loaded is not None and loaded.cache is None and loaded.reason == "identity"
    assert loaded.ids == TEXT
    assert store.prefixes.match_prefix(WHO, TEXT, identity(other), other.spec) is None
    assert store.prefixes.match_prefix(WHO, TEXT, identity(one), one.spec) is not None


@pytest.mark.failure(number=11)
@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "x"},
        {"tokenizer": "x"},
        {"chat_template": "x"},
        {"adapters": ("x",)},
        {"attention": "x"},
        {"compute_dtype": "bfloat16"},
        {"torch": "3.0"},
        {"config": {"rope_theta": 5.0}},
        {"config": {"_commit_hash": "x"}},
    ],
    ids=str,
)
def test_session_is_refused_for_another_identity(tmp_path: Path, changes: dict[str, Any]) -> None:
    store = store_of(tmp_path)
    save(store)
    loaded = load(store, **changes)
    assert loaded.cache is None and loaded.reason == "identity" and loaded.ids == IDS
    assert store.parts.refusals.counts() == {"identity": 1}
    assert load(store).cache is not None


@pytest.mark.failure(number=11)
def test_session_is_refused_for_another_policy_or_text(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    save(store)
    other = store.sessions.load(WHO, TALK, asking("snapkv"))
    assert other is not None and other.reason == "policy" and other.ids == IDS
    for ids, reason in (
        ((*IDS, 1), ""),
        (IDS, ""),
        (IDS[:-1], "tokens"),
        ((*IDS[:9], 0, *IDS[10:]), "tokens"),
        ((), "tokens"),
    ):
        found = store.sessions.load(WHO, TALK, asking(), ids)
        assert found is not None and found.reason == reason


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from larder.store.prefix import chunk_index as chunks
chunks.CHUNK_TOKENS = 4
from store.caches import IDS, WHO, asking, load, SPEC, store_at
store = store_at(Path({folder!r}))
found = store.prefixes.match_prefix(WHO, (*IDS, 1), asking().identity, SPEC)
print(load(store).reason or "exact", found.next_position)
"""


@pytest.mark.failure(number=9)
@pytest.mark.extended
def test_keys_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    save(store_of(tmp_path))
    tests = Path(__file__).parents[1]
    path = [str(tests), str(tests.parent), str(tests.parent / "src")]
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    code = PROGRAM.format(path=path, folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stdout == "exact 20\n", done.stderr


def test_store_of_another_secret_finds_nothing(tmp_path: Path) -> None:
    save(store_of(tmp_path))
    stranger = store_at(tmp_path, home="stranger", secret=b"t" * 32)
    assert stranger.sessions.load(WHO, TALK, asking()) is None
    assert stranger.sessions.heads() == []
    assert SECRET != b"t" * 32
