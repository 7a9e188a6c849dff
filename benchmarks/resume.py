"""How much sooner a session's first token comes when its cache is restored instead of read again.

    python benchmarks/resume.py [--model NAME] [--policy full] [--tokens 16384] [--codecs raw int4]

A session of so many tokens is read and saved with each codec in a new folder. Then, in the same
run: the store is opened, the session restored, verified, and one token predicted behind it; and the
session is read from its log, and the same token predicted. `ratio` is reading to restoring, the
best of some runs of each; the model is loaded already, and files are in the system's page cache.
`kl` is the divergence of the prediction from the exact one. One JSONL line per codec in
results/resume.jsonl.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _texts import text_ids
from _timing import environment, quickest, write
from torch import Tensor

from larder.core.conversation import Conversation
from larder.core.types import Mode
from larder.engine.beginning import policy_of
from larder.engine.engine import Engine
from larder.engine.keeping import StoreKeeper
from larder.models.passes import Row
from larder.session.filing import Cabinet
from larder.session.log import Exchange, Log
from larder.session.snapshot import State
from larder.store.store import Store

OUT = Path("results/resume.jsonl")
NAME, TEXT = "session", "What did I say?"


class Session:
    """A session of one long turn, under an engine's policy."""

    def __init__(self, engine: Engine, ids: Sequence[int]) -> None:
        self._engine = engine
        said = Exchange(TEXT, "", tuple(ids))
        self.log = Log(Conversation("nothing", ()), (said,))
        self.policy = policy_of(engine, self.log)

    def read(self) -> tuple[State, Tensor]:
        """Read from the log, to the first token."""
        state = Cabinet.read(self._engine.desk, self.policy, self.log).state
        return state, self._first(state)

    def restored(self, folder: Path, codec: str) -> Tensor:
        """Restored from a store, to the first token."""
        store = Store(str(folder), folder)
        try:
            keeper = StoreKeeper(store, self._engine.loaded, codec=codec)
            store.parts.rates.know({"disk": 1e15})  # load, however slow that is
            resumed = keeper.load(NAME, self._engine.desk, self.policy, self.log)
            assert resumed.state is not None, resumed.reason
            return self._first(resumed.state)
        finally:
            store.close()

    def saved(self, state: State, folder: Path, codec: str) -> int:
        """Save in a store; the bytes of its caches there."""
        store = Store(str(folder), folder)
        try:
            StoreKeeper(store, self._engine.loaded, codec=codec).save(NAME, state)
            [record] = store.sessions.heads()
            return sum(ref.bytes for ref in record.spans)
        finally:
            store.close()

    def _first(self, state: State) -> Tensor:
        """Log-probabilities of the first token of an answer."""
        cache, _ = state.memory.recall(TEXT)
        ids = self._engine.scribe.question(TEXT)
        decoder = self._engine.loaded.decoder
        return decoder.predict([Row(cache, ids)], Mode.SCRATCH, [len(ids) - 1])[0].log_softmax(-1)


def measured(session: Session, codec: str, folder: Path, runs: dict[str, Any]) -> dict[str, Any]:
    """One codec.

    Args:
        runs: `state`, `first` and `seconds` of reading.
    """
    stored = session.saved(runs["state"], folder, codec)
    first, seconds = quickest(lambda: session.restored(folder, codec))
    exact = runs["first"].double()
    return {
        "codec": codec,
        "kv_bytes": runs["state"].memory.shelf.nbytes,
        "stored_bytes": stored,
        "read_seconds": runs["seconds"],
        "restore_seconds": seconds,
        "ratio": runs["seconds"] / seconds,
        "kl": float((exact.exp() * (exact - first.double())).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="seed")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--budget", default=None)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--codecs", nargs="+", default=["raw", "int4"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    options = {"policy": given.policy, "budget": given.budget, "device": given.device}
    engine = Engine.load(given.model, **options)
    session = Session(engine, text_ids(engine.loaded.tokenizer, given.tokens))
    (state, first), seconds = quickest(session.read)
    runs = {"state": state, "first": first, "seconds": seconds}
    told = {"model": given.model, "policy": str(session.policy), "tokens": given.tokens}
    with tempfile.TemporaryDirectory() as folder:
        for codec in given.codecs:
            row = told | measured(session, codec, Path(folder) / codec, runs)
            print(json.dumps(row), flush=True)
            write(given.out, [row | {"environment": environment()}])


if __name__ == "__main__":
    main()
