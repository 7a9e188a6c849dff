"""Comparison with peers: counted bytes, requests to workers, and the table."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from larder import Engine, LarderError, Policy
from larder.core import UnknownName
from larder_bench.results.rows import CellKey, Row, cell_key
from larder_bench.tasks.base import parse_task
from result_rows import cell, write_rows

NAMES = ("transformers", "kvpress", "optimum-quanto", "hqq")
PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def among_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))


class SlotsHolder:
    __slots__ = ("inside",)

    def __init__(self, inside: Any) -> None:
        self.inside = inside


def test_storage_of_several_views_is_counted_once_and_whole() -> None:
    held_bytes = import_module("_memory").held_bytes
    stored = torch.zeros(100)
    views = {"a": stored[:10], "b": [SimpleNamespace(inner=stored[5:].view(5, 19))]}
    assert held_bytes(views) == 400
    assert held_bytes(views, SlotsHolder(torch.zeros(3, dtype=torch.int8))) == 403
    views["itself"] = views  # type: ignore[assignment]
    assert held_bytes(views, stored, nn.Linear(9, 9)) == 400


def test_tensor_subclasses_are_counted_by_their_inner_tensors() -> None:
    class Packed(torch.Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["_bits", "_scale"], None

    packed = torch.zeros(64).as_subclass(Packed)
    packed._bits, packed._scale = torch.zeros(32, dtype=torch.uint8), torch.zeros(2)
    assert import_module("_memory").held_bytes([packed]) == 40


def test_masked_entries_are_counted() -> None:
    held, model = import_module("_memory"), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert held.masked_entries(model) == (0, [])
    model[1].masked_key_indices = tuple(torch.zeros(3, 7, dtype=torch.int64))
    count, notes = held.masked_entries(model)
    assert count == 7
    assert held.held_bytes(notes) == 3 * 7 * 8


def test_every_pair_is_a_policy_of_ours_and_has_a_name_of_its_own() -> None:
    pairs = import_module("_pairs").PAIRS
    assert len({pair.peer for pair in pairs}) == len(pairs)
    assert len({(p.name, str(Policy.parse(p.ours))) for p in pairs}) == len({p.name for p in pairs})


def test_missing_peer_is_reported_before_the_first_run() -> None:
    jobs, pairs = import_module("_jobs"), import_module("_pairs")
    peers = {"transformers": "5.2", "kvpress": "", "optimum-quanto": "1", "hqq": ""}
    setting = SimpleNamespace(
        environments={"peers": peers}, options=SimpleNamespace(peer_python="python3")
    )
    with pytest.raises(LarderError, match="python3 has no hqq, kvpress: see --help"):
        jobs.jobs_of(setting, pairs.PAIRS, ["lifelog()"], [400], ["1/4"])
    absent = SimpleNamespace(peer_python="/no/such/python", threads=1)
    with pytest.raises(LarderError, match="cannot be run"):
        jobs._environments(absent)


def test_cells_of_a_conversation_alternate_without_repeats() -> None:
    jobs, pairs = import_module("_jobs"), import_module("_pairs")
    options = SimpleNamespace(first_seed=3, files=2, process="cell")
    setting = SimpleNamespace(environments={"peers": dict.fromkeys(NAMES, "1")}, options=options)
    chosen = pairs.pairs_of(["transformers:dynamic", "transformers:offloaded", "kvpress:tova"])
    made = jobs.jobs_of(setting, chosen, ["lifelog()"], [400], ["1/4", "1/8"])
    whole = ["transformers:dynamic", "full", "transformers:offloaded"]
    cut = [("kvpress:tova", "larder:last_query", size) for size in ("1/4", "1/8")]
    assert [job.policy for job in made if job.seed == 3 and job.budget == "1/1"] == whole
    for peer, ours, size in cut:
        named = [job.policy for job in made if job.seed == 4 and job.budget == size]
        assert named == [peer, ours]


def test_peers_are_chosen_by_name_or_by_side() -> None:
    chosen = import_module("_pairs").pairs_of
    assert [pair.peer for pair in chosen(["kvpress:tova"])] == ["kvpress:tova"]
    assert {pair.peer.partition(":")[0] for pair in chosen(["transformers"])} == {"transformers"}
    with pytest.raises(UnknownName, match="Did you mean .*'kvpress:tova'"):
        chosen(["kvpress:tovo"])


def side_by_side(*, left: dict[str, object], right: dict[str, object]) -> tuple[Any, list[Row]]:
    """A pair, and two conversations on which its sides took that."""
    pair, mib = import_module("_pairs").pairs_of(["kvpress:snapkv"])[0], 2**20
    result = {"budget": "1/4", "kv_bytes": mib, "peak_kv_bytes": 2 * mib}
    result |= {"working_peak_bytes": 5 * mib, "process_peak_bytes": 500 * mib, "study": "peers"}
    own = [cell("snapkv", seed=seed, **result) | {"policy": pair.name} | right for seed in (0, 1)]
    peers = [row | {"policy": pair.peer, "spelling": pair.made} | left for row in own]
    return pair, [*own, *peers]


def test_table_gives_sizes_of_both_and_by_how_much_the_peer_is_slower() -> None:
    taken = {"kv_bytes": 3 * 2**20, "latency": {"first_token": {"p50": 0.75}}}
    pair, rows = side_by_side(
        left={**taken, "prefill_cpu_seconds": 3}, right={"prefill_cpu_seconds": 2}
    )
    table = list(import_module("_ratios").lines([pair], rows))
    assert table[2] == (
        "| kvpress:snapkv | larder:snapkv | 1/4 | 0.50 / 0.50 | 3.0 / 1.0 | 2.0 / 2.0 | 5.0 / 5.0 "
        "| 500.0 / 500.0 | 1.00x | 1.50x | 1.50x | - |"
    )
    assert len({line.count(" | ") for line in (table[0], table[2])}) == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_table_says_why_a_pair_has_no_figures(side: str) -> None:
    sides: dict[str, Any] = {"left": {}, "right": {}} | {side: {"refused": "no room | none"}}
    pair, rows = side_by_side(**sides)
    line = list(import_module("_ratios").lines([pair], rows))[2]
    assert r"refused: no room \| none" in line


def test_incomparable_cells_have_separate_tables() -> None:
    pair, rows = side_by_side(left={}, right={})
    longer = [row | {"tokens": 2000, "kv_bytes": 0} for row in rows]
    result = "\n".join(import_module("_ratios").tables([pair], [*rows, *longer]))
    assert "needles(needles=4), 1,000 tokens, files 2, forced" in result
    assert "needles(needles=4), 2,000 tokens, files 2, forced" in result
    assert [line.count("1.0 / 1.0") for line in result.splitlines() if "snapkv" in line] == [1, 0]


def test_report_prints_the_tables_without_peers_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, rows = side_by_side(left={}, right={})
    path = write_rows(tmp_path, [*rows, cell("snapkv")])
    words = ["--report", "--out", str(path), "--peer-python", "/no/such/python"]
    monkeypatch.setattr("sys.argv", ["side_by_side.py", *words])
    import_module("side_by_side").main()
    result = capsys.readouterr().out
    assert result.count("| kvpress:snapkv |") == 1
    assert "needles" in result and "not run" not in result


@pytest.mark.parametrize(
    "words", ["--repeats 0", "--threads 0", "--files -1", "--questions -2", "--new-tokens some"]
)
def test_counts_that_measure_nothing_are_refused(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["side_by_side.py", *words.split()])
    with pytest.raises(SystemExit):
        import_module("side_by_side").main()
    assert "write a whole number from" in capsys.readouterr().err


@pytest.mark.parametrize(
    "other",
    [
        {"questions": 5},
        {"new_tokens": 64},
        {"repeats": 1},
        {"threads": 2},
        {"question": "inside"},
        {"process": "policy"},
    ],
)
@pytest.mark.parametrize("model", ["seed", "random:qwen3-tiny"])
def test_row_matches_only_cells_of_the_same_measure(model: str, other: dict[str, Any]) -> None:
    usual = {"questions": 0, "new_tokens": 32, "repeats": 3, "threads": 1}
    usual |= {"model": model, "device": "cpu", "dtype": "float32"}
    usual |= {"question": "after", "process": "cell"}
    assert found_by(usual) == found_by(usual) != found_by(usual | other)


def test_zero_questions_are_two_for_random_models_and_all_for_others() -> None:
    usual = {"questions": 0, "new_tokens": 32, "repeats": 3, "threads": 1}
    usual |= {"device": "cpu", "dtype": "float32", "question": "after", "process": "cell"}
    drawn = usual | {"model": "random:qwen3-tiny"}
    assert found_by(drawn) == found_by(drawn | {"questions": 2})
    assert found_by(drawn).measure == "cost(questions=2, new_tokens=32, repeats=3, threads=1)"
    every = found_by(usual | {"model": "seed"})
    assert every.measure == "generated(new_tokens=32, repeats=3, threads=1)"


def found_by(options: dict[str, Any]) -> CellKey:
    """Key of a cell's row."""
    jobs, pair = import_module("_jobs"), import_module("_pairs").PAIRS[0]
    spec = SimpleNamespace(fingerprint="f")
    template = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None))
    engine = SimpleNamespace(
        loaded=SimpleNamespace(decoder=SimpleNamespace(spec=spec)), tokenizer=template
    )
    environments = {"peers": {"id": "p"}, "larder": {"id": "l"}}
    setting = jobs.ComparisonSetup(Namespace(**options), engine, Path(), "", environments)
    job = jobs.ComparisonJob(parse_task("lifelog()"), 400, 0, pair.peer, "1/1", made=pair.made)
    return cell_key(setting.head(job))


