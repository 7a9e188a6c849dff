"""Timing side channel between tenants: whether response times reveal other tenants' texts.

    python benchmarks/isolation.py [--samples 200] [--model NAME]

One server, many tenants, and a new text each time, requested in random order as one of

    unknown    nobody has sent it before
    other      another tenant has sent it before
    own        the tenant itself has sent it before

and a session by a name that is `unknown`, or an `other` tenant's. Each pair gives one JSONL line in
results/isolation.jsonl: medians of the seconds to the first token (for names, to the refusal), the
two-sample Kolmogorov-Smirnov statistic and its p value. Isolation holds if `other` and `unknown` do
not differ (p above 0.01), and the audit is meaningful if `own` and `unknown` do (p far below 0.01).
Tenants and texts are new for each sample, so that samples do not influence each other.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from _timing import environment, write
from scipy.stats import ks_2samp

from larder.engine import Engine
from larder.models import load
from larder.server import (
    ApiError,
    ChatMessage,
    EngineOptions,
    LocalEngineClient,
    Report,
    Request,
    StoreSessionPersistence,
    TokenLogprob,
)
from larder.store import ByteBudgets, Store, Tier

OUT = Path("results/isolation.jsonl")
ARMS = ("unknown", "other", "own")
LIMIT = 0.01
WORDS = 40


class FirstTokenListener:
    """Listener that records the time of the first token."""

    def __init__(self) -> None:
        self.ended, self.error = threading.Event(), None
        self.first = 0.0

    def on_text(self, text: str) -> None:
        self.first = self.first or time.perf_counter()

    def on_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        pass

    def on_done(self, report: Report) -> None:
        self.first = self.first or time.perf_counter()
        self.ended.set()

    def on_error(self, error: Exception) -> None:
        self.error = error
        self.ended.set()


class TenantTimingProbe:
    """Client that sends requests of many tenants."""

    def __init__(self, hub: LocalEngineClient, source: random.Random) -> None:
        self._hub, self._source = hub, source
        self._count = 0

    def text(self) -> str:
        """New text."""
        words = [str(self._source.randrange(10_000)) for _ in range(WORDS)]
        return f"Remember {' '.join(words)}. What did I say?"

    def tenant(self) -> str:
        """New tenant."""
        self._count += 1
        return f"tenant {self._count}"

    def ask(self, tenant: str, text: str) -> float:
        """Seconds to the first token of an answer."""
        listener = FirstTokenListener()
        started = time.perf_counter()
        self._hub.submit(
            Request(tenant, (ChatMessage("user", text),), None, max_new_tokens=1), listener
        )
        listener.ended.wait()
        if listener.error is not None:
            raise listener.error
        return listener.first - started

    def first_token(self, arm: str) -> float:
        """Seconds to the first token in one of the arms."""
        asks, other = self.tenant(), self.tenant()
        text, another = self.text(), self.text()
        earlier = {"unknown": another, "other": text, "own": another}[arm]
        self.ask(other, earlier)
        self.ask(asks, text if arm == "own" else self.text())
        # The same prefix with another end: a repeated request would be answered without the model.
        return self.ask(asks, f"{text} And again?")

    def refusal(self, arm: str) -> float:
        """Seconds to the refusal of a session that does not exist or is another tenant's."""
        asks, other = self.tenant(), self.tenant()
        self._hub.open(other, "x")
        started = time.perf_counter()
        try:
            self._hub.session(asks, "x" if arm == "other" else "y")
        except ApiError:
            return time.perf_counter() - started
        raise AssertionError("another tenant's session was shown")


def samples(
    arms: tuple[str, ...], count: int, source: random.Random, take: Callable[[str], float]
) -> dict[str, list[float]]:
    """Seconds of `count` samples of each arm, taken in random order."""
    order = [arm for arm in arms for _ in range(count)]
    source.shuffle(order)
    seconds: dict[str, list[float]] = defaultdict(list)
    for arm in order:
        seconds[arm].append(take(arm))
    return seconds


def compared(what: str, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Comparison of each arm with `unknown`."""
    rows = []
    for arm in list(seconds):
        if arm == "unknown":
            continue
        test = ks_2samp(seconds["unknown"], seconds[arm])
        rows.append(
            {
                "what": what,
                "arm": arm,
                "samples": len(seconds[arm]),
                "median_seconds": median(seconds[arm]),
                "unknown_median_seconds": median(seconds["unknown"]),
                "ks": float(test.statistic),
                "p": float(test.pvalue),
                "holds": bool(test.pvalue < LIMIT if arm == "own" else test.pvalue > LIMIT),
            }
        )
    return rows


def run(model: str, count: int, folder: Path) -> list[dict[str, Any]]:
    source = random.Random(0)
    engine = Engine(load(model), policy="full")
    store = Store(str(folder / "blobs"), folder)
    persistence = StoreSessionPersistence(store, engine.loaded.decoder.spec)
    hub = LocalEngineClient(
        engine, EngineOptions(ByteBudgets({Tier.DEVICE: 64 << 20})), persistence=persistence
    )
    audit = TenantTimingProbe(hub, source)
    try:
        for arm in ARMS:  # warm-up
            audit.first_token(arm)
        rows = compared("first token", samples(ARMS, count, source, audit.first_token))
        return rows + compared("name", samples(ARMS[:2], count, source, audit.refusal))
    finally:
        hub.close()
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--model", default="seed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(options.model, options.samples, Path(folder))
    write(OUT, [{**environment(), "model": options.model, **row} for row in rows])
    for row in rows:
        verdict = "as expected" if row["holds"] else "NOT as expected"
        print(f"{row['what']}, {row['arm']} against unknown: p = {row['p']:.3g}, {verdict}")


if __name__ == "__main__":
    main()
