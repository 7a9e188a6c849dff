"""Engine client over several replicas: routing, failover and cancellation."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from larder.models import LoadedModel
from larder.server import (
    ApiError,
    ChatMessage,
    ClusterEngineClient,
    Report,
    Request,
    ServerStats,
    SessionUnreadableError,
    TokenLogprob,
    route,
    routing_key,
    sum_stats,
)
from server.cluster.local_replicas import LocalReplicas
from server_core import Served, box_question, user


class AnswerListener:
    """Listener that collects the text of an answer and waits for its end."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.report: Report | None = None
        self.error: Exception | None = None
        self.over, self.started = threading.Event(), threading.Event()

    def on_text(self, text: str) -> None:
        self.pieces.append(text)
        self.started.set()

    def on_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        raise AssertionError(f"nobody wants {logprobs}")

    def on_done(self, report: Report) -> None:
        self.report = report
        self.over.set()

    def on_error(self, error: Exception) -> None:
        self.error = error
        self.over.set()

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Front:
    """A hub of two replicas."""

    def __init__(self, loaded: LoadedModel, folder: Path, patience_seconds: float) -> None:
        self.replicas = LocalReplicas(loaded, folder, 2)
        self.hub = ClusterEngineClient(self.replicas, patience_seconds)

    def submit(
        self, turns: list[ChatMessage], session: str | None = "x", tokens: int = 6
    ) -> AnswerListener:
        heard = AnswerListener()
        request = Request("a", tuple(turns), session, max_new_tokens=tokens)
        self.ticket = self.hub.submit(request, heard)
        return heard

    def ask(
        self, turns: list[ChatMessage], session: str | None = "x", tokens: int = 6
    ) -> AnswerListener:
        heard = self.submit(turns, session, tokens)
        assert heard.over.wait(20) and heard.error is None, heard.error
        return heard


@pytest.fixture
def front(small: LoadedModel, tmp_path: Path) -> Iterator[Front]:
    made = Front(small, tmp_path, 30.0)
    yield made
    made.hub.close()


@pytest.fixture
def impatient_front(small: LoadedModel, tmp_path: Path) -> Iterator[Front]:
    made = Front(small, tmp_path, 0.5)
    yield made
    made.hub.close()


def single_server_answer(loaded: LoadedModel, turns: list[ChatMessage]) -> str:
    """Last answer of one server that read the same conversation from its beginning."""
    served, text = Served(loaded), ""
    for number in range(1, len(turns) + 1, 2):
        text = served.ask(turns[:number], "x", max_new_tokens=6).text
    return text


@pytest.mark.extended
def test_session_is_routed_to_one_replica(front: Front) -> None:
    for session in ("x", "y", "z", None):
        front.replicas.went.clear()
        turns = box_question(1)
        for _ in range(3):
            last = front.ask(turns, session)
            turns = [*turns, ChatMessage("assistant", last.text), user("Why?")]
        assert len(set(front.replicas.went)) == 1
        assert last.report is not None and last.report.cached_tokens > 0
        own = [front.replicas.place(routing_key("a", last.report.session))]
        assert own == front.replicas.went[:1]
        assert front.hub.session("a", last.report.session).view.turns == 6
    assert [view.name for view in front.hub.sessions("a")][1:] == ["z", "y", "x"]
    assert front.hub.stats().done == {"stop": 0, "length": 12} or front.hub.stats().done["length"]


def test_routing_key_is_shared_by_a_session_and_its_forks() -> None:
    assert (
        routing_key("a", "x")
        == routing_key("a", "x~2")
        == routing_key("a", "x~13")
        != routing_key("b", "x")
    )
    assert routing_key("a", "x~y") != routing_key("a", "x")
    lot, sent = route(
        Request("a", (ChatMessage("system", "S"), user("Hi"), ChatMessage("assistant", "H")))
    )
    other, _ = route(Request("a", (ChatMessage("system", "S"), user("Hi"))))
    assert lot == other == sent.routing_tag == routing_key("a", f"s-{lot}-00ff")
    assert route(Request("b", (ChatMessage("system", "S"), user("Hi"))))[0] != lot
    assert route(Request("a", raw_prompt="Hi"))[0] != lot
    assert route(Request("a", (user("Hi"),), follows="x~2"))[0] == routing_key("a", "x")


@pytest.mark.extended
def test_replica_lost_between_turns_is_replaced(front: Front, small: LoadedModel) -> None:
    turns = [
        *box_question(1),
        ChatMessage("assistant", front.ask(box_question(1)).text),
        user("Why?"),
    ]
    front.replicas.lose(front.replicas.went[-1])
    last = front.ask(turns)
    assert last.text == single_server_answer(small, turns)
    assert last.report is not None and last.report.session == "x"
    assert front.hub.session("a", "x").view.turns == 4


