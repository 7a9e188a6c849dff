"""Time to a session's first token if its cache is restored instead of prefilled again.

    python benchmarks/resume.py [--model NAME] [--layers N] [--policy full] [--tokens 16384]
        [--codecs raw int8 int4 q4 entropy]

A session of --tokens tokens is read and saved with each codec in a new folder. Then, in the same
run, the session is restored, verified, and one token predicted after it; and the session is read
from its log, and the same token predicted. Model and store are already open, as in a server.
`ratio` is the time of reading divided by that of restoring, the best of several runs of each, once
with the files in the system's page cache (`warm`) and once after it was asked to drop them
(`cold`); `megabytes_per_second` refers to the cache's bytes in memory. `kl` is the divergence of
the prediction from the exact one. `held_bytes` are those of the restored cache, `peak_bytes` what
the process took at most in addition while the cache was restored and the token predicted (Linux
with glibc; a restore of its own), and `step_seconds` the processor time of a token that is read
behind it. One JSONL line per codec in results/resume.jsonl.

Besides the bundled model and Hugging Face names, `random:qwen3-0.6b` has a real model shape and
random weights; `--layers` reduces its layers, which the rows record.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _inputs import text_ids
from _timing import RUNS, environment, shortest_run, write
from torch import Tensor
from transformers import Qwen3ForCausalLM

from larder.cache import SequenceCache
from larder.core import Conversation, Mode
from larder.engine import Engine, StorePersistence, sized_policy
from larder.models import BatchSegment, LoadedModel, seed_tokenizer, wrap_model
from larder.session import ChatCache, ChatLog, ChatState, ChatTurn
from larder.store import Store
from larder_bench.random_models import RANDOM, open_model, random_config

OUT = Path("results/resume.jsonl")
NAME, TEXT = "session", "What did I say?"
STEPS = 9


class SavedSession:
    """Session of one long turn, under an engine's policy."""

    def __init__(self, engine: Engine, ids: Sequence[int]) -> None:
        self._engine = engine
        turn = ChatTurn(TEXT, "", tuple(ids))
        self.log = ChatLog(Conversation("nothing", ()), (turn,))
        self.policy = sized_policy(engine, self.log)

    def read(self) -> tuple[ChatState, Tensor]:
        """State read from the log, and the prediction of the first token."""
        state = ChatCache.prefill(self._engine.runtime, self.policy, self.log).state
        return state, self._first(state)

    def footprint(self, folder: Path, codec: str) -> dict[str, float]:
        """Bytes of a restored cache, the most that the process took meanwhile, and the time of a
        step behind it."""
        store = Store(str(folder), folder)
        try:
            keeper = StorePersistence(store, self._engine.loaded, codec=codec)
            store.parts.throughput.initialize({"disk": 1e15})
            gc.collect()
            held = reset_peak()
            resumed = keeper.load(NAME, self._engine.runtime, self.policy, self.log)
            assert resumed.state is not None, resumed.reason
            self._first(resumed.state)
            peak = peak_resident() - held
            cache = resumed.state.memory.caches.activate(0)
            return {
                "held_bytes": cache.nbytes,
                "peak_bytes": peak,
                "step_seconds": self._step_seconds(cache),
            }
        finally:
            store.close()

    def _step_seconds(self, cache: SequenceCache) -> float:
        """Processor time of a token, the median of several."""
        decoder, times = self._engine.loaded.decoder, list[float]()
        for _ in range(STEPS):
            started = time.process_time()
            decoder.forward_logits([BatchSegment(cache, (1,))], Mode.APPEND, [0])
            times.append(time.process_time() - started)
        return statistics.median(times)

    def restored(
        self, folder: Path, codec: str, before: Callable[[], None]
    ) -> tuple[Tensor, float]:
        """Prediction of the first token from a restored state; the best of its times in seconds.

        Args:
            before: called before each run.
        """
        store, times = Store(str(folder), folder), list[float]()
        try:
            keeper = StorePersistence(store, self._engine.loaded, codec=codec)
            store.parts.throughput.initialize({"disk": 1e15})  # load, however slow that is
            for _ in range(RUNS):
                before()
                started = time.perf_counter()
                resumed = keeper.load(NAME, self._engine.runtime, self.policy, self.log)
                assert resumed.state is not None, resumed.reason
                first = self._first(resumed.state)
                times.append(time.perf_counter() - started)
                del resumed
            return first, min(times)
        finally:
            store.close()

    def saved(self, state: ChatState, folder: Path, codec: str) -> int:
        """Save in a store; return the stored bytes of the caches."""
        store = Store(str(folder), folder)
        try:
            StorePersistence(store, self._engine.loaded, codec=codec).save(NAME, state)
            [record] = store.sessions.heads()
            return sum(ref.bytes for ref in record.spans)
        finally:
            store.close()

    def _first(self, state: ChatState) -> Tensor:
        """Log-probabilities of the first token of an answer."""
        cache, _ = state.memory.activate_for(TEXT)
        ids = self._engine.tokenizer.encode_question(TEXT)
        decoder = self._engine.loaded.decoder
        return decoder.forward_logits([BatchSegment(cache, ids)], Mode.SCRATCH, [len(ids) - 1])[
            0
        ].log_softmax(-1)


