"""Edge cases: lowered budgets, failing samplers, repeated requests."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
from torch import Generator, Tensor

from larder.engine import SamplingParams
from larder.models import LoadedModel
from larder.server import (
    ApiError,
    CompletedTurn,
    SessionPersistence,
    SessionState,
    StoreSessionPersistence,
    session_superseded,
)
from larder.store import Store, Tier
from server_core import Served, answered, box_question, user


@pytest.mark.failure(number=24)
def test_budget_lowered_during_an_answer_holds_after_it(small: LoadedModel) -> None:
    served = Served(small, device=20_000_000, host=20_000_000)
    first = served.ask(box_question(1), "x")
    ends, ticket = served.submit(answered(box_question(1), first, "Why?"), "x")
    goes_on, _ = served.submit(box_question(2), "y", max_new_tokens=8)
    while not goes_on.text:
        served.step()
    served.core.tiers.lower(Tier.DEVICE, 1000)
    ticket.cancel()
    while served.core.step():
        pass
    assert ends.report is not None and ends.error is None
    assert goes_on.result.new_tokens == 8
    served.check()


class FailingSampling(SamplingParams):
    """Sampling that fails from the fourth token on."""

    left = [3]

    def sample(self, logits: Tensor, random_generator: Generator) -> int:
        if not self.left[0]:
            raise RuntimeError("probability tensor contains nan")
        self.left[0] -= 1
        return super().sample(logits, random_generator)


def test_failing_sampler_does_not_change_other_answers(small: LoadedModel) -> None:
    served, alone = Served(small), Served(small)
    good = [served.submit(box_question(number), max_new_tokens=9)[0] for number in range(2)]
    bad, _ = served.submit(box_question(2), max_new_tokens=9, sampling=FailingSampling())
    served.run()
    assert isinstance(bad.error, RuntimeError)
    for number, client in enumerate(good):
        assert client.text == alone.ask(box_question(number), max_new_tokens=9).text


def test_eviction_spares_the_session_to_be_loaded(small: LoadedModel) -> None:
    alone = Served(small)
    alone.ask(box_question(1), "x")
    need, held = alone.core.reservations.peak, alone.core.sessions.find("a", "x").residency.nbytes
    served = Served(small, device=int(1.2 * need), host=int(1.5 * held) + 20_000)
    for number, name in enumerate("xy"):
        served.ask(box_question(number), name)
    parked = served.core.sessions.find("a", "x")
    assert parked.residency.tier == "host"
    assert (
        served.core.admin.prefetch(served.core.idle("a", "x")).result(0).residency.tier == "device"
    )
    served.check()


@pytest.mark.parametrize("name", ["prefetch", "compact"])
def test_move_to_a_device_full_of_running_answers_is_a_503(small: LoadedModel, name: str) -> None:
    alone = Served(small)
    alone.ask(box_question(1), "x", max_new_tokens=20)
    served = Served(small, device=int(1.2 * alone.core.reservations.peak))
    served.ask(box_question(1), "x", max_new_tokens=20)
    move = getattr(served.core.admin, name)
    client, _ = served.submit(box_question(2), "y", max_new_tokens=20)
    for _ in range(4):
        served.step()
    assert client.report is None and served.core.idle("a", "x").residency.tier == "host"
    with pytest.raises(ApiError) as caught:
        move(served.core.idle("a", "x"))
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert caught.value.retry_after and "'x'" in str(caught.value)
    served.run()
    assert move(served.core.idle("a", "x")).result(0).residency.tier == "device"
    served.check()


@pytest.mark.failure(number=18)
def test_lossy_answer_is_not_repeated_for_an_exact_request(small: LoadedModel) -> None:
    served, full = Served(small, "limited"), Served(small)
    turns = box_question(1, 5)
    for name in ("x", None):
        assert not served.ask(turns, name).result.lossless
        exact = served.ask(turns, name, exact=True)
        assert exact.result.lossless and exact.text == full.ask(turns).text
        steps = served.core.scheduler.steps
        assert served.ask(turns, name, exact=True).text == exact.text
        assert served.core.scheduler.steps == steps


@pytest.mark.failure(number=18)
def test_repeated_answer_reports_the_same_token_counts(small: LoadedModel) -> None:
    served = Served(small)
    first, again = served.ask(box_question(1), "x").result, served.ask(box_question(1), "x").result
    assert (again.new_tokens, again.prompt_tokens) == (first.new_tokens, first.prompt_tokens)


def test_fork_continues_under_its_reported_name(small: LoadedModel) -> None:
    served = Served(small)
    served.ask(box_question(1), "x")
    turns = box_question(2)
    fork = served.ask(turns, "x")
    for more in ("Why?", "Sure?"):
        turns, name = answered(turns, fork, more), fork.result.session
        fork = served.ask(turns, name)
        assert fork.result.session == name != "x"
    assert len(served.core.sessions) == 2


class AlwaysSuperseded(SessionPersistence):
    """Persistence in which another server has always written first."""

    def commit(self, session: SessionState, turn: CompletedTurn) -> Future[None] | None:
        session.durability.is_superseded = True
        raise session_superseded(session.name)


def test_uncommitted_turn_leaves_no_session(small: LoadedModel) -> None:
    served = Served(small, persistence=AlwaysSuperseded())
    client, _ = served.submit([user("Hello.")], "x")
    served.run()
    sessions = served.core.sessions
    assert client.error is not None
    assert not (list(sessions) or sessions._firsts or sessions._prefixes)  # pyright: ignore


@pytest.mark.failure(number=22)
def test_turn_without_room_for_its_transcript_is_not_kept(small: LoadedModel) -> None:
    free = Served(small)
    free.ask(box_question(1), "x")
    log_bytes = free.core.sessions.find("a", "x").transcript.nbytes
    served = Served(small, host=2 * log_bytes + 500)
    first = served.ask(box_question(1), "x")
    more, _ = served.submit(answered(box_question(1), first, "Why? " * 20), "x")
    served.run()
    assert isinstance(more.error, ApiError) and more.error.code == "kv_budget_exceeded"
    assert "--host-budget" in str(more.error)
    assert len(served.core.sessions.find("a", "x").turns) == 1
    logs = sum(each.transcript.nbytes for each in served.core.sessions)
    assert logs <= served.core.ledger.used(Tier.HOST)
    assert served.ask(
        answered(box_question(1), first, "Why?"), "x", max_new_tokens=1
    ).result.new_tokens


@pytest.mark.failure(number=22)
def test_transcripts_of_one_tenant_leave_room_for_others(small: LoadedModel) -> None:
    served = Served(small, host=60_000)
    with pytest.raises(ApiError, match="remove") as caught:
        for number in range(100):
            served.core.open("a", f"n{number}", [user("Hello.")])
    assert caught.value.code == "kv_budget_exceeded"
    held = len(served.core.sessions)
    assert served.ask(box_question(1), "x", tenant="b").result.new_tokens
    assert served.core.sessions.has("b", "x") and len(served.core.sessions) == held + 1
    for number in range(5):
        served.core.remove("a", f"n{number}")
    assert served.core.open("a", "again", [user("Hello.")]).name == "again"


def pinned(served: Served, name: str) -> None:
    """A session of one turn without a cache, which is pinned in the store, too."""
    served.ask(box_question(1, 1), name)
    served.core.find("a", name).usage.is_pinned = True
    written = served.core._persistence.pin(served.core.find("a", name))
    assert written is not None and written.result(30) is None
    served.core.admin.release(served.core.idle("a", name))


@pytest.mark.failure(number=22)
@pytest.mark.extended
@pytest.mark.parametrize("forks", [0, 1])
def test_transcripts_of_pinned_sessions_leave_room_for_others(
    small: LoadedModel, tmp_path: Path, forks: int
) -> None:
    store = Store(str(tmp_path / "blobs"), tmp_path / "home")
    served = Served(
        small, host=20_000, persistence=StoreSessionPersistence(store, small.decoder.spec)
    )
    for number in range(20):
        pinned(served, f"n{number}")
        for _ in range(forks):
            served.core.fork("a", f"n{number}", f"n{number}~2")
            served.run()
    first, sessions = box_question(2), served.core.sessions
    for tenant in "ab":
        assert served.ask(first, "x", tenant=tenant).result.new_tokens
    assert sum(sessions.has("a", f"n{number}") for number in range(20)) < 20
    assert served.core.find("a", "n0").usage.is_pinned


@pytest.mark.extended
def test_transcripts_of_pinned_sessions_are_evicted_last(
    small: LoadedModel, tmp_path: Path
) -> None:
    store = Store(str(tmp_path / "blobs"), tmp_path / "home")
    served = Served(
        small, host=20_000, persistence=StoreSessionPersistence(store, small.decoder.spec)
    )
    pinned(served, "first")
    for number in range(20):
        served.ask(box_question(1, 1), f"n{number}")
        served.core.tiers.drop(served.core.find("a", f"n{number}"))
    assert served.core.sessions.has("a", "first") and not served.core.sessions.has("a", "n0")


class ScriptedSampling(SamplingParams):
    """Sampling that returns the characters of a script."""

    script = list[str]()

    def sample(self, logits: Tensor, random_generator: Generator) -> int:
        del logits, random_generator
        return ord(self.script.pop(0))


@pytest.mark.failure(number=18)
@pytest.mark.parametrize("stop", [(), ("no", "s ")])
def test_repeated_answer_keeps_surrounding_white_space(
    small: LoadedModel, stop: tuple[str, ...]
) -> None:
    served = Served(small)
    ScriptedSampling.script[:] = "\n Yes \n"
    told_ = {"session": "x", "sampling": ScriptedSampling(), "max_new_tokens": 7, "stop": stop}
    first = served.ask(box_question(1), **told_)
    assert first.text == ("\n Ye" if stop else "\n Yes \n")
    assert served.ask(box_question(1), **told_).text == first.text
