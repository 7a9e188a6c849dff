"""Background sweeps of a store in use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from larder.core import StoreSlow
from larder.server import StoreSweeper
from larder.store import Store


def test_sweeper_runs_until_shutdown_despite_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, enough = list[str](), threading.Event()

    def forget_removed() -> None:
        asked.append("removed")
        if len(asked) == 1:
            raise StoreSlow("The disk sleeps.")
        if len(asked) > 6:
            enough.set()

    store = Store(str(tmp_path / "store"), tmp_path)
    monkeypatch.setattr(store.maintenance, "forget_removed", forget_removed)
    monkeypatch.setattr(store.maintenance, "sweep", lambda: asked.append("sweep"))
    with StoreSweeper(store, seconds=0.001, sweep_seconds=0.0):
        assert enough.wait(20)
    assert asked[:4] == ["removed", "sweep", "removed", "sweep"]
    assert store.parts.unwritten.counts() == {"slow": 1}
    assert not [each for each in threading.enumerate() if each.name == "larder sweeping"]
    store.close()