def test_worker_that_fails_is_a_result() -> None:
    run = import_module("_jobs")._run
    with pytest.raises(LarderError, match="ZeroDivisionError"):
        run([import_module("sys").executable, "-c", "1/0"], [])


@pytest.mark.extended
def test_both_sides_answer_the_same_with_the_full_cache(seed_model: Any) -> None:
    """Both sides also hold the same bytes; a compressed cache's counted bytes equal its own
    count.
    """
    engine = Engine(seed_model, policy="full")
    request = full_cache_request(engine)
    theirs = import_module("peer_worker").run(request)
    ours = import_module("larder_worker").run(request)
    assert ours["answers"] == theirs["answers"]
    assert theirs["kv_bytes"] == engine.loaded.decoder.spec.full_bytes(len(request["context"]))
    assert ours["kv_bytes"] == ours["counted_bytes"]
    assert 1 <= ours["kv_bytes"] / theirs["kv_bytes"] < 1.01  # positions
    assert theirs["peak_kv_bytes"] > theirs["kv_bytes"]


def test_peer_has_loaded_all_it_needs_before_memory_is_watched(
    seed_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, seen = import_module("peer_worker"), list[str]()
    read, peak = worker.Peer.read, worker.PeakMemory

    def reads(*arguments: Any) -> Any:
        seen.append("read")
        return read(*arguments)

    def watches(device: str) -> Any:
        seen.append("watch")
        return peak(device)

    monkeypatch.setattr(worker.Peer, "read", reads)
    monkeypatch.setattr(worker, "PeakMemory", watches)
    worker.run(full_cache_request(Engine(seed_model, policy="full")))
    assert seen == ["read", "watch", "read", "read"]


def full_cache_request(engine: Engine) -> dict[str, Any]:
    """Request to a worker for a short conversation with the full cache."""
    jobs, pair = import_module("_jobs"), import_module("_pairs").PAIRS[0]
    options = Namespace(
        corpus=None, device="cpu", dtype="float32", threads=1, repeats=1, new_tokens=6
    )
    options.model, options.question, options.process = "seed", "after", "cell"
    options.questions = 2
    setting = jobs.ComparisonSetup(
        options, engine, Path(str(files("larder.models") / "seed")), "", {}
    )
    job = jobs.ComparisonJob(parse_task("lifelog()"), 400, 0, pair.name, "1/1", written=pair.ours)
    [request] = setting.requests(job)
    return request | {"made": pair.made}