@pytest.mark.extended
@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_replica_lost_during_an_answer_is_hidden_from_the_client(
    front: Front, small: LoadedModel, pieces: int
) -> None:
    front.replicas.breaks = pieces
    last = front.ask(box_question(1))
    assert last.text == single_server_answer(small, box_question(1))
    assert len(front.replicas.went) == 2 and len(front.replicas.left) == 1


@pytest.mark.extended
def test_stopping_replica_hands_its_answers_to_another(front: Front) -> None:
    heard = front.submit(box_question(1), tokens=60)
    assert heard.started.wait(20)
    front.replicas.lose(front.replicas.went[-1])
    assert heard.over.wait(20) and heard.report is not None and heard.report.reason != "cancelled"
    whole = front.ask(box_question(1), "y", tokens=60)
    assert heard.text == whole.text and len(front.replicas.left) == 1


def test_resumed_answer_with_different_text_is_an_error(front: Front) -> None:
    heard = front.submit(box_question(1))
    assert heard.over.wait(20)
    relay = front.ticket
    relay._sent_text = "?" + heard.text  # pyright: ignore
    with pytest.raises(ApiError, match="was lost") as refused:
        relay._send_new_text(heard.text)  # pyright: ignore
    assert (refused.value.status, refused.value.retry_after) == (503, 1.0)


@pytest.mark.extended
def test_request_without_replicas_is_a_503_after_the_wait(impatient_front: Front) -> None:
    for number in (0, 1):
        impatient_front.replicas.lose(number)
    with pytest.raises(ApiError) as refused:
        impatient_front.submit(box_question(1))
    assert (refused.value.status, refused.value.code) == (503, "stopping")
    assert not impatient_front.hub.is_healthy()


@pytest.mark.extended
def test_session_leased_elsewhere_is_waited_for(front: Front) -> None:
    turns = [
        *box_question(1),
        ChatMessage("assistant", front.ask(box_question(1)).text),
        user("Why?"),
    ]
    other = front.replicas.stores[1 - front.replicas.went[-1]]
    from larder.server import SessionLeases

    claims = SessionLeases(other.parts)
    claim = claims.take("a", "x")
    threading.Timer(0.3, claims.release, [claim]).start()
    assert front.ask(turns).report is not None


def test_replica_refusals_are_passed_through(front: Front) -> None:
    with pytest.raises(ApiError) as refused:
        front.submit(box_question(1), tokens=0)
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")
    assert refused.value.param == "max_tokens"
    for ask in (lambda: front.hub.session("a", "none"), lambda: front.hub.detokenize([10**6])):
        with pytest.raises(ApiError) as refused:
            ask()
    assert refused.value.param == "tokens"
    assert front.hub.detokenize(front.hub.tokenize("Hello.")) == "Hello."


def test_cancelled_request_stops_the_answer_on_its_replica(front: Front) -> None:
    heard = front.submit(box_question(1), tokens=2000)
    assert heard.started.wait(20)
    front.ticket.cancel()
    assert heard.over.wait(20)
    assert heard.report is not None and heard.report.reason == "cancelled"
    while front.hub.stats().running:
        pass
    assert front.ask(box_question(1)).report is not None


def test_close_cancels_running_answers(front: Front) -> None:
    heard = front.submit(box_question(1), tokens=2000)
    assert heard.started.wait(20)
    front.hub.close()
    assert heard.report is not None and heard.report.reason == "cancelled"
    front.hub.close()
    assert not front.hub.is_healthy()
    for ask in (lambda: front.submit(box_question(1)), front.hub.stats):
        with pytest.raises(ApiError, match="stopping"):
            ask()


def test_stats_of_replicas_are_summed() -> None:
    one = ServerStats(sessions={"idle": 1}, steps=2, done={"stop": 1})
    two = ServerStats(sessions={"idle": 2, "running": 1}, steps=3)
    total = sum_stats([one, two])
    assert total.sessions == {"idle": 3, "running": 1}
    assert (total.steps, total.done) == (5, {"stop": 1})
    assert sum_stats([]) == ServerStats()


def test_api_error_is_pickled_with_its_fields() -> None:
    error = SessionUnreadableError("talk")
    error.param, error.retry_after = "session", 2.0
    there = pickle.loads(pickle.dumps(error))
    assert isinstance(there, ApiError) and str(there) == str(error)
    assert vars(there) == vars(error)
