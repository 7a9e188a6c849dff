"""The benchmark of engines over pages, on a CPU."""

from __future__ import annotations

import pytest

from benchmarks import engine_pages


def test_share_of_equal_tokens_ends_at_the_first_difference() -> None:
    assert engine_pages.equal_share([(1, 2, 3, 4)], [(1, 2, 5, 4)]) == 0.5
    assert engine_pages.equal_share([(1, 2), (3,)], [(1, 2), (3,)]) == 1.0
    assert engine_pages.equal_share([(1, 2)], [(1, 2, 3, 4)]) == 0.5


@pytest.mark.slow
def test_benchmark_paths_run_on_a_cpu(capsys) -> None:
    assert engine_pages.main(["--device", "cpu", "--tiny"]) == 0
    assert capsys.readouterr().out.count("equal 1.000") >= 10
