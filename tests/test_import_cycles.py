"""Imports of our modules, those inside functions included, form no cycle."""

from __future__ import annotations

from collections.abc import Mapping, Set
from graphlib import CycleError, TopologicalSorter

import grimp


def import_cycle(imports: Mapping[str, Set[str]]) -> list[str]:
    """Modules of one cycle, its first one again at the end; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other() -> None:
    graph = grimp.build_graph(
        "larder", "larder_bench", exclude_type_checking_imports=True, cache_dir=None
    )
    imports = {one: graph.find_modules_directly_imported_by(one) for one in graph.modules}
    assert len(imports) > 500
    assert import_cycle(imports) == []


def test_cycle_is_found() -> None:
    assert import_cycle({"a": {"b"}, "b": {"c"}}) == []
    cycle = import_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    assert cycle[0] == cycle[-1] and set(cycle) == {"b", "c"}
