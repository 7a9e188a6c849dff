"""Every policy on conversations with known answers, at equal active and at equal total bytes.

    python benchmarks/quality.py DATA_FOLDER [--kinds lifelog,mixed] [--sizes 1500,4000] ...

Each conversation file is read under every policy at budgets of 1/4, 1/6 and 1/10 of its length; all
its questions are then scored in packed passes: exact match of greedy decoding, and log-likelihood
of the expected answer. Policies with one cache per episode are run twice: with the budget for each
cache (equal active bytes) and with the budget shared by all caches (equal total bytes).
`exact_question` reads the conversation again for every question, with that question as the prompt
behind every block: the EpiCache paper's upper bound, for which one must know the question first.

Results go to a JSONL file, one line per file, policy and budget; lines already there are kept, so a
run that was stopped goes on. `--report` prints the tables from that file and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _per_question import answer_each

import larder.cli
from larder import Conversation, Engine, Policy, read_conversation
from larder.bench.bootstrap import Bootstrap
from larder.bench.forced import Forced, force
from larder.core.errors import BudgetError
from larder.session.arrangements.episodes import Episodes

POLICIES = (
    "full",
    "streaming_llm",
    "random",
    "snapkv",
    "snapkv_whole",
    "keydiff",
    "kvzip",
    "kvzip_whole",
    "infinipot",
    "epicache",
)
EXACT = "exact_question"  # not among POLICIES: it reads everything once per question
EXACT_PARTS = 'episodic() > patched(prompt="question") > sensitivity(tokens={tokens})'
# The same score under other budgets, and other scores under EpiCache's: what makes the difference?
ABLATION = {
    "epicache uniform": 'episodes() > blockwise() > patched(prompt="episode") > uniform()',
    "epicache pooled": 'episodes() > blockwise() > patched(prompt="episode") > pooled()',
    "epicache global": 'episodes() > blockwise() > patched(prompt="episode") > global()',
    "epicache 1 segment": "episodes(representatives=1) > blockwise() > patched() > sensitivity()",
    "epicache 2 episodes": "episodes(count=2) > blockwise() > patched() > sensitivity()",
    "epicache 8 episodes": "episodes(count=8) > blockwise() > patched() > sensitivity()",
    "keydiff pooled": "blockwise() > keydiff() > pooled()",
    "keydiff sensitivity": "blockwise() > keydiff() > sensitivity()",
    "kvzip sensitivity": "blockwise() > reconstruct() > sensitivity()",
    "snapkv sensitivity": "blockwise() > snapkv() > sensitivity()",
    "infinipot sensitivity": 'blockwise() > patched(prompt="summarize") > sensitivity()',
    "random sensitivity": "blockwise() > random() > sensitivity()",
}
SHARES = {"1/4": 1 / 4, "1/6": 1 / 6, "1/10": 1 / 10}
ACTIVE, TOTAL = "active", "total"
DEMO = Path(larder.cli.__path__[0]) / "demo"
DATA_HELP = "folder of KIND-SIZE-N.json files; left out, the bundled conversation alone"


def main() -> None:
    options = _options()
    if not options.report:
        _run(options)
    _report(options.out, options.kinds.split(","), options.sizes.split(","))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="?", default=DEMO, help=DATA_HELP)
    parser.add_argument("--model", default="seed")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--kinds", default="lifelog,mixed,bookings,needles")
    parser.add_argument("--sizes", default="1500,4000,8000")
    parser.add_argument("--shares", default=",".join(SHARES))
    parser.add_argument("--out", type=Path, default=Path("results/quality.jsonl"))
    parser.add_argument("--code", default=_commit(), help="rows of other code are measured anew")
    parser.add_argument("--ablation", action="store_true", help="run the parts of ABLATION")
    parser.add_argument("--report", action="store_true", help="only print the tables")
    return parser.parse_args()


def _commit() -> str:
    """The commit that results belong to."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def _run(options: argparse.Namespace) -> None:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    known = {_key(row) for row in _rows(options.out)}
    base = Engine.load(options.model, policy="full")
    code = f"{base.loaded.decoder.spec.fingerprint}@{options.code}"
    with options.out.open("a", encoding="utf-8") as out:
        for path in _files(options):
            conversation = read_conversation(path)
            for policy, share, basis in _cases(options):
                head = {"file": path.stem, "policy": policy, "share": share, "basis": basis}
                head["code"] = code
                if _key(head) in known:
                    continue
                row = head | _measured(base, conversation, policy, share, basis)
                out.write(json.dumps(row) + "\n")
                out.flush()
                told = row.get("exact_mean", row.get("refused"))
                print(path.stem, policy, share, basis, told, file=sys.stderr)


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for policy in ABLATION if options.ablation else options.policies.split(","):
        if policy == "full":
            yield policy, "1", ACTIVE
            continue
        for share in options.shares.split(","):
            yield policy, share, ACTIVE
            if policy == "epicache":
                yield policy, share, TOTAL


