"""The commands that give the same results and figures again.

What lies in a folder of one's own stands as a word in capitals, which rows do not tell.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from larder_bench.reports.study_index import folder_options
from larder_bench.results.budget_labels import OWN, WHOLE
from larder_bench.results.rows import Results, Row, read_results, result_files
from larder_bench.studies.study import CONTROLS, Study, read_study, study_names


def rerun_commands(
    found: Results, paths: Sequence[Path], policies: Sequence[str] = ()
) -> list[str]:
    """Commands that measure each study, then those that plot; of selected policies if given."""
    named = " ".join(shlex.quote(str(path)) for path in paths)
    named += "".join(f" --policy {shlex.quote(policy)}" for policy in policies)
    lines = list(_bench_commands(found, paths))
    return [*lines, f"larder plot {named}", f"larder report {named}"]


def _bench_commands(found: Results, paths: Sequence[Path]) -> Iterator[str]:
    places = _places(found, paths)
    known = study_names()
    for study in dict.fromkeys(row["study"] for row in found.cells):
        own = [row for row in found.cells if row["study"] == study]
        if "command" in own[-1]:  # measured by something else than larder bench
            yield from dict.fromkeys(row["command"] for row in own if "command" in row)
            continue
        written = read_study(study) if study in known else None
        if written is not None and _is_of(written, own):
            spelled = list(_by_name(written, own))
        else:
            spelled = [_block_options(study, block) for block in cell_blocks(own)]
        out = f" --out {shlex.quote(str(places[study]))}" if study in places else ""
        yield from (f"larder bench {words}{out}" for words in spelled)


def _places(found: Results, paths: Sequence[Path]) -> dict[str, Path]:
    """The file of each study, where it stands in one alone."""
    studies = {row["study"] for row in found.cells}
    if len(paths) == 1 and not paths[0].is_dir():
        return dict.fromkeys(studies, paths[0])
    held = {
        path: {row["study"] for row in read_results([path]).cells} for path in result_files(paths)
    }
    homes = {study: [path for path, own in held.items() if study in own] for study in studies}
    return {study: home[0] for study, home in homes.items() if len(home) == 1}


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
    """A study by its name with what its file says otherwise, once for each kind of device."""
    for place in dict.fromkeys((row["device"], row["dtype"]) for row in rows):
        own = [row for row in rows if (row["device"], row["dtype"]) == place]
        words = [f"--study {shlex.quote(study.name)}"]
        models = list(dict.fromkeys(row["model"] for row in own))
        words += map(_model, models if tuple(models) != study.models else ())
        files = 1 + max(row["seed"] for row in own) - study.first_seed
        words += [f"--files {files}"] if files != study.files else []
        yield " ".join([*words, *_device(*place), *folder_options({row["task"] for row in own})])


def _device(device: str, dtype: str) -> Iterator[str]:
    """Options that differ from the defaults."""
    if device != "cpu":
        yield f"--device {device}"
    if dtype != ("float32" if device == "cpu" else "bfloat16"):
        yield f"--dtype {dtype}"


def _model(name: str) -> str:
    is_local = name.startswith(("/", ".", "~")) or ("/" in name and Path(name).exists())
    return f"--model {'MODEL_FOLDER' if is_local else shlex.quote(name)}"


def _block_options(study: str, block: Block) -> str:
    """A block of cells as options."""
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
    return " ".join([*words, f"--name {shlex.quote(study)}", *folder_options(tasks)])


# What two blocks may differ in to become one, the first of it first.
DIMENSIONS = (
    "seed",
    "budget",
    "policy",
    "matched",
    "measure",
    "tokens",
    "task",
    "model",
)
APART = ("device", "dtype")  # one each in a command
Block = dict[str, tuple[str | int, ...]]  # by dimension; budgets are empty where none is chosen


def cell_blocks(rows: Sequence[Row]) -> list[Block]:
    """Blocks that hold every cell once: each value of a dimension with each of all others."""
    found: list[Block] = [{name: (row[name],) for name in (*DIMENSIONS, *APART)} for row in rows]
    found = _merged(found, "seed")
    found = [part for block in found for part in _consecutive_seeds(block)]
    found = _with_shared_budgets(_merged(found, "budget"))
    for name in DIMENSIONS[2:]:
        found = _merged(found, name)
    return found


def _merged(found: Sequence[Block], name: str) -> list[Block]:
    """Commands that differ only in these options, joined."""
    groups: dict[tuple[object, ...], Block] = {}
    for block in found:
        rest = tuple(values for key, values in block.items() if key != name)
        own = groups.setdefault(rest, block | {name: ()})
        own[name] = tuple(dict.fromkeys((*own[name], *block[name])))
    return list(groups.values())


def _consecutive_seeds(block: Block) -> Iterator[Block]:
    """Seeds that follow each other: a command names the first of them and how many."""
    seeds = sorted(int(seed) for seed in block["seed"])
    starts = [seed for seed in seeds if seed - 1 not in seeds]
    for start, end in zip(starts, [*starts[1:], seeds[-1] + 1], strict=True):
        yield block | {"seed": tuple(seed for seed in seeds if start <= seed < end)}


def _with_shared_budgets(found: Sequence[Block]) -> list[Block]:
    """Policies without a budget join the commands of others: any budget runs them."""
    told: dict[tuple[object, ...], Block] = {}
    for block in found:
        if not set(block["budget"]) <= {WHOLE, OWN}:
            told.setdefault(_rest_of_block(block), block)
    return [
        block
        | {"budget": told[_rest_of_block(block)]["budget"] if _rest_of_block(block) in told else ()}
        if set(block["budget"]) <= {WHOLE, OWN}
        else block
        for block in found
    ]


def _rest_of_block(block: Block) -> tuple[object, ...]:
    return tuple(values for key, values in block.items() if key not in ("budget", "policy"))
