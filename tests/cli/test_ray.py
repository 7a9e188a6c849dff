"""`--ray`: errors that need no cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cli_results import Run, complaint
from larder.core import UsageError
from larder.server import check_store, error_reason


@pytest.mark.parametrize(
    "words", [["serve", "--ray", "--port", "0"], ["bench", "passkey", "--ray"]]
)
def test_missing_ray_is_named(run: Run, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, None)
    message = complaint(run(*words), 1)
    assert (
        f"'larder {words[0]} --ray' needs Ray" in message and "pip install 'larder[ray]'" in message
    )


def test_replicas_without_ray_are_refused(run: Run) -> None:
    message = complaint(run("serve", "--replicas", "3", "--port", "0"), 2)
    assert message == "--replicas needs --ray: add --ray, or leave --replicas out."


def test_several_machines_without_a_shared_store_are_refused(tmp_path: Path) -> None:
    check_store(None, 1)
    check_store(str(tmp_path), 2)
    with pytest.raises(UsageError, match="2 machines, so they need one store: give --store URL"):
        check_store(None, 2)


def test_replica_start_error_is_extracted() -> None:
    result = """Traceback (most recent call last):
      File "x.py", line 3, in load
    larder.core.errors.ModelError: The model 'x' cannot be loaded: give a local folder.
    """
    assert error_reason(result) == "The model 'x' cannot be loaded: give a local folder."
    assert error_reason("Too few processors.\n") == "Too few processors."
    assert error_reason("") == "Ray gives no reason."