def _measured(
    base: Engine, conversation: Conversation, policy: str, share: str, basis: str
) -> dict[str, Any]:
    """The measurements, or why there are none: a budget may be smaller than what is protected."""
    try:
        return _measure(base, conversation, policy, share, basis)
    except BudgetError as error:
        return {"refused": str(error), "questions": []}


def _measure(
    base: Engine, conversation: Conversation, policy: str, share: str, basis: str
) -> dict[str, Any]:
    if policy == EXACT:
        return _measure_exact(base, conversation, share)
    policy = ABLATION.get(policy, policy)
    engine, budget = base.under(policy), None
    if policy != "full":
        context = len(engine.scribe.write(conversation).ids)
        caches = 1
        if basis == TOTAL and isinstance(engine.policy.session, Episodes):
            caches = engine.policy.session.count
        budget = str(round(context * SHARES[share] / caches))
        engine = base.under(policy, budget)
    memory = engine.read(conversation)
    started = time.perf_counter()
    results = force(engine, memory, conversation.questions)
    figures = memory.figures
    return _answered(conversation, memory.policy, results) | {
        "context_tokens": figures.context_tokens,
        "budget_tokens": figures.budget_tokens,
        "kv_bytes": figures.kv_bytes,
        "active_kv_bytes": figures.active_kv_bytes,
        "peak_kv_bytes": figures.peak_kv_bytes,
        "full_kv_bytes": figures.full_kv_bytes,
        "prefill_seconds": round(figures.prefill_seconds, 3),
        "score_seconds": round(time.perf_counter() - started, 3),
    }


def _measure_exact(base: Engine, conversation: Conversation, share: str) -> dict[str, Any]:
    scribe, questions = base.scribe, conversation.questions
    context = len(scribe.write(conversation).ids)
    tokens = round(context * SHARES[share])
    policy = Policy.parse(EXACT_PARTS.format(tokens=tokens)).filled(tokens, None)
    prompts = [scribe.question(question.question) for question in questions]
    results = answer_each(base, conversation, questions, prompts, policy)
    sizes = {"context_tokens": context, "budget_tokens": tokens}
    return _answered(conversation, policy, results) | sizes


def _answered(
    conversation: Conversation, policy: Policy, results: Sequence[Forced]
) -> dict[str, Any]:
    text = "".join(message.content for message in conversation.messages)
    return {
        "spelling": str(policy),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "exact_mean": sum(r.exact for r in results) / len(results),
        "questions": [
            {
                "kind": r.question.kind,
                "exact": r.exact,
                "log_likelihood": round(r.log_likelihood, 4),
                "stated": r.question.answer in text,
            }
            for r in results
        ],
    }


def _files(options: argparse.Namespace) -> list[Path]:
    if options.data == DEMO:
        return [DEMO / "conversation.json"]
    kinds, sizes = options.kinds.split(","), options.sizes.split(",")
    return [
        path
        for size in sizes
        for kind in kinds
        for path in sorted(options.data.glob(f"{kind}-{size}-*.json"))
    ]


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["file"], row["policy"], row["share"], row["basis"], row.get("code", "")


def _report(path: Path, kinds: list[str], sizes: list[str]) -> None:
    """Tables of exact match and log-likelihood over questions whose answer is in the text."""
    sizes = [*sizes, ""]  # the bundled conversation has no size in its name
    latest = {_key(row)[:4]: row for row in _rows(path)}.values()
    rows = [row for row in latest if (row["file"] + "--").split("-")[1] in sizes]
    for kind in [*kinds, "all"]:
        chosen = [row for row in rows if kind in ("all", row["file"].split("-")[0])]
        if chosen:
            _table(kind, chosen)


def _table(kind: str, rows: list[dict[str, Any]]) -> None:
    cases = sorted({(r["basis"], r["policy"], r["share"]) for r in rows})
    policies = list(dict.fromkeys((basis, policy) for basis, policy, _ in cases))
    shares = ["1", *SHARES]
    print(f"\n{kind}: exact match (log-likelihood per token) by budget")
    print(f"{'':26}" + "".join(f"{share:>26}" for share in shares))
    for basis, policy in policies:
        cells = [
            _cell(
                [r for r in rows if (r["basis"], r["policy"], r["share"]) == (basis, policy, share)]
            )
            for share in shares
        ]
        name = policy if basis == ACTIVE else f"{policy} (shared)"
        print(f"{name:26}" + "".join(f"{cell:>26}" for cell in cells))


def _cell(rows: list[dict[str, Any]]) -> str:
    asked = [[q for q in row["questions"] if q["stated"]] for row in rows]
    asked = [questions for questions in asked if questions]
    if not asked:
        return ""
    exact = Bootstrap().mean([[float(q["exact"]) for q in questions] for questions in asked])
    flat = [q["log_likelihood"] for questions in asked for q in questions]
    likelihood = sum(flat) / len(flat)
    return f"{exact.mean:.2f} [{exact.low:.2f} {exact.high:.2f}] ({likelihood:.2f})"


if __name__ == "__main__":
    main()
