"""Durable turns of a server that is killed on a full disk."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from larder import Engine
from larder.models import LoadedModel
from larder.server import ApiError, Durability, LocalEngineClient, Request
from larder.store import FileSystem, LocalFileSystem, open_file_system
from server_core import box_question
from server_engine_clients import Waiting
from server_stores import Stored

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
CHATS = 16
DISK_BYTES = 512 << 10  # of which the index takes the most
BLOB_BYTES = 14 << 10


class LimitedFileSystem(LocalFileSystem):
    """File system with room for a number of bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__(folder)
        self._left = limit

    def create(self, path: str, data: bytes) -> None:
        self._take(len(data))
        super().create(path, data)

    def replace(self, path: str, data: bytes) -> None:
        self._take(len(data))
        super().replace(path, data)

    def _take(self, count: int) -> None:
        if count > self._left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._left -= count


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system in memory, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={DISK_BYTES}".encode()
    if not hasattr(libc, "mount") or libc.mount(*arguments) != 0:
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        libc.umount2(os.fsencode(folder), 2)  # lazily: the store may have files open


def chats(
    loaded: LoadedModel, folder: Path, place: FileSystem, durability: Durability
) -> Iterator[object]:
    """Answers as they are told: the session, the text, and whether the turn is durable; `None` for
    one that is refused."""
    stored = Stored(loaded, folder, durability, place=place)
    hub = LocalEngineClient(
        Engine(loaded, policy="full"), persistence=stored.persistence, disk=stored.disk
    )
    for number in range(CHATS):
        name, client = f"n{number}", Waiting()
        with suppress(ApiError):
            hub.submit(Request("a", tuple(box_question(number)), name, max_new_tokens=4), client)
            assert client.over.wait(30)
        if client.report is None:
            yield name, None, None
        else:
            yield name, client.text, client.report.durable
    os.kill(os.getpid(), signal.SIGKILL)


def killed(say: Callable[[], Iterator[object]]) -> list[tuple[str, str | None, bool | None]]:
    """Lines that a forked process writes until it is killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            for line in say():
                os.write(writing, json.dumps(line).encode() + b"\n")
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading) as lines:
        heard = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return [(name, text, durable) for name, text, durable in heard]


def check(
    heard: list[tuple[str, str | None, bool | None]], later: Stored, durability: Durability
) -> None:
    """Check that durable turns are stored word for word, and refused ones are not."""
    assert len(heard) == CHATS
    for name, text, durable in heard:
        if durable:
            [turn] = later.core.find("a", name).turns
            assert text is not None and turn.text == text.strip()
        elif text is None:
            with pytest.raises(ApiError, match="no session"):
                later.core.find("a", name)
    durables = [durable for _, _, durable in heard]
    assert True in durables
    assert (None if durability is Durability.STRICT else False) in durables
    assert (False if durability is Durability.STRICT else None) not in durables


@pytest.mark.failure(number=4)
@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("durability", [Durability.TURN, Durability.STRICT])
def test_durable_turns_survive_a_full_disk_and_a_kill(
    small: LoadedModel, tmp_path: Path, durability: Durability
) -> None:
    place = LimitedFileSystem(tmp_path / "blobs", BLOB_BYTES)
    heard = killed(lambda: chats(small, tmp_path, place, durability))
    check(
        heard, Stored(small, tmp_path, place=open_file_system(str(tmp_path / "blobs"))), durability
    )


@pytest.mark.failure(number=4)
@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("durability", [Durability.TURN, Durability.STRICT])
def test_durable_turns_survive_a_full_file_system_and_a_kill(
    small: LoadedModel, mounted: Path, tmp_path: Path, durability: Durability
) -> None:
    heard = killed(
        lambda: chats(small, mounted, open_file_system(str(mounted / "blobs")), durability)
    )
    copy = shutil.copytree(mounted, tmp_path / "copy")  # so that it can be opened
    check(heard, Stored(small, copy, place=open_file_system(str(copy / "blobs"))), durability)
