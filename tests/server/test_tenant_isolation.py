"""Isolation of tenants: cached tokens, answers and observable work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from larder.models import LoadedModel
from larder.server import ApiError, ChatMessage, SessionState, StoreSessionPersistence
from larder.store import Manifest, Store
from server_core import Client, Served, answered, user

TENANTS = "abcdefgh"
SECRETS = {tenant: str(ord(tenant) * 7919 % 9000 + 1000) for tenant in TENANTS}
SYSTEM = ChatMessage("system", "You count coins in boxes, and you say so at once. " * 2)


def kept_in(folder: Path, loaded: LoadedModel) -> StoreSessionPersistence:
    return StoreSessionPersistence(
        Store(str(folder / "blobs"), folder / "home"), loaded.decoder.spec
    )


def text(number: int) -> list[ChatMessage]:
    return [SYSTEM, user(f"How many are in box {number}?")]


@pytest.mark.failure(number=27)
@pytest.mark.parametrize("tier", ["device", "host", "restart"])
def test_prefix_hits_are_within_one_tenant(small: LoadedModel, tmp_path: Path, tier: str) -> None:
    served = Served(small, persistence=kept_in(tmp_path, small))
    first = served.ask(text(1), "x")
    if tier == "host":
        assert served.core.tiers.offload(served.core.find("a", "x"))
    if tier == "restart":
        served = Served(small, persistence=kept_in(tmp_path, small))
    more = answered(text(1), first, "Why?")
    stranger = served.ask(more, "x", tenant="b")
    assert stranger.result.cached_tokens == stranger.result.restored_tokens == 0
    assert stranger.result.recomputed_tokens == 0  # nothing is known of what was said before
    own = served.ask(more, "x")
    assert own.text == stranger.text
    known = own.result.recomputed_tokens if tier == "restart" else own.result.cached_tokens
    assert known > 80 and own.result.session == "x"


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts of prefix comparisons and store lookups inside the context."""
    counts: Counter[str] = Counter()
    usable, reading = SessionState.usable_prefix_len, Manifest.reading

    def seen(session: SessionState, wanted: tuple[int, ...]) -> int:
        counts["compared"] += 1
        return usable(session, wanted)

    def looked(manifest: Manifest) -> object:
        counts["looked up"] += 1
        return reading(manifest)

    with monkeypatch.context() as patch:
        patch.setattr(SessionState, "usable_prefix_len", seen)
        patch.setattr(Manifest, "reading", looked)
        yield counts


@pytest.mark.failure(number=27)
def test_text_of_another_tenant_costs_as_much_as_an_unknown_one(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(small, persistence=kept_in(tmp_path, small))
    served.ask(text(1), "x")
    unknown = [ChatMessage("system", SYSTEM.text.replace("coins", "beans")), text(2)[1]]
    work: dict[str, tuple[object, ...]] = {}
    for name, turns, tenant in (
        ("another's", text(1), "b"),
        ("unknown", unknown, "c"),
        ("own", text(2), "a"),
    ):
        blocks, steps = served.core.scheduler.blocks, served.core.scheduler.steps
        with counted(monkeypatch) as counts:
            client = served.ask(turns, "y", tenant=tenant)
        passes = served.core.scheduler.blocks - blocks, served.core.scheduler.steps - steps
        work[name] = (*passes, client.result.cached_tokens, sorted(counts.items()))
    assert work["another's"] == work["unknown"] != work["own"]


@pytest.mark.failure(number=29)
def test_session_of_another_tenant_costs_as_much_as_a_missing_one(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(small, persistence=kept_in(tmp_path, small))
    served.ask(text(1), "x")
    result: list[tuple[object, ...]] = []
    for name in ("x", "z"):
        with counted(monkeypatch) as counts, pytest.raises(ApiError) as refused:
            served.core.find("b", name)
        message = str(refused.value).replace(repr(name), "")
        result.append((refused.value.status, refused.value.code, message, sorted(counts.items())))
    assert result[0] == result[1] and result[0][0] == 404


def canary(loaded: LoadedModel, folder: Path) -> tuple[int, dict[str, str]]:
    """Tenants with a secret each, all at once on a budget for two, and a restart between turns.

    Returns:
        how many caches had to leave, and the last answers.
    """
    texts = {t: [user(f"The code of my box is {SECRETS[t]}.")] for t in TENANTS}
    alone, left, own = Served(loaded), 0, dict[str, Client]()
    for more in ("What is the code of my box?", "Sure?"):
        own = {t: alone.ask(turns, "talk", tenant=t) for t, turns in texts.items()}
        need = 3 * alone.core.reservations.bytes_of(alone.core.find("a", "talk").key)
        crowd = Served(loaded, device=need, host=need, persistence=kept_in(folder, loaded))
        clients = {t: crowd.submit(turns, "talk", tenant=t)[0] for t, turns in texts.items()}
        crowd.run()
        for tenant, client in clients.items():
            assert (client.result.session, client.text) == ("talk", own[tenant].text)
            others = [secret for whose, secret in SECRETS.items() if whose != tenant]
            assert not any(secret in client.text for secret in others)
        left += crowd.core.tiers.parked["host"] + crowd.core.tiers.dropped
        texts = {t: answered(texts[t], own[t], more) for t in TENANTS}
    return left, {t: client.text for t, client in own.items()}


@pytest.mark.failure(number=28)
@pytest.mark.extended
def test_answers_never_contain_secrets_of_other_tenants(small: LoadedModel, tmp_path: Path) -> None:
    assert canary(small, tmp_path)[0] > 0


@pytest.mark.failure(number=28)
@pytest.mark.slow
def test_reciting_model_repeats_only_its_own_secret(
    seed_model: LoadedModel, tmp_path: Path
) -> None:
    left, message = canary(seed_model, tmp_path)
    assert left > 0 and all(SECRETS[tenant] in message[tenant] for tenant in TENANTS)
