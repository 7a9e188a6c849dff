"""Local file system: a folder of this machine, or a mounted one.

Content is written to a temporary file, flushed to the disk and renamed; the folder is flushed as
well. A crash leaves at most a temporary file.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from larder.store.fs.base import QUARANTINE_FOLDER, TEMPORARY_FOLDER, FileInfo, FileSystem

# Errors of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
MAX_ATTEMPTS = 8


class LocalFileSystem(FileSystem):
    """Objects as files."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.url = str(self.folder)

    def create(self, path: str, data: bytes) -> None:
        target = self._at(path)
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        temporary = self._write_temporary(data)
        try:
            self._place_file(_link_new, temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        _fsync_folder(target.parent)

    def replace(self, path: str, data: bytes) -> None:
        target, temporary = self._at(path), self._write_temporary(data)
        try:
            self._place_file(os.replace, temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        _fsync_folder(target.parent)

    def read(self, path: str) -> bytes:
        return self._at(path).read_bytes()

    def size(self, path: str) -> int | None:
        try:
            return self._at(path).stat().st_size
        except FileNotFoundError:
            return None

    def touch(self, path: str, data: bytes) -> None:
        try:
            os.utime(self._at(path))
        except FileNotFoundError:
            self.replace(path, data)

    def remove(self, path: str) -> None:
        target = self._at(path)
        target.unlink(missing_ok=True)
        with suppress(OSError):  # it fails unless the folder is empty
            target.parent.rmdir()

    def set_aside(self, path: str) -> None:
        self._make_folder(self.folder / QUARANTINE_FOLDER)
        try:
            os.replace(self._at(path), self.folder / QUARANTINE_FOLDER / path.rpartition("/")[2])
        except FileNotFoundError:
            return

    def list_files(self, folder: str) -> Iterator[FileInfo]:
        for parent, _, names in os.walk(self.folder / folder):
            for name in names:
                file = Path(parent, name)
                try:
                    found = file.stat()
                except FileNotFoundError:  # deleted since the folder was read
                    continue
                path = file.relative_to(self.folder).as_posix()
                yield FileInfo(path, found.st_size, found.st_mtime)

    def _at(self, path: str) -> Path:
        return self.folder / path

    def _place_file(
        self, place: Callable[[Path, Path], object], temporary: Path, target: Path
    ) -> None:
        """Move a file into its folder, which another process may just have removed as empty."""
        for _ in range(MAX_ATTEMPTS):
            self._make_folder(target.parent)
            try:
                place(temporary, target)
            except FileNotFoundError:
                continue
            return
        self._make_folder(target.parent)
        place(temporary, target)

    def _make_folder(self, folder: Path) -> None:
        """Create a folder and flush every parent that gained an entry."""
        missing = [folder]
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        folder.mkdir(parents=True, exist_ok=True)
        for made in missing:
            _fsync_folder(made.parent)

    def _write_temporary(self, data: bytes) -> Path:
        """Write a flushed temporary file."""
        folder = self.folder / TEMPORARY_FOLDER
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # not readable by other users
        folder.mkdir(exist_ok=True)
        temporary = folder / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary


def _link_new(temporary: Path, target: Path) -> None:
    """Link a file to its name unless the name exists."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # the name is taken
        os.replace(temporary, target)


def _fsync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
