"""Sealing of archives that were written without a key or in the first format."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from larder.core import Damaged, StoreError
from larder.server import RESPONSE, TABLE, Archive, seal_archive
from larder.store import AesGcmEncryption, Encryption, NoEncryption, encryption_for
from server.http.archive_fixtures import ANNE, KEY, ONE, OTHER, archive_contents, fill, opened

pytest.importorskip("cryptography")


def in_the_open_at(folder: Path) -> None:
    with opened(folder, None) as archive:
        fill(archive)


def of_the_first_version(folder: Path, sealing: Encryption | None = None) -> None:
    """Bodies sealed, and tenants, ids, parents and order in the open."""
    sealing = sealing or encryption_for(KEY, "archive")
    with closing(Archive()) as before, closing(sqlite3.connect(folder / "archive.sqlite")) as base:
        fill(before)
        base.executescript(TABLE)
        for tenant, kind, name, parent, place, made, _, body in before._base.execute(
            "SELECT * FROM documents"
        ).fetchall():
            closed = sealing.encrypt(tenant, body.encode(), f"{kind}/{name}")
            own = (tenant, kind, name, parent, place, made, len(closed), closed)
            base.execute("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)", own)
        base.commit()


@pytest.mark.parametrize("written", [in_the_open_at, of_the_first_version])
def test_unsealed_or_first_format_archive_is_refused_until_sealed(
    tmp_path: Path, written: Callable[[Path], None]
) -> None:
    written(tmp_path)
    path, sealing = tmp_path / "archive.sqlite", encryption_for(KEY, "archive")
    with pytest.raises(StoreError, match="larder cache seal"), opened(tmp_path):
        pass
    assert seal_archive(path, sealing) == 20 and seal_archive(path, sealing) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["archive.sqlite"]
    assert b"says" not in path.read_bytes() and ANNE.encode() not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with opened(tmp_path) as archive, closing(Archive()) as other:
        fill(other)
        assert archive_contents(archive) == archive_contents(other)


@pytest.mark.parametrize("step", ["os.replace", "sqlite3.connect"])
def test_interrupted_sealing_changes_nothing(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_open_at(tmp_path)
    path = tmp_path / "archive.sqlite"

    def fail(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(step, fail)
        seal_archive(path, encryption_for(KEY, "archive"))
    assert [file.name for file in tmp_path.iterdir()] == ["archive.sqlite"]
    with opened(tmp_path, None) as archive:
        assert len(archive.items(ANNE, ONE)) == 3


def test_archive_in_use_or_of_another_key_is_not_sealed(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    in_the_open_at(tmp_path / "used")
    with opened(tmp_path / "used", None) as archive:
        archive.get(ANNE, RESPONSE, "resp_1")
        with pytest.raises(StoreError, match="stop the server"):
            seal_archive(tmp_path / "used" / "archive.sqlite", encryption_for(KEY, "archive"))
        assert len(archive.items(ANNE, ONE)) == 3
    of_the_first_version(tmp_path, AesGcmEncryption(OTHER, b"larder archive"))
    with pytest.raises(Damaged, match="do not open with this key"):
        seal_archive(tmp_path / "archive.sqlite", encryption_for(KEY, "archive"))
    assert seal_archive(tmp_path / "none.sqlite", NoEncryption()) == 0


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_archive_file_is_readable_by_its_user_only(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with opened(tmp_path / "server", None) as archive:
            fill(archive)
            modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "server").iterdir()}
    finally:
        os.umask(before)
    assert modes == {0o600}
