"""Commands that reproduce results and figures.

Rows do not contain paths of local folders; commands have placeholders in capitals for them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from larder_bench.datasets.task_prompts import Wording
from larder_bench.reports.study_index import folder_options
from larder_bench.results.budget_labels import OWN, WHOLE
from larder_bench.results.rows import CellKey, Results, Row, read_results, result_files
from larder_bench.studies.study import CONTROLS, Study, read_study, study_names

# Fields in which two merged blocks may differ, in order of merging.
DIMENSIONS = ("seed", "budget", "policy", "matched", "measure", "tokens", "task", "model")
SINGLE = ("device", "dtype", "question", "wording")  # one value each per command


def rerun_commands(
    results: Results, paths: Sequence[Path], policies: Sequence[str] = ()
) -> list[str]:
    """Commands that measure each study, then those that plot; only of selected policies if
    given.
    """
    arguments = " ".join(shlex.quote(str(path)) for path in paths)
    arguments += "".join(f" --policy {shlex.quote(policy)}" for policy in policies)
    lines = list(_bench_commands(results, paths))
    return [*lines, f"larder plot {arguments}", f"larder report {arguments}"]


def _bench_commands(results: Results, paths: Sequence[Path]) -> Iterator[str]:
    places = _places(results, paths)
    known = study_names()
    for study in dict.fromkeys(row["study"] for row in results.cells):
        rows = [row for row in results.cells if row["study"] == study]
        if "command" in rows[-1]:  # not measured by larder bench
            yield from dict.fromkeys(row["command"] for row in rows if "command" in row)
            continue
        definition = read_study(study) if study in known else None
        if definition is not None and _is_of(definition, rows):
            options = list(_by_name(definition, rows))
        else:
            options = [_block_options(study, block) for block in cell_blocks(rows)]
        out = f" --out {shlex.quote(str(places[study]))}" if study in places else ""
        yield from (f"larder bench {words}{out}" for words in options)


def _places(results: Results, paths: Sequence[Path]) -> dict[str, Path]:
    """Results file of each study that has exactly one."""
    studies = {row["study"] for row in results.cells}
    if len(paths) == 1 and not paths[0].is_dir():
        return dict.fromkeys(studies, paths[0])

    studies_by_file = {
        path: {row["study"] for row in read_results([path]).cells} for path in result_files(paths)
    }
    files = {
        study: [path for path, names in studies_by_file.items() if study in names]
        for study in studies
    }
    return {study: paths[0] for study, paths in files.items() if len(paths) == 1}


def _is_of(study: Study, rows: Sequence[Row]) -> bool:
    """Test if the study's file defines these cells."""
    tasks = {(_base(task.spelling), tokens) for task in study.tasks for tokens in task.tokens}
    measures = set(map(_base, study.measure))
    budgets = {*study.budgets, WHOLE, OWN}
    return all(
        (_base(row["task"]), row["tokens"]) in tasks
        and _base(row["measure"]) in measures
        and row["matched"] in study.matched
        and row["budget"] in budgets
        and row["seed"] >= study.first_seed
        for row in rows
    )


def _base(spelling: str) -> str:
    return spelling.partition("(")[0].strip()


def _by_name(study: Study, rows: Sequence[Row]) -> Iterator[str]:
    """Options of a study by its name with its overrides, once for each device and dtype."""
    for device, dtype in dict.fromkeys((row["device"], row["dtype"]) for row in rows):
        on_device = [row for row in rows if (row["device"], row["dtype"]) == (device, dtype)]
        words = [f"--study {shlex.quote(study.name)}"]
        models = list(dict.fromkeys(row["model"] for row in on_device))
        words += map(_model, models if tuple(models) != study.models else ())
        files = 1 + max(row["seed"] for row in on_device) - study.first_seed
        words += [f"--files {files}"] if files != study.files else []
        yield " ".join(
            [*words, *_device(device, dtype), *folder_options({row["task"] for row in on_device})]
        )


def _device(device: str, dtype: str) -> Iterator[str]:
    """Options that differ from the defaults."""
    if device != "cpu":
        yield f"--device {device}"
    if dtype != ("float32" if device == "cpu" else "bfloat16"):
        yield f"--dtype {dtype}"


