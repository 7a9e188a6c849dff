"""Soak test of a server under mixed load: growth of its memory, open files and written data.

    python benchmarks/soak.py [--minutes 10] [--clients 4] [--policy full]

Clients of two tenants send requests to a `larder serve` in its own process with small budgets: new
sessions, resumed sessions, aborted streams, repeated requests, loops of tool calls, messages in
Anthropic's form, embeddings, forks, pins, releases, compactions, exports and imports, conversations
and responses, removals, wrong keys and invalid requests. Each client holds at most `--sessions`
sessions and removes the oldest one for every new one, so that nothing should grow. Every second
resident memory, open files, threads, files of the store and their bytes are counted. After a
warm-up (five minutes and `--warm-up` requests, at most a third of the time) a line is fitted to
the counts: its slope with a 95 % interval. A quantity grows if the interval is above 0 and the
increase exceeds a tolerance. At the end every session is removed, and the remaining files of the
store are reported. Rows go to results/soak.jsonl; the exit status is 1 if something grows or
remains, an answer is a 5xx other than 503, or the budget was exceeded.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _growth import growth
from _random_client import EMBEDDER, KEYS, TENANTS, RandomClient
from _server import Server, run_server, session_path
from _timing import environment, write

from larder.store import TOMBSTONE_SECONDS

OUT = Path("results/soak.jsonl")
VIOLATIONS = "larder_budget_violations_total"
WARM_UP_SECONDS = 300.0  # until the heap has its parts and the caches of libraries are full
MOST_WARM_UP = 1 / 3  # of the time
TEMPLATE = Path(__file__).parent / "tool_template.jinja"
FORGOTTEN_SECONDS = 2 * TOMBSTONE_SECONDS  # after which removed sessions are deleted
# Folders that are empty once every session is gone.
OF_SESSIONS = ("store/blobs", "store/chunks", "store/families", "store/sessions")
MIB = 1 << 20
# Random variation allowed between the first and the last sample.
TOLERANCES = {
    "resident_bytes": 4 * MIB,
    "open_files": 3.0,
    "threads": 2.0,
    "written_files": 5.0,
    "written_bytes": 1.0 * MIB,
}


def sample(process: int, home: Path) -> dict[str, Any]:
    """Current counts of a process, and of the files in its folder."""
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = {line.partition(":")[0]: line.split()[1] for line in status if len(line.split()) > 1}
    # os.walk skips folders that are removed meanwhile; Path.rglob raises.
    written = [Path(folder, name) for folder, _, names in os.walk(home) for name in names]
    sizes = []
    for each in written:
        try:
            sizes.append(each.stat().st_size)
        except FileNotFoundError:  # deleted since
            continue
    return {
        "resident_bytes": 1024.0 * int(fields["VmRSS"]),
        "open_files": float(len(list(Path(f"/proc/{process}/fd").iterdir()))),
        "threads": float(fields["Threads"]),
        "written_files": float(len(sizes)),
        "written_bytes": float(sum(sizes)),
        "written": dict(Counter("/".join(each.relative_to(home).parts[:2]) for each in written)),
    }


def run_soak(
    options: argparse.Namespace, home: Path
) -> tuple[list[Any], Counter[str], float, dict[str, int]]:
    """Samples with their seconds, outcomes, number of budget violations, and remaining files by
    folder.
    """
    arguments = ["--policy", options.policy, "--chat-template", str(TEMPLATE)]
    arguments += ["--budget", options.budget] if options.budget else []
    arguments += ["--kv-budget", options.kv_budget, "--host-budget", options.host_budget]
    arguments += ["--embedding-model", EMBEDDER]
    with run_server(home, arguments, KEYS) as server:
        clients = [
            RandomClient(server, TENANTS[n % 2], f"c{n}", options.sessions, random.Random(n))
            for n in range(options.clients)
        ]
        for each in clients:  # the maximum exists before anything is counted
            each.fill()

        started = time.monotonic()
        until = started + 60 * options.minutes
        pause = options.clients / options.rate
        threads = [threading.Thread(target=each.run, args=(until, pause)) for each in clients]
        for thread in threads:
            thread.start()
        samples: list[Any] = []
        while any(thread.is_alive() for thread in threads):
            acts = sum(sum(each.outcomes.values()) for each in clients)
            counts = sample(server.process, home) | {"acts": acts}
            samples.append((time.monotonic() - started, counts))
            time.sleep(options.seconds)
        for key in TENANTS:
            owner = Server(server.url, server.process, key)
            for session in owner.sessions():
                owner.ask("DELETE", session_path(session["id"]))
        time.sleep(FORGOTTEN_SECONDS)
        left = {name: sample(server.process, home)["written"].get(name, 0) for name in OF_SESSIONS}
        violations = server.metrics()[VIOLATIONS]
    outcomes: Counter[str] = sum((each.outcomes for each in clients), Counter())
    return samples, outcomes, violations, left


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        samples, outcomes, violations, left = run_soak(options, Path(folder))
    latest = MOST_WARM_UP * samples[-1][0]
    measured = [
        (at, counts)
        for at, counts in samples
        if at >= latest or (at >= WARM_UP_SECONDS and counts["acts"] >= options.warm_up)
    ]
    seconds, rows, grown = [at for at, _ in measured], [], []
    for name, tolerance in TOLERANCES.items():
        line = growth(seconds, [counts[name] for _, counts in measured])
        if line.is_real(tolerance):
            grown.append(name)
        per_minute = {key: 60 * getattr(line, key) for key in ("slope", "low", "high")}
        rows.append({"counted": name, "level": line.level, **per_minute, "gained": line.gained})
        print(
            f"{name:15} {line.level:14,.0f}  {per_minute['slope']:+12,.2f} per minute "
            f"[{per_minute['low']:+,.2f}, {per_minute['high']:+,.2f}]"
            f"{'  GROWS' if name in grown else ''}"
        )
    if options.samples is not None:
        write(options.samples, [{"seconds": at} | counts for at, counts in samples])
    summary = {"minutes": options.minutes, "clients": options.clients, "policy": options.policy}
    summary |= {"outcomes": dict(outcomes), "violations": violations, "environment": environment()}
    summary["written"], summary["left"] = samples[-1][1]["written"], left
    write(options.out, [row | summary for row in rows])
    print(f"at the end {summary['written']}\nonce every session is removed {left}")
    broken = sum(count for what, count in outcomes.items() if _is_broken(what))
    for what, count in sorted(outcomes.items()):
        print(f"{count:7} {what}")
    print(f"{sum(outcomes.values())} acts, {broken} broken, {violations:.0f} budget violations")
    return 1 if grown or broken or violations or any(left.values()) else 0


def _is_broken(outcome: str) -> bool:
    words = outcome.partition(": ")[2].split()
    return any(word.startswith("5") and word != "503" for word in words)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warm-up", type=int, default=600, help="requests that do not count")
    parser.add_argument("--clients", type=int, default=4)
    # Removed sessions leave records for a minute, so that levels follow the rate: one that the
    # machine keeps whatever else it does.
    parser.add_argument("--rate", type=float, default=4.0, help="most requests per second")
    parser.add_argument("--sessions", type=int, default=6, help="sessions per client")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--budget", help="budget of policies that evict")
    parser.add_argument("--kv-budget", default="8MiB")
    parser.add_argument("--host-budget", default="16MiB")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds between two samples")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--samples", type=Path, help="file for all counts")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
