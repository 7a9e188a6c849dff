"""Cache of answers by the meaning of their questions, for requests that ask for it.

An answer is given again to a question of the same tenant, category and conversation before it whose
embedding is as similar as the category demands. Three systems share the entries:

- Wang et al., "Category-Aware Semantic Caching for Heterogeneous LLM Workloads" (2025),
  arXiv:2510.26835: threshold, time to live and quota of each category. What differs: the client
  names the category, and categories are searched exhaustively.
- Zhu et al., "On Optimal Caching and Model Multiplexing for Large Model Inference" (2023),
  arXiv:2306.02003 (LEC): a full category keeps the entries of largest weight, the share of
  questions that an entry answers times the cost of answering; a newcomer takes the place of the
  lightest only if it weighs more. Which model answers is not chosen.
- Yu et al., "IC-Cache: Efficient Large Language Model Serving via In-context Caching" (2025),
  arXiv:2501.12689: similar questions with their answers are prepended to a new one as examples.
  With a key of the client's own (keywords of a task, say) such entries are the plan templates of
  Zhang et al., "Agentic Plan Caching: Test-Time Memory for Fast and Cost-Efficient LLM Agents"
  (2025), arXiv:2506.14852. What differs: nothing is routed to another model, and entries are not
  rewritten.

The conversation before the question, the model, the length and the stop strings must be equal.
Entries are in memory alone, and count on no budget: a quota bounds their number, and long questions
and answers are not kept. Questions that the embedder does not read whole are answered again. An
answer leaves with the session in which it was computed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from larder.core.errors import UsageError
from larder.server.api_errors import invalid_request
from larder.server.request import (
    CachedResponse,
    CachedUse,
    ChatMessage,
    Listener,
    Report,
    Request,
    TokenLogprob,
)
from larder.session.prefill import ModelRuntime

Vector = NDArray[np.float32]
MAX_TENANTS = 1024
NUM_EXAMPLES = 2  # in front of a question
MAX_CHARACTERS = 2**16  # of a question and its answer that are kept
FIELD = "response_cache"  # of requests
NO_CATEGORIES: Mapping[str, ResponseCategory] = MappingProxyType({})
TYPES = {"quota": int, "embedder": str}  # of rules, others are numbers


@dataclass(frozen=True)
class ResponseCategory:
    """Rules of one category of questions.

    Args:
        threshold: least cosine of questions that get the same answer, in (0, 1].
        ttl: seconds that an answer is given again; more than 0.
        quota: most answers of a tenant.
        example_threshold: least cosine of questions that serve as examples.
        embedder: name of the embedder of questions, as `load_embedder` takes it.
    """

    threshold: float = 0.95
    ttl: float = 3600.0
    quota: int = 1000
    example_threshold: float = 0.5
    embedder: str = "minilm"

    def __post_init__(self) -> None:
        if not (0 < self.threshold <= 1 and self.ttl > 0 and self.quota > 0):
            raise UsageError(
                f"A category needs a threshold in (0, 1], a time to live and a quota above 0, got "
                f"{self.threshold}, {self.ttl} and {self.quota}."
            )

    @staticmethod
    def parse(text: str) -> tuple[str, ResponseCategory]:
        """Name and rules of a category, as `NAME:threshold=T,ttl=SECONDS,quota=N`.

        Raises:
            UsageError: it is spelled otherwise.
        """
        name, _, rules = text.partition(":")
        if not name:
            raise UsageError(f"--response-category {text!r} has no name: write NAME:RULES.")
        given = [rule.partition("=")[::2] for rule in rules.split(",") if rule]
        try:
            values = {key: TYPES.get(key, float)(value) for key, value in given}
            return name, ResponseCategory(**values)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"--response-category {text!r} is not NAME:threshold=T,ttl=SECONDS,quota=N: "
                "write it so, and leave out what is to be the default."
            ) from error


@dataclass
class ResponseEntry:
    """Question that was asked, with its answer if that is kept.

    Args:
        context: digest of all that the answer depends on beside the question.
        uses: times that it was asked.
        cost: of answering it, in seconds.
        reason: why the answer ended.
        session: name of the session in which it was computed.
    """

    context: str
    vector: Vector
    question: str
    answer: str = ""
    uses: int = 1
    cost: float = 0.0
    created: float = 0.0
    reason: str = "stop"
    session: str = ""

    @property
    def weight(self) -> float:
        """Cost that the entry saves, up to a factor that all entries share."""
        return self.uses * self.cost


class TenantCategory:
    """Questions of one tenant and category: those whose answers are kept, and the latest others."""

    def __init__(self, rules: ResponseCategory) -> None:
        self.rules, self.used = rules, 0.0  # when it was used last
        self.kept = list[ResponseEntry]()
        self._asked = OrderedDict[int, ResponseEntry]()  # without answers, by identity

    def find(self, context: str, vector: Vector, now: float) -> ResponseEntry | None:
        """Entry that answers a question, its count raised by one; None if there is none."""
        self.kept = [each for each in self.kept if now - each.created < self.rules.ttl]
        return self._ask(self.kept, context, vector)

    def examples(self, vector: Vector, now: float) -> list[ResponseEntry]:
        """Entries with the most similar questions, the most similar last."""
        alive = [each for each in self.kept if now - each.created < self.rules.ttl]
        near = [(float(each.vector @ vector), each) for each in alive]
        near = [pair for pair in near if pair[0] >= self.rules.example_threshold]
        near.sort(key=lambda pair: pair[0])
        return [each for _, each in near[-NUM_EXAMPLES:]]

    def note(self, context: str, vector: Vector, question: str) -> ResponseEntry:
        """Entry of a question that is about to be answered, its count raised by one."""
        repeated = [each for each in self.kept if each.question == question]
        if (known := self._ask(repeated, context, vector)) is not None:
            return known
        entry = self._ask(list(self._asked.values()), context, vector)
        entry = entry or ResponseEntry(context, vector, question)
        self._asked[id(entry)] = entry
        self._asked.move_to_end(id(entry))
        if len(self._asked) > self.rules.quota:
            self._asked.popitem(last=False)
        return entry

    def keep(self, entry: ResponseEntry, answer: str, cost: float, now: float) -> bool:
        """Keep the answer to a question; False if all that is kept weighs as much or more, or it is
        too long."""
        if len(answer) + len(entry.question) > MAX_CHARACTERS:
            return False
        entry.answer, entry.cost, entry.created = answer, cost, now
        if any(each is entry for each in self.kept):
            return True
        if len(self.kept) >= self.rules.quota:
            lightest = min(self.kept, key=lambda each: each.weight)
            if lightest.weight >= entry.weight:
                return False
            self.kept = [each for each in self.kept if each is not lightest]
        self._asked.pop(id(entry), None)
        self.kept.append(entry)
        return True

    def forget(self, sessions: Collection[str]) -> None:
        """Remove questions and answers of some sessions."""
        self.kept = [each for each in self.kept if each.session not in sessions]
        for key in [key for key, each in self._asked.items() if each.session in sessions]:
            del self._asked[key]

    def _ask(
        self, entries: Sequence[ResponseEntry], context: str, vector: Vector
    ) -> ResponseEntry | None:
        candidates = [each for each in entries if each.context == context]
        best = max(candidates, key=lambda each: float(each.vector @ vector), default=None)
        if best is None or float(best.vector @ vector) < self.rules.threshold:
            return None
        best.uses += 1
        return best


class ResponseCache:
    """Answers of all tenants by category. Safe from threads.

    Args:
        categories: rules by name.
        runtime: has the embedders.
        clock: seconds since 1970.

    Raises:
        UnknownName, DependencyError, ModelError: an embedder cannot be loaded.
    """

    def __init__(
        self,
        categories: Mapping[str, ResponseCategory],
        runtime: ModelRuntime,
        clock: Callable[[], float],
    ) -> None:
        self.categories, self._runtime, self._clock = categories, runtime, clock
        for rules in categories.values():  # a missing embedder is reported at the start
            runtime.embedder(rules.embedder)
        self._tenants = OrderedDict[tuple[str, str], TenantCategory]()
        self._lock = threading.Lock()
        # As in `EmbedderQueue`: other threads would keep buffers of their own.
        self._embedding = ThreadPoolExecutor(1, "larder questions")
        self.hits = self.misses = 0

    def take(self, request: Request, listener: Listener) -> tuple[Request, Listener] | None:
        """Answer a request from the cache; if that has no answer, the request with its examples and
        a listener that keeps the answer."""
        wanted = self._checked(request)
        if request.sampling.temperature > 0 and not wanted.is_sampled:
            return request, listener
        question = request.turns[-1].text
        vector = self._vector(wanted, question)
        if vector is None:
            return request, listener
        now, context = self._clock(), _context(request, wanted)
        with self._lock:
            cached = self._of(request.tenant, wanted.category, now)
            found = None
            if wanted.use is CachedUse.ANSWER:
                found = cached.find(context, vector, now)
            self.hits += found is not None
            self.misses += found is None
            if found is None:
                entry = cached.note(context, vector, question) if wanted.is_kept else None
                examples = cached.examples(vector, now) if wanted.use is CachedUse.EXAMPLES else []
        if found is not None:
            listener.on_text(found.answer)
            listener.on_done(cached_report(self._clock() - now, found.reason))
            return None

        request = _with_examples(request, examples)
        if entry is None:
            return request, listener

        def keep(answer: str, report: Report) -> None:
            with self._lock:
                seconds = report.seconds - report.wait_seconds
                # The question that was answered, not the one that it resembled.
                entry.question, entry.vector, entry.reason = question, vector, report.reason
                entry.session = report.session
                cached.used = self._clock()
                cached.keep(entry, answer, max(0.0, seconds), cached.used)

        return request, AnswerRecorder(listener, keep)

    def forget(self, tenant: str, sessions: Collection[str]) -> None:
        """Remove questions and answers of a tenant's deleted sessions."""
        with self._lock:
            for (owner, _), each in self._tenants.items():
                if owner == tenant:
                    each.forget(sessions)

    def _checked(self, request: Request) -> CachedResponse:
        """Cache mode of a request.

        Raises:
            ApiError: 400: the category is unknown, or the request cannot be answered by meaning.
        """
        wanted = request.cached_response
        assert wanted is not None
        if wanted.category not in self.categories:
            known = ", ".join(sorted(self.categories))
            way = f"take one of {known}" if known else "start the server with --response-category"
            raise invalid_request(
                f"There is no category {wanted.category[:99]!r} of the response cache: {way}, or "
                "leave response_cache out.",
                FIELD,
            )
        is_plain = request.is_nameless and not (request.images or request.has_contexts)
        is_single = not (request.choice or request.choice_group)
        if not is_plain or not is_single or request.constraint or request.logprobs is not None:
            raise invalid_request(
                "response_cache is for whole conversations of text without a session, contexts, "
                "constraint, log-probabilities or n: leave these out, or response_cache.",
                FIELD,
            )
        return wanted

    def _vector(self, wanted: CachedResponse, question: str) -> Vector | None:
        """Embedding of what is compared; None if it or the question is too long."""
        text = wanted.key or question
        if max(len(text), len(question)) > MAX_CHARACTERS:
            return None
        return self._embedding.submit(self._embedded, wanted.category, text).result()

    def _embedded(self, category: str, text: str) -> Vector | None:
        embedder = self._runtime.embedder(self.categories[category].embedder)
        return embedder.embed_questions([text])[0] if embedder.reads_whole(text) else None

    def _of(self, tenant: str, category: str, now: float) -> TenantCategory:
        """Questions of a tenant and category; those of others are forgotten once their answers
        are over."""
        for name, each in list(self._tenants.items()):
            if now - each.used >= each.rules.ttl:
                del self._tenants[name]
        cached = self._tenants.get((tenant, category))
        if cached is None:
            cached = self._tenants[tenant, category] = TenantCategory(self.categories[category])
        cached.used = now
        self._tenants.move_to_end((tenant, category))
        if len(self._tenants) > MAX_TENANTS * max(1, len(self.categories)):
            self._tenants.popitem(last=False)
        return cached


