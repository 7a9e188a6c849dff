"""Blobs that several processes or machines need: whoever drops one looks after the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from larder.store.blobs import path_of
from larder.store.envelopes import token_log
from larder.store.store import Store
from larder.store.turns import Turn
from store.caches import IDS, TALK, WHO, load, save, store_at

pytestmark = pytest.mark.usefixtures("small_chunks")


def said(store: Store, name: str = TALK) -> bytes:
    found = store.turns.newest(WHO, name)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("how", ["put", "stays"])
def test_21_what_another_process_is_about_to_need_is_not_dropped(tmp_path: Path, how: str) -> None:
    here, there = store_at(tmp_path), store_at(tmp_path)
    save(here)
    tenant, ref = here.parts.tenant(WHO), load(here).record.tokens
    with there.parts.shelves.saving(tenant) as saving:
        if how == "put":
            assert saving.put(token_log(IDS, tenant)) == ref
        else:
            assert saving.stays(ref)
        here.sessions.remove(WHO, TALK)
        os.utime(tmp_path / "store" / path_of(ref.digest), (0, 0))
        here.upkeep.sweep()
        assert there.parts.blobs.has(ref)
    assert not there.parts.blobs.has(ref)  # it has put it last, and nothing came of it


def test_21_a_fork_that_goes_on_elsewhere_leaves_what_it_was_made_of(tmp_path: Path) -> None:
    here, there = (store_at(tmp_path, home=home, kept_epochs=2) for home in ("here", "there"))
    here.turns.append(WHO, TALK, Turn(IDS, b"said"), 0)
    here.sessions.fork(WHO, TALK, "fork")
    for number in range(2, 5):
        there.turns.append(WHO, "fork", Turn((*IDS, number), b"%d" % number), number - 1)
    there.upkeep.sweep(grace_seconds=-1.0)
    assert said(here) == said(store_at(tmp_path, home="new")) == b"said"
    assert load(here).ids == IDS


def test_21_a_log_that_another_machine_has_written_too_stays(tmp_path: Path) -> None:
    here, there = (store_at(tmp_path, home=home, kept_epochs=1) for home in ("here", "there"))
    here.turns.append(WHO, TALK, Turn(IDS, b"said"), 0)
    there.turns.append(WHO, "alike", Turn(IDS, b"said"), 0)
    there.turns.append(WHO, "alike", Turn((*IDS, 1), b"more"), 1)
    assert said(here) == b"said" and load(here).ids == IDS
    there.sessions.remove(WHO, "alike")
    assert said(here) == b"said"
    here.sessions.remove(WHO, TALK)
    assert there.upkeep.sweep(grace_seconds=-1.0) == 0
