"""The list of mutations fits the sources that it changes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_mutation_has_its_text_once_and_its_tests() -> None:
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "benchmarks/mutations.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    assert len(module.MUTATIONS) >= 15
    for name, each in module.MUTATIONS.items():
        text = (ROOT / "src" / "larder" / each.file).read_text(encoding="utf-8")
        assert text.count(each.old) == 1 and each.old != each.new, name
        assert all((ROOT / "tests" / test).is_file() for test in each.tests), name
