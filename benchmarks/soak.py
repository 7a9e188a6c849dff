"""A server under mixed load for a while: does its memory grow, or what it has open or written?

    python benchmarks/soak.py [--minutes 10] [--clients 4] [--policy full]

Clients of two tenants talk to a `larder serve` of its own process on small budgets: new sessions,
ones that come back, streams that are left in the middle, the same request again, forks, pins,
releases, compactions, exports and imports, conversations and responses, removals, wrong keys and
requests that are none. Each client holds at most `--sessions` sessions and removes the oldest one
for every new one, so that nothing has a reason to grow. Every second resident memory, open files,
threads, files of the store and their bytes are counted. After a warm-up (a third of the time) a
line is laid through the counts: its slope with a 95 % interval. Something grows if the interval is
above 0 and the line rises by more than a tolerance. In the end every session is removed, and what
the store holds once that is forgotten is told. Rows go to results/soak.jsonl; exit status 1 where
something grows or is left, an answer is a 5xx other than 503, or the budget was exceeded.
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
from _random_client import KEYS, TENANTS, RandomClient
from _server import Server, run_server, session_path
from _timing import environment, write

from larder.store.maintenance import TOMBSTONE_SECONDS

OUT = Path("results/soak.jsonl")
VIOLATIONS = "larder_budget_violations_total"
WARM_UP = 1 / 3
FORGOTTEN_SECONDS = 2 * TOMBSTONE_SECONDS  # in which the store forgets what was removed
# Folders that are empty once every session is gone.
OF_SESSIONS = ("store/blobs", "store/chunks", "store/families", "store/sessions")
MIB = 1 << 20
# What may come and go by chance between the first and the last sample.
TOLERANCES = {
    "resident_bytes": 4 * MIB,
    "open_files": 3.0,
    "threads": 2.0,
    "written_files": 5.0,
    "written_bytes": 1.0 * MIB,
}


def sample(process: int, home: Path) -> dict[str, Any]:
    """What a process holds now, and what lies in its folder."""
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    told = {line.partition(":")[0]: line.split()[1] for line in status if len(line.split()) > 1}
    # os.walk passes over folders that are removed meanwhile, where Path.rglob raises.
    written = [Path(folder, name) for folder, _, names in os.walk(home) for name in names]
    sizes = []
    for each in written:
        try:
            sizes.append(each.stat().st_size)
        except FileNotFoundError:  # gone since
            continue
    return {
        "resident_bytes": 1024.0 * int(told["VmRSS"]),
        "open_files": float(len(list(Path(f"/proc/{process}/fd").iterdir()))),
        "threads": float(told["Threads"]),
        "written_files": float(len(sizes)),
        "written_bytes": float(sum(sizes)),
        "written": dict(Counter("/".join(each.relative_to(home).parts[:2]) for each in written)),
    }


def soaked(
    given: argparse.Namespace, home: Path
) -> tuple[list[Any], Counter[str], float, dict[str, int]]:
    """Samples with their seconds, outcomes, how often the budget was exceeded, and files that are
    left by folder."""
    options = ["--policy", given.policy, *(["--budget", given.budget] if given.budget else [])]
    options += ["--kv-budget", given.kv_budget, "--host-budget", given.host_budget]
    with run_server(home, options, KEYS) as server:
        clients = [
            RandomClient(server, TENANTS[n % 2], f"c{n}", given.sessions, random.Random(n))
            for n in range(given.clients)
        ]
        for each in clients:  # what there is at most is there before anything is counted
            each.fill()
        begun = time.monotonic()
        until = begun + 60 * given.minutes
        threads = [threading.Thread(target=each.run, args=(until,)) for each in clients]
        for thread in threads:
            thread.start()
        samples: list[Any] = []
        while any(thread.is_alive() for thread in threads):
            samples.append((time.monotonic() - begun, sample(server.process, home)))
            time.sleep(given.seconds)
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
    given = _given()
    with tempfile.TemporaryDirectory() as folder:
        samples, outcomes, violations, left = soaked(given, Path(folder))
    kept = [each for each in samples if each[0] >= WARM_UP * samples[-1][0]]
    seconds, rows, grown = [at for at, _ in kept], [], []
    for name, tolerance in TOLERANCES.items():
        found = growth(seconds, [told[name] for _, told in kept])
        if found.is_real(tolerance):
            grown.append(name)
        per_minute = {key: 60 * getattr(found, key) for key in ("slope", "low", "high")}
        rows.append({"counted": name, "level": found.level, **per_minute, "gained": found.gained})
        print(
            f"{name:15} {found.level:14,.0f}  {per_minute['slope']:+12,.2f} per minute "
            f"[{per_minute['low']:+,.2f}, {per_minute['high']:+,.2f}]"
            f"{'  GROWS' if name in grown else ''}"
        )
    told = {"minutes": given.minutes, "clients": given.clients, "policy": given.policy}
    told |= {"outcomes": dict(outcomes), "violations": violations, "environment": environment()}
    told["written"], told["left"] = samples[-1][1]["written"], left
    write(given.out, [row | told for row in rows])
    print(f"at the end {told['written']}\nonce every session is removed {left}")
    broken = sum(count for what, count in outcomes.items() if _is_broken(what))
    for what, count in sorted(outcomes.items()):
        print(f"{count:7} {what}")
    print(f"{sum(outcomes.values())} acts, {broken} broken, {violations:.0f} budget violations")
    return 1 if grown or broken or violations or any(left.values()) else 0


def _is_broken(outcome: str) -> bool:
    words = outcome.partition(": ")[2].split()
    return any(word.startswith("5") and word != "503" for word in words)


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=6, help="that one client holds")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--budget", help="of policies that drop")
    parser.add_argument("--kv-budget", default="8MiB")
    parser.add_argument("--host-budget", default="16MiB")
    parser.add_argument("--seconds", type=float, default=1.0, help="between two samples")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
