"""Engine core without threads, clients that record answers, and small texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from threading import Event

from architectures.families import families
from larder import Engine, Policy
from larder.models import LoadedModel, wrap_model
from larder.server import (
    ChatMessage,
    DiskTier,
    EngineOptions,
    Report,
    Request,
    SchedulingPolicy,
    SessionPersistence,
    SessionState,
    Ticket,
    TokenLogprob,
)
from larder.server.persistence import session_file
from larder.session import Embedder
from larder.store import ByteBudgets, Tier
from larder_bench.profiling.loading_core import LoadingCore
from tiny_models import tiny

LIMITED = "blockwise() > protect(sinks=4, recent=8) > keydiff() > pooled()"
STEPWISE = "blockwise() > protect(sinks=0, recent=0.5) > column_mass() > uniform() > every_step()"
POLICIES = {"full": "full", "limited": LIMITED, "stepwise": STEPWISE}
BUDGET, BLOCK = 32, 16


def characters(architecture: str = "qwen3", layers: int = 2) -> LoadedModel:
    """Random model whose tokens are characters, without a chat template."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    names = {chr(number): number for number in range(3, 128)}
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2, **names}, "<pad>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    return LoadedModel(wrap_model(tiny(architecture, layers=layers)), wrapped, "characters")


def byte_characters() -> LoadedModel:
    """Model of `characters` with a byte-level tokenizer, as those of real models are."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = {sign: byte for byte, sign in bytes_to_unicode().items() if 3 <= byte < 128}
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2, **names}, "<pad>"))
    each = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.pre_tokenizer = Sequence([ByteLevel(False, use_regex=False), each])
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    return LoadedModel(wrap_model(tiny("qwen3", layers=2)), wrapped, "characters")


@cache
def family_characters(name: str) -> LoadedModel:
    """The tiny model of a family of the support table, whose tokens are characters."""
    [family] = [family for family in families() if family.name == name]
    decoder = wrap_model(family.model())
    decoder.share()
    return LoadedModel(decoder, characters().tokenizer, name)


@dataclass
class Client:
    """Listener that records one answer."""

    text: str = ""
    report: Report | None = None
    error: Exception | None = None
    steps: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    served: Served | None = None

    def on_text(self, text: str) -> None:
        self.text += text
        if self.served is not None:
            self.steps.append(self.served.core.scheduler.blocks)

    def on_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        self.logprobs += logprobs

    def on_done(self, report: Report) -> None:
        assert self.report is None and self.error is None
        self.report = report

    def on_error(self, error: Exception) -> None:
        assert self.report is None and self.error is None
        self.error = error

    @property
    def result(self) -> Report:
        assert self.error is None, self.error
        assert self.report is not None, "the answer is not complete"
        return self.report


class Served:
    """Engine core whose budgets are checked after every step."""

    def __init__(
        self,
        loaded: LoadedModel,
        policy: str = "full",
        device: int | None = None,
        host: int | None = None,
        persistence: SessionPersistence | None = None,
        disk: DiskTier | None = None,
        rows: int = 64,
        tokens: int = BUDGET,
        block: int | None = BLOCK,
        embedder: Embedder | None = None,
        eviction: str = "lru",
        prefill_chunk: int | None = None,
        quotas: Mapping[Tier, int] | None = None,
        scheduling: SchedulingPolicy = SchedulingPolicy.PRIORITY,
        inter_token_seconds: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        spelling = POLICIES.get(policy, policy)
        parsed = Policy.parse(spelling).budget
        is_open = parsed.tokens is None and parsed.kept is None
        budget, size = (str(tokens), block) if is_open else (None, None)
        engine = Engine(loaded, policy=spelling, budget=budget, block=size)
        if embedder is not None:
            engine.runtime = replace(engine.runtime, embedder=lambda name: embedder)
        totals = {Tier.DEVICE: device, Tier.HOST: host}
        limits = {tier: size for tier, size in totals.items() if size is not None}
        budgets = ByteBudgets(limits, quotas or {})
        times, self.news = count(1_700_000_000), Event()
        self.core = LoadingCore(
            engine,
            EngineOptions(
                budgets,
                eviction,
                rows,
                waiting=64,
                prefill_chunk=prefill_chunk,
                scheduling=scheduling,
                inter_token_seconds=inter_token_seconds,
                clock=clock or (lambda: float(next(times))),
            ),
            persistence or SessionPersistence(),
            disk or DiskTier(),
            self.news.set,
        )

    def submit(
        self,
        turns: Sequence[ChatMessage],
        session: str | None = None,
        tenant: str = "a",
        **options: object,
    ) -> tuple[Client, Ticket]:
        client = Client(served=self)
        fields: dict[str, object] = {"max_new_tokens": 4, **options}
        request = Request(tenant, tuple(turns), session, **fields)  # pyright: ignore
        return client, self.core.submit(request, client, self.core.clock())

    def step(self) -> bool:
        goes_on = self.core.step()
        self.check()
        return goes_on

    def run(self) -> None:
        """Run steps until nothing is left to do, also by other threads."""
        while self.step() or self.core.completions.in_flight:
            if not self.step() and self.core.completions.in_flight:
                assert self.news.wait(30)
                self.news.clear()

    def ask(
        self, turns: Sequence[ChatMessage], session: str | None = None, **options: object
    ) -> Client:
        """Client of a request, after its whole answer."""
        client, _ = self.submit(turns, session, **options)  # pyright: ignore
        self.run()
        assert client.result is not None
        return client

    def check(self) -> None:
        """Check that used and reserved bytes are within the budgets, and nothing else is held."""
        core = self.core
        assert core.reservations.violations == 0
        for tier in (Tier.DEVICE, Tier.HOST):
            assert core.ledger.used(tier) <= core.ledger.limit(tier)
        held = sum(each.residency.device_bytes for each in core.sessions)
        assert held - shared_bytes(core.sessions) <= core.ledger.used(Tier.DEVICE)
        resident = [each.residency for each in core.sessions if each.residency.is_resident]
        parked = sum(each.host_bytes for each in resident)
        assert parked <= core.ledger.used(Tier.HOST), (parked, core.ledger.used(Tier.HOST))


def storages(session: SessionState) -> dict[int, int]:
    """Bytes of all storage that a session's cache on the device has, by address."""
    cache = session.residency.active
    stores = () if cache is None else cache.layers
    held = [tensor.untyped_storage() for store in stores for tensor in store.tensors()]
    return {each.data_ptr(): each.nbytes() for each in held if each.nbytes()}


def shared_bytes(sessions: Iterable[SessionState]) -> int:
    """Bytes of storage that sessions have in common, once for each but the first that has it."""
    every = [each for session in sessions for each in storages(session).items()]
    return sum(count for _, count in every) - sum(dict(every).values())


def encode_session(session: SessionState) -> bytes:
    """A session as a session file."""
    fingerprint = session.serving.runtime.decoder.spec.fingerprint
    return session_file.encode(session_file.take_snapshot(session), fingerprint)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def box_question(number: int, sentences: int = 2) -> list[ChatMessage]:
    """Facts about some boxes and a question about the first; unique by number."""
    facts = "".join(
        f"Box {number * 7 + n} holds {number + 3 * n} coins. " for n in range(sentences)
    )
    return [user(f"{facts}What does box {number * 7} hold?")]


def answered(turns: Sequence[ChatMessage], client: Client, more: str) -> list[ChatMessage]:
    """Conversation with the answer, and the next message of the user."""
    return [*turns, ChatMessage("assistant", client.text), user(more)]
