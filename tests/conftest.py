"""Fixtures of every test: seeds, no network, a private home folder, checked shapes."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import socket
import ssl
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

# With what is loaded out of sight, the collector takes every young object for a flood: it looked
# through all of them for a twelfth of the suite's time.
gc.set_threshold(20_000, 20, 20)
# Read once by the libraries below, so set before they are imported.
# On tiny operations torch's threads wait for each other; numba's are tested with two.
THREADS, KERNEL_THREADS = "1", str(min(2, os.cpu_count() or 1))
os.environ.setdefault("OMP_NUM_THREADS", THREADS)
os.environ.setdefault("NUMBA_NUM_THREADS", KERNEL_THREADS)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else the second spins until the next kernel
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Stores of tests are thousands of small files, which some disks take longer to delete than to test.
IN_MEMORY, ROOM_BYTES = Path("/dev/shm"), 4 << 30
if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free >= ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

import numpy as np
import pytest
import torch
from hypothesis import settings

from type_checking import PACKAGE, UNCHECKED, begin_test, check_imports, checked_modules

SEED = 0
# Else warnings are printed to standard error, which tests of commands read.
logging.getLogger().addHandler(logging.NullHandler())
check_imports(checked_modules(PACKAGE, UNCHECKED))

# The same examples on every run and no deadline: a slow machine is not a failure.
# `--hypothesis-profile=thorough` looks further, at other examples every time.
settings.register_profile("larder", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("larder")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without looking for garbage, and never look through what is loaded then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def seeded() -> None:
    begin_test()
    random.seed(SEED)
    np.random.seed(SEED)
    torch.default_generator.manual_seed(SEED)
    if torch.cuda.is_available():  # without, torch remembers who seeded it: a stack for every test
        torch.cuda.manual_seed_all(SEED)


@pytest.fixture(scope="session", autouse=True)
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Home of fixtures of wider scope, in place of that of the user who runs the tests."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LARDER_HOME", str(home))
        patch.setenv("LARDER_RECALL_BREAK_EVEN", "0")  # no machine decides what a test searches
        yield home


@pytest.fixture(scope="session", autouse=True)
def unflushed() -> Iterator[None]:
    """No test waits for a disk: what is written here need not survive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr("larder.store.sqlite.SYNCHRONOUS", "OFF")
        yield


@pytest.fixture(scope="session", autouse=True)
def one_trust_store() -> Iterator[None]:
    """Clients that speak to this machine alone read the world's certificates once, not each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def numbers() -> Iterator[int]:
    """No two of them are the same."""
    return count()


@pytest.fixture(autouse=True)
def larder_home(
    session_home: Path, numbers: Iterator[int], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The test's own LARDER_HOME, which does not exist until something is kept."""
    home = session_home / f"test-{next(numbers)}"
    monkeypatch.setenv("LARDER_HOME", str(home))
    return home


@pytest.fixture
def measured_once(session_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrations of a model are kept for all tests that ask for this, not by each test."""
    monkeypatch.setattr("larder.models.calibration.home", lambda: session_home)
    monkeypatch.setattr(
        "larder.cache.transform_tables.measured_path",
        lambda fingerprint, name: session_home / fingerprint / f"{name}.safetensors",
    )


def is_local(address: Any) -> bool:
    """A path of a Unix socket, or this machine's own loopback."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0] or "localhost")
    return host in ("localhost", "::1") or host.startswith("127.")


def refuse(address: Any) -> NoReturn:
    raise RuntimeError(f"a test reached for the network: {address}")


@pytest.fixture(scope="session", autouse=True)
def offline() -> Iterator[None]:
    """Connecting or looking up a name beyond this machine raises: no test needs the network."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex
    look_up = socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: Any) -> None:
        return connect(self, address) if is_local(address) else refuse(address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        return connect_ex(self, address) if is_local(address) else refuse(address)

    def guarded_look_up(host: Any, *rest: Any, **named: Any) -> Any:
        return look_up(host, *rest, **named) if is_local((host,)) else refuse(host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
        patch.setattr(socket, "getaddrinfo", guarded_look_up)
        yield


@pytest.fixture(scope="session")
def seed_model() -> Any:
    """The bundled model, loaded once for all tests that leave it as it is."""
    from larder.models import load

    return load()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of published data sets beside the checkout; the test is skipped without it."""
    folder = PACKAGE.parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}")
    return folder
