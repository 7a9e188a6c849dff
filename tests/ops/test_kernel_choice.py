"""Choices between kernels: measured once per machine, on one thread, and saved."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import torch

from larder.ops import block_attention
from larder.ops.cpu import gemv, kernel_choice


@pytest.fixture
def measured() -> list[int]:
    """Measurements so far."""
    return []


@pytest.fixture
def choose(measured):
    """Choice that is measured to be 8, of at most 16."""

    def measure() -> int:
        measured.append(8)
        return 8

    return lambda name="rows": kernel_choice.saved_choice(name, measure, 16)


@pytest.fixture
def file(larder_home):
    return larder_home / "kernels" / kernel_choice.FILE


def test_choice_is_measured_once_and_saved(choose, measured, file):
    assert [choose(), choose(), choose("others"), choose("others")] == [8] * 4
    assert len(measured) == 2
    assert list(json.loads(file.read_text()).values()) == [8, 8]


def test_choice_of_a_smaller_range_keeps_the_others(choose, measured, file):
    """Switches of 0 and 1 stand in the file beside counts of rows."""
    choose()
    assert kernel_choice.saved_choice("blocks", lambda: 1, 1) == 1
    assert choose() == 8
    assert len(measured) == 1
    assert list(json.loads(file.read_text()).values()) == [8, 1]


def test_processes_that_save_at_once_lose_no_choice_and_agree(file):
    """Eight processes choose the same names in different order, each to be its own number."""
    processes = [start_process(number) for number in range(8)]
    outputs = [process.communicate(timeout=60) for process in processes]
    answers = [json.loads(out) for out, _ in outputs]
    saved = json.loads(file.read_text())
    assert all(answer == answers[0] for answer in answers), outputs
    assert {key.split(",")[0]: count for key, count in saved.items()} == answers[0]
    assert len(saved) == 20


def start_process(number: int) -> subprocess.Popen[str]:
    """Process that makes twenty choices, and prints them as JSON."""
    code = f"""
import json, random
from larder.core.home import home, measured_count
names = [str(name) for name in range(20)]
random.Random({number}).shuffle(names)
file = home() / "kernels" / {kernel_choice.FILE!r}
found = {{name: measured_count(file, name, lambda: {number}, 16) for name in names}}
print(json.dumps(found))
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", ['"8"', "null", "-1", "3.5", "true", "1e400", "[8]", "17"])
def test_damaged_number_is_measured_again(choose, measured, file, number):
    choose()
    file.write_text(file.read_text().replace(": 8", f": {number}"))
    assert choose() == 8
    assert list(json.loads(file.read_text()).values()) == [8]
    assert len(measured) == 2


@pytest.mark.parametrize("content", [b"{", b"", b"[" * 100_000, b"[8]", b"\xff\xfe\x00", b"8"])
def test_damaged_file_is_replaced(choose, measured, file, content):
    choose()
    file.write_bytes(content)
    assert choose() == 8
    assert list(json.loads(file.read_text()).values()) == [8]
    assert len(measured) == 2


@pytest.mark.parametrize("part", ["_processor", "_library_digest"])
def test_choice_of_another_machine_is_measured_and_both_are_kept(
    choose, measured, file, monkeypatch, part
):
    choose()
    monkeypatch.setattr(kernel_choice, part, lambda: "another")
    monkeypatch.setattr(kernel_choice, "machine", kernel_choice.machine.__wrapped__)
    assert choose() == 8
    assert len(measured) == len(json.loads(file.read_text())) == 2


def test_choice_of_another_torch_is_measured(choose, measured, monkeypatch):
    choose()
    monkeypatch.setattr(kernel_choice, "machine", kernel_choice.machine.__wrapped__)
    monkeypatch.setattr(torch, "__version__", "9.9")
    choose()
    assert len(measured) == 2


def test_choice_without_onednn_is_another(choose, measured, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    choose()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    choose()
    assert len(measured) == 2


def test_read_only_home_measures_every_time(choose, measured, larder_home):
    larder_home.mkdir(exist_ok=True)
    (larder_home / "kernels").write_text("a file where the folder would be")
    assert [choose(), choose()] == [8, 8]
    assert len(measured) == 2


def test_process_that_saved_first_decides(file):
    """Two starts that measure at once, and come to different numbers, run the same kernels."""

    def measure() -> int:
        assert kernel_choice.saved_choice("rows", lambda: 4, 16) == 4
        return 8

    assert kernel_choice.saved_choice("rows", measure, 16) == 4
    assert list(json.loads(file.read_text()).values()) == [4]


def test_measurement_uses_one_torch_thread_and_restores_the_number():
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        kernel_choice.saved_choice("threads", lambda: seen.append(torch.get_num_threads()) or 0, 1)
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert [*seen, torch.get_num_threads()] == [1, 3, 3]
    finally:
        torch.set_num_threads(before)


def test_failed_measurement_restores_the_threads_and_saves_nothing(file):
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        kernel_choice.saved_choice("rows", lambda: 1 // 0, 16)
    assert torch.get_num_threads() == before
    assert not file.exists()


def test_slowdown_is_the_median_ratio_of_calls_in_turn():
    calls = list[str]()
    times = {"ours": iter([9, 2, 2, 100, 1, 2]), "others": iter([1] * 6)}

    def seconds(name: str) -> float:
        calls.append(name)
        return next(times[name])

    assert kernel_choice.slowdown(lambda: seconds("ours"), lambda: seconds("others")) == 2
    assert calls == ["ours", "others"] * 6


@pytest.mark.parametrize(("factor", "expected"), [(0.7, True), (0.9, False)])
def test_torch_kernel_for_one_row_must_be_clearly_faster(monkeypatch, factor, expected):
    monkeypatch.setattr(
        gemv, "_seconds_of_pass", lambda *_: 1 if torch.backends.mkldnn.enabled else factor
    )
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    assert gemv.is_faster_without_onednn.__wrapped__() is expected


@pytest.mark.parametrize(("factor", "expected"), [(0.9, True), (1.1, False)])
def test_block_kernel_must_be_faster(monkeypatch, factor, expected):
    monkeypatch.setattr(block_attention, "slowdown", lambda ours, others: factor)
    assert block_attention.is_faster.__wrapped__(torch.float32, 64) is expected
