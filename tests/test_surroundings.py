"""The guards of conftest.py do guard."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from borders import PACKAGE, UNCHECKED, checked_modules


def test_the_network_is_out_of_reach() -> None:
    with socket.socket() as out, pytest.raises(RuntimeError, match="reached for the network"):
        out.connect(("192.0.2.1", 80))
    with pytest.raises(RuntimeError, match="reached for the network"):
        socket.create_connection(("example.org", 80), timeout=1)


def test_this_machine_is_in_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


def test_home_is_the_tests_own(larder_home: Path, tmp_path: Path) -> None:
    assert Path(os.environ["LARDER_HOME"]) == larder_home
    assert larder_home.is_relative_to(tmp_path)


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_draws_the_same_numbers(turn: int) -> None:
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    assert drawn == pytest.approx((0.8444218515, 0.5488135039, 0.4962565899))


def test_wrong_types_are_noticed() -> None:
    from larder.core.conversation import Message

    with pytest.raises(Exception, match=r"role|str"):
        Message(role=3, content="")  # type: ignore[arg-type]


def test_every_module_but_the_kernels_is_checked() -> None:
    modules = set(checked_modules(PACKAGE, UNCHECKED))
    assert "larder.core" in modules
    assert not {"larder", "larder.ops", "larder.ops.fast"} & modules
