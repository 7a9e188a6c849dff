"""Files of a store changed at random: loads are right or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_stores import same_bits
from larder import LarderError
from larder.server import SessionLeases
from larder.store import Store
from store.caches import IDS, LONGER, WHO, asking, compressed, files, read, snapshot, store_at

pytestmark = pytest.mark.usefixtures("small_chunks")
TALKS = ("raw", "int4", "dropped")
EXPORTED = "exported.larder"


def cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def longer(data: bytes, rng: Random) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 64))


def flipped(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwritten(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.randrange(1, 1024))
    what = bytes(stop - start) if rng.random() < 0.5 else rng.randbytes(stop - start)
    return data[:start] + what + data[stop:]


def replaced(data: bytes, rng: Random) -> bytes:
    return rng.randbytes(rng.randrange(2 * len(data) + 1))


def digits(data: bytes, rng: Random) -> bytes:
    """Numbers become others: what stands in JSON and headers stays JSON."""
    indices = [place for place, byte in enumerate(data) if 48 <= byte < 58]
    changed = bytearray(data)
    for place in rng.sample(indices, min(len(indices), rng.randrange(1, 6))):
        changed[place] = rng.randrange(48, 58)
    return bytes(changed)


CHANGES: dict[str, Callable[[bytes, Random], bytes]] = {
    change.__name__: change for change in (cut, longer, flipped, overwritten, replaced, digits)
}
WAYS = (*CHANGES, "gone", "another's")


@dataclass(frozen=True)
class Damage:
    """One file, and what becomes of it."""

    place: float
    way: str
    seed: int

    def apply(self, folder: Path) -> None:
        every = files(folder, ".")
        file, rng = every[int(self.place * len(every))], Random(self.seed)
        if self.way == "gone":
            file.unlink()
        elif self.way == "another's":
            file.write_bytes(rng.choice(every).read_bytes())
        else:
            data = file.read_bytes()
            file.write_bytes(CHANGES[self.way](data, rng) if data else rng.randbytes(9))


damages = st.lists(
    st.builds(
        Damage, st.floats(0, 1, exclude_max=True), st.sampled_from(WAYS), st.integers(0, 2**32)
    ),
    min_size=1,
    max_size=3,
)


@pytest.fixture
def whole(tmp_path: Path, small_chunks: None) -> Path:
    """A store with a file of every kind."""
    folder = tmp_path / "whole"
    store = store_at(folder)
    for number, name in enumerate(TALKS):
        cache = compressed(IDS) if name == "dropped" else read(IDS)
        codec = "int4" if name == "int4" else "raw"
        store.sessions.save(WHO, name, IDS[:9], transcript=b"before")
        store.sessions.save(WHO, name, IDS, snapshot(cache, codec), transcript=b"said %d" % number)
    store.sessions.save(WHO, "gone", IDS)
    store.sessions.remove(WHO, "gone")
    SessionLeases(store.parts).take(WHO, "raw")
    store.sessions.save(WHO, "again", IDS, snapshot(read(IDS)))
    [record] = [record for record in store.sessions.heads(WHO) if record.name == "raw"]
    (folder / EXPORTED).write_bytes(store.sessions.export(record))
    store.close()
    return folder


def run_every_operation(folder: Path) -> None:
    """Everything that one does with a store; errors that are none of ours end the test."""
    store = store_at(folder)
    try:
        for name in (*TALKS, "again", "gone"):
            check(store, name)
        store.sessions.heads(WHO)
        store.maintenance.verify(store.sessions.heads())
        store.maintenance.forget_removed(0.0)
        store.maintenance.sweep(0.0)
        import_session(store, folder / EXPORTED)
        check(store, "raw")
        SessionLeases(store.parts).take(WHO, "int4")
        longest = store.prefixes.match_prefix(WHO, LONGER, asking().identity, asking().spec)
        if longest is not None:
            text = LONGER[: longest.next_position]
            assert same_bits(longest.state(), read(text).state())
        store.sessions.save(WHO, "new", IDS, snapshot(read(IDS)))
        check(store, "new")
    finally:
        store.close()


def check(store: Store, name: str) -> None:
    """The session is as it was saved, at one of its states, or it is refused."""
    try:
        found = store.sessions.load(WHO, name, asking())
    except LarderError:
        return
    if found is None:
        return
    assert found.ids in (IDS, IDS[:9])
    if found.cache is None:
        assert found.reason
    elif name != "int4":
        made = compressed(IDS) if name == "dropped" else read(IDS)
        assert same_bits(found.cache.state(), made.state())


def import_session(store: Store, file: Path) -> None:
    if not file.exists():
        return
    try:
        store.sessions.import_file(file.read_bytes(), WHO, "taken in")
    except LarderError:
        return
    check(store, "taken in")


def attempt(whole: Path, tmp_path: Path, tries: int, is_same: bool) -> None:
    @settings(
        max_examples=tries,
        deadline=None,
        derandomize=is_same,
        suppress_health_check=list(HealthCheck),
    )
    @given(damages)
    def damaged(reports: list[Damage]) -> None:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        for each in reports:
            each.apply(folder)
        try:
            run_every_operation(folder)
        except LarderError as error:
            assert str(error)

    damaged()


@pytest.mark.extended
def test_random_changes_are_harmless_or_refused(whole: Path, tmp_path: Path) -> None:
    run_every_operation(whole)
    attempt(whole, tmp_path, 12, is_same=True)


@pytest.mark.stress
def test_many_random_changes_are_harmless_or_refused(whole: Path, tmp_path: Path) -> None:
    attempt(whole, tmp_path, 1500, is_same=False)