def _question(placement: str, wording: str, model: str) -> Iterator[str]:
    """Options that differ from the defaults."""
    if placement != "after":
        yield f"--question {placement}"
    if wording != Wording.of_model(model, has_chat_template=True).value:
        yield f"--wording {wording}"


def _model(name: str) -> str:
    is_local = name.startswith(("/", ".", "~")) or ("/" in name and Path(name).exists())
    return f"--model {'MODEL_FOLDER' if is_local else shlex.quote(name)}"


def _block_options(study: str, block: Block) -> str:
    """Options of a block of cells."""
    seeds = [int(seed) for seed in block["seed"]]
    policies = [policy for policy in block["policy"] if policy not in CONTROLS]
    controls = [policy for policy in block["policy"] if policy in CONTROLS]
    tasks = [str(task) for task in block["task"]]
    words = [*map(shlex.quote, tasks), f"--tokens {','.join(map(str, block['tokens']))}"]
    words += [f"--files {len(seeds)}"] + ([f"--first-seed {seeds[0]}"] if seeds[0] else [])
    words += [_model(str(model)) for model in block["model"]]
    for option, values in (
        ("--measure", block["measure"]),
        ("--matched", block["matched"]),
        ("--budget", block["budget"]),
        ("--policy", policies),
        ("--control", controls or ["none"]),
    ):
        words += [f"{option} {shlex.quote(str(value))}" for value in values]
    words += _device(str(block["device"][0]), str(block["dtype"][0]))
    words += _question(str(block["question"][0]), str(block["wording"][0]), str(block["model"][0]))
    return " ".join([*words, f"--name {shlex.quote(study)}", *folder_options(tasks)])


Block = dict[str, tuple[str | int, ...]]  # by dimension; budgets are empty for policies without one


def cell_blocks(rows: Sequence[Row]) -> list[Block]:
    """Blocks that contain every cell once: each value of a dimension with each of all others."""
    rows = [CellKey._field_defaults | row for row in rows]
    blocks: list[Block] = [{name: (row[name],) for name in (*DIMENSIONS, *SINGLE)} for row in rows]
    blocks = _merged(blocks, "seed")
    blocks = [part for block in blocks for part in _consecutive_seeds(block)]
    blocks = _with_shared_budgets(_merged(blocks, "budget"))
    for name in DIMENSIONS[2:]:
        blocks = _merged(blocks, name)
    return blocks


def _merged(blocks: Sequence[Block], name: str) -> list[Block]:
    """Blocks that differ only in one dimension, joined."""
    groups: dict[tuple[object, ...], Block] = {}
    for block in blocks:
        rest = tuple(values for key, values in block.items() if key != name)
        merged = groups.setdefault(rest, block | {name: ()})
        merged[name] = tuple(dict.fromkeys((*merged[name], *block[name])))
    return list(groups.values())


def _consecutive_seeds(block: Block) -> Iterator[Block]:
    """Blocks of consecutive seeds: a command has the first one and their number."""
    seeds = sorted(int(seed) for seed in block["seed"])
    starts = [seed for seed in seeds if seed - 1 not in seeds]
    for start, end in zip(starts, [*starts[1:], seeds[-1] + 1], strict=True):
        yield block | {"seed": tuple(seed for seed in seeds if start <= seed < end)}


def _with_shared_budgets(blocks: Sequence[Block]) -> list[Block]:
    """Blocks in which policies without a budget join the commands of others: they run at any
    budget.
    """
    with_budget: dict[tuple[object, ...], Block] = {}

    for block in blocks:
        if not set(block["budget"]) <= {WHOLE, OWN}:
            with_budget.setdefault(_rest_of_block(block), block)
    return [
        block
        | {
            "budget": with_budget[_rest_of_block(block)]["budget"]
            if _rest_of_block(block) in with_budget
            else ()
        }
        if set(block["budget"]) <= {WHOLE, OWN}
        else block
        for block in blocks
    ]


def _rest_of_block(block: Block) -> tuple[object, ...]:
    return tuple(values for key, values in block.items() if key not in ("budget", "policy"))
