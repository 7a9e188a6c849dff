"""The benchmark of decode steps on a GPU, where there is none."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_step


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_reported_in_one_line(capsys) -> None:
    assert gpu_step.main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("No GPU that torch can use was found, so nothing was measured")
    assert len(output.err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of the compiler itself
def test_benchmark_paths_run_on_a_cpu(capsys) -> None:
    assert gpu_step.main(["--device", "cpu", "--tiny"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("CPU, not a GPU")
    assert output.count("DynamicCache") == 2
    assert output.count("graph") == 4


def test_logits_that_differ_stop_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_step, "largest_difference", lambda *_: float("nan"))
    assert gpu_step.main(["--device", "cpu", "--tiny"]) == 1
    assert "no times" in capsys.readouterr().err
