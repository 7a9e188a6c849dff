"""Isolation of tenants in a store: in pairs, on disk, after a restart, and by operations made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from larder.store import open_file_system
from store.caches import IDS, LONGER, SPEC, WHO, asking, read, save, snapshot, store_at
from store.file_systems import Faulty

pytestmark = pytest.mark.usefixtures("small_chunks")
OTHER = "somebody else"


@pytest.mark.failure(number=27)
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_saved_data_is_found_by_its_tenant_only(tmp_path: Path, codec: str) -> None:
    store = store_at(tmp_path)
    save(store, codec=codec)
    for again in (store, store_at(tmp_path), store_at(tmp_path, home="another home")):
        hit = again.prefixes.match_prefix(WHO, LONGER, asking().identity, SPEC)
        assert (hit is not None) == (codec == "raw")  # what lost something is shared with nobody
        assert again.prefixes.match_prefix(OTHER, LONGER, asking().identity, SPEC) is None
        own = again.sessions.load(WHO, "talk", asking())
        assert own is not None and own.cache is not None
        assert again.sessions.load(OTHER, "talk", asking()) is None
        assert again.sessions.heads(OTHER) == []


def operations_of(folder: Path, do: Callable[..., object], *args: object) -> list[str]:
    """Every statement and every call to the disk that something takes, in a new process's store."""
    done: list[str] = []
    file_system = Faulty(
        open_file_system(str(folder / "store")),
        lambda what, path: done.append(f"{what} {path[:6]}"),
    )
    store = store_at(folder, file_system)
    store.parts.manifest._database.set_trace_callback(
        lambda text: done.append(" ".join(text.split()[:4]))
    )
    done.clear()
    do(store, *args)
    store.close()
    return done


@pytest.mark.failure(number=27)
def test_prefix_of_another_tenant_costs_as_much_as_an_unknown_one(tmp_path: Path) -> None:
    def match_prefix(store: object, who: str, ids: tuple[int, ...]) -> None:
        store.prefixes.match_prefix(who, ids, asking().identity, SPEC)  # pyright: ignore

    save(store_at(tmp_path))
    theirs, unknown = (
        operations_of(tmp_path, match_prefix, OTHER, LONGER),
        operations_of(tmp_path, match_prefix, OTHER, LONGER[::-1]),
    )
    assert theirs == unknown and 0 < len(theirs) < len(
        operations_of(tmp_path, match_prefix, WHO, LONGER)
    )


@pytest.mark.failure(number=27)
def test_save_of_another_tenants_data_costs_as_much_as_new_data(tmp_path: Path) -> None:
    def save_session(store: object, who: str, name: str, ids: tuple[int, ...]) -> None:
        store.sessions.save(who, name, ids, snapshot(read(ids)), transcript=bytes(ids))  # pyright: ignore

    operations_of(tmp_path, save_session, WHO, "talk", IDS)
    before = set((tmp_path / "store" / "blobs").rglob("*.safetensors"))
    theirs = operations_of(tmp_path, save_session, OTHER, "talk", IDS)
    added = set((tmp_path / "store" / "blobs").rglob("*.safetensors")) - before
    unknown = operations_of(tmp_path, save_session, OTHER, "new", IDS[::-1])
    assert len(added) == len(before)  # no object of one tenant is one of another's
    assert [each for each in theirs if "blobs" in each] == [
        each for each in unknown if "blobs" in each
    ]
    assert len(theirs) == len(unknown)


@pytest.mark.failure(number=29)
def test_session_of_another_tenant_costs_as_much_as_a_missing_one(tmp_path: Path) -> None:
    def load_session(store: object, name: str) -> None:
        assert store.sessions.load(OTHER, name, asking()) is None  # pyright: ignore

    save(store_at(tmp_path))
    assert operations_of(tmp_path, load_session, "talk") == operations_of(
        tmp_path, load_session, "none"
    )