def measure_codec(
    session: SavedSession, codec: str, folder: Path, runs: dict[str, Any]
) -> dict[str, Any]:
    """Row of a codec.

    Args:
        runs: `state`, `first` and `seconds` of the prefill.
    """
    stored, held = session.saved(runs["state"], folder, codec), runs["state"].memory.caches.nbytes
    exact = runs["first"].double()
    row = {"codec": codec, "kv_bytes": held, "stored_bytes": stored}
    row |= {"read_seconds": runs["seconds"]}
    for name, before in (("warm", nothing), ("cold", lambda: forget(folder))):
        first, seconds = session.restored(folder, codec, before)
        row[name] = {
            "restore_seconds": seconds,
            "ratio": runs["seconds"] / seconds,
            "megabytes_per_second": held / seconds / 1e6,
        }
    row |= session.footprint(folder, codec)
    return row | {"kl": float((exact.exp() * (exact - first.double())).sum())}


def reset_peak() -> int:
    """Reset the recorded peak of resident memory, without freed memory that the process kept
    (glibc); return the present one."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak_resident() -> int:
    """Highest resident memory since `reset_peak`."""
    return resident("VmHWM")


def resident(field: str) -> int:
    """Bytes of a field of the process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{field}:")]
    return 1024 * int(line.split()[1])


def nothing() -> None:
    """Leave the page cache as it is."""


def forget(folder: Path) -> None:
    """Ask the system to drop a folder's files from its page cache."""
    os.sync()  # unwritten data cannot be dropped
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def model_of(name: str, layers: int | None, device: str) -> LoadedModel:
    """Model of a name, or one of random weights with fewer layers."""
    if layers is None or not name.startswith(RANDOM):
        return open_model(name, device)
    config = random_config(name.removeprefix(RANDOM))
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    torch.manual_seed(0)
    module = Qwen3ForCausalLM(config).eval().to(device)
    return LoadedModel(wrap_model(module), seed_tokenizer(), f"{name}, {layers} layers")


def summary(row: dict[str, Any]) -> str:
    """One-line summary of a row."""
    ways = (
        f"{way} {row[way]['restore_seconds']:.3f} s, {row[way]['ratio']:.1f} times as soon"
        for way in ("warm", "cold")
    )
    share, held, peak = (
        row[name] / row["kv_bytes"] for name in ("stored_bytes", "held_bytes", "peak_bytes")
    )
    return (
        f"{row['model']} {row['tokens']} tokens, {row['codec']:7} {share:.2f} of the bytes, "
        f"{held:.2f} held, {peak:.2f} at most; step {row['step_seconds']:.3f} s; read "
        f"{row['read_seconds']:.2f} s; restored {'; '.join(ways)}; kl {row['kl']:.2g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="seed")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--budget", default=None)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--codecs", nargs="+", default=["raw", "int8", "int4", "q4", "entropy"])
    parser.add_argument(
        "--layers", type=int, help="number of layers of a model with random weights"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    loaded = model_of(options.model, options.layers, options.device)
    engine = Engine(loaded, policy=options.policy, budget=options.budget)
    session = SavedSession(engine, text_ids(engine.loaded.tokenizer, options.tokens))
    (state, first), seconds = shortest_run(session.read)
    runs = {"state": state, "first": first, "seconds": seconds}
    common = {"model": loaded.name, "policy": str(session.policy), "tokens": options.tokens}
    with tempfile.TemporaryDirectory() as folder:
        for codec in options.codecs:
            row = common | measure_codec(session, codec, Path(folder) / codec, runs)
            print(summary(row), flush=True)
            write(options.out, [row | {"environment": environment()}])


if __name__ == "__main__":
    main()