@dataclass
class AnswerRecorder(Listener):
    """Listener that hands an answer on, and its text to `keep` once it is complete."""

    listener: Listener
    keep: Callable[[str, Report], None]
    texts: list[str] = field(default_factory=list)

    def on_text(self, text: str) -> None:
        self.texts.append(text)
        self.listener.on_text(text)

    def on_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        self.listener.on_logprobs(logprobs)

    def on_done(self, report: Report) -> None:
        if report.reason != "cancelled":
            self.keep("".join(self.texts), report)
        self.listener.on_done(report)

    def on_error(self, error: Exception) -> None:
        self.listener.on_error(error)


def cached_report(seconds: float, reason: str) -> Report:
    """Report of an answer that no model has computed now."""
    return Report(
        session="",
        prompt_tokens=0,
        cached_tokens=0,
        restored_tokens=0,
        recomputed_tokens=0,
        new_tokens=0,
        evicted_tokens=0,
        merged_tokens=0,
        lossless=False,
        tier="response",
        reason=reason,
        wait_seconds=0.0,
        first_seconds=seconds,
        seconds=seconds,
    )


def _context(request: Request, wanted: CachedResponse) -> str:
    """Digest of what an answer depends on beside its question."""
    before = [(turn.role, turn.text) for turn in request.turns[:-1]]
    rest = request.model, request.sampling, request.max_new_tokens, request.stop, request.exact
    form = request.turns[-1].role, wanted.use, request.answer_form
    return sha256(repr((before, rest, form)).encode("utf-8", "surrogatepass")).hexdigest()


def _with_examples(request: Request, examples: Sequence[ResponseEntry]) -> Request:
    """Request with examples in front of its last message."""
    shown = [
        message
        for each in examples
        for message in (ChatMessage("user", each.question), ChatMessage("assistant", each.answer))
    ]
    return replace(request, turns=(*request.turns[:-1], *shown, request.turns[-1]))
