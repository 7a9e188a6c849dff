"""File systems that fail or hang on purpose."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from larder.store import FileInfo, FileSystem, open_file_system


class Faulty(FileSystem):
    """A place with a hook before and after each change of it, and before each reading.

    Args:
        before, after: told what is done and where; may raise, wait, or end the process.
    """

    def __init__(
        self,
        inner: FileSystem,
        before: Callable[[str, str], None] = lambda what, path: None,
        after: Callable[[str, str], None] = lambda what, path: None,
    ) -> None:
        self.inner, self.before, self.after = inner, before, after
        self.url = inner.url

    def create(self, path: str, data: bytes) -> None:
        self.before("create", path)
        self.inner.create(path, data)
        self.after("create", path)

    def replace(self, path: str, data: bytes) -> None:
        self.before("replace", path)
        self.inner.replace(path, data)
        self.after("replace", path)

    def read(self, path: str) -> bytes:
        self.before("read", path)
        return self.inner.read(path)

    def size(self, path: str) -> int | None:
        self.before("size", path)
        return self.inner.size(path)

    def touch(self, path: str, data: bytes) -> None:
        self.before("touch", path)
        self.inner.touch(path, data)

    def remove(self, path: str) -> None:
        self.before("remove", path)
        self.inner.remove(path)
        self.after("remove", path)

    def set_aside(self, path: str) -> None:
        self.before("set_aside", path)
        self.inner.set_aside(path)

    def list_files(self, folder: str) -> Iterator[FileInfo]:
        self.before("listing", folder)
        yield from self.inner.list_files(folder)


def refusing(number: int, *changes: str) -> Callable[[str, str], None]:
    """A hook by which some changes fail with an error of the operating system."""

    def hook(what: str, path: str) -> None:
        if what in changes:
            raise OSError(number, os.strerror(number), path)

    return hook


FULL, BROKEN, READ_ONLY, QUOTA = errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT


class Hanging:
    """A folder where one kind of change, once that is `armed`, waits until it may go on.

    Args:
        what: the change, as `Faulty` tells it.
        under: how the paths begin that it is made at.
    """

    def __init__(self, folder: Path, what: str, under: str) -> None:
        self._told = what, under
        self.armed, self.hangs = threading.Event(), threading.Event()
        self.landed, self.go = threading.Event(), threading.Event()
        inner = open_file_system(str(folder / "store"))
        self.place = Faulty(inner, before=self._before, after=self._after)

    def _is_meant(self, what: str, path: str) -> bool:
        return what == self._told[0] and path.startswith(self._told[1]) and self.armed.is_set()

    def _before(self, what: str, path: str) -> None:
        if self._is_meant(what, path):
            self.hangs.set()
            assert self.go.wait(60)

    def _after(self, what: str, path: str) -> None:
        if self._is_meant(what, path):
            self.landed.set()

    def lands(self) -> None:
        self.go.set()
        assert self.landed.wait(20)
