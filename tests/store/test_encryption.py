"""Encrypted stores: no plaintext, no sharing across tenants, no moved ciphertext."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from larder.core import Damaged, InputError, StoreError
from larder.store import (
    KEY_PATH,
    AesGcmEncryption,
    NoEncryption,
    Store,
    common_prefix_len,
    prefix_digest,
    read_key,
    token_bytes,
)
from store.caches import (
    IDS,
    LONGER,
    SPEC,
    TALK,
    WHO,
    asking,
    blob_files,
    compressed,
    files,
    is_exact,
    load,
    read,
    save,
    snapshot,
    store_at,
)

pytest.importorskip("cryptography")
pytestmark = pytest.mark.usefixtures("small_chunks")
KEY, OTHER = b"k" * 32, b"o" * 32
SAID = b"what was said, as text"


def filled(folder: Path, key: bytes | None = KEY) -> Store:
    """A store with a shared beginning, what lost something, and another tenant's session."""
    store = store_at(folder, key=key)
    store.sessions.save(WHO, TALK, IDS, snapshot(read(IDS)), transcript=SAID)
    store.sessions.save(WHO, "lossy", LONGER, snapshot(compressed(LONGER), "int8"))
    store.sessions.save("somebody else", TALK, IDS, snapshot(read(IDS)), transcript=SAID)
    return store


def test_store_folders_are_private_to_their_user(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    assert [(tmp_path / each).stat().st_mode & 0o077 for each in ("home", "store")] == [0, 0]


def test_encrypted_store_round_trips(tmp_path: Path) -> None:
    filled(tmp_path).close()
    for home in ("home", "another home"):
        store = store_at(tmp_path, key=KEY, home=home)
        loaded = load(store)
        assert is_exact(loaded) and loaded.cache is not None and loaded.transcript == SAID
        assert load(store, "lossy").cache is not None
        found = store.prefixes.match_prefix(WHO, LONGER, asking().identity, SPEC)
        assert found is not None and found.next_position == 20
        assert not store.parts.refusals.counts()
        assert [c.problems for c in store.maintenance.verify(store.sessions.heads())] == [()] * 3
        store.close()


def readable_words(store: Store, folder: Path) -> set[bytes]:
    """Words of a text, its names and its format that are readable in any file under a folder.

    Each word has at least eight bytes: random bytes hold a shorter one now and then.
    """
    store.parts.manifest._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    tokens = [b"".join(i.to_bytes(4, order) for i in IDS[:4]) for order in ("little", "big")]
    digest = prefix_digest(IDS[:4]).encode()
    words = [SAID, b"transcript", b"kvm_digest", digest, *tokens]
    held = [path.read_bytes() for path in [*files(folder), *files(folder, "home")]]
    return {word for word in words if any(word in data for data in held)}


@pytest.mark.extended
def test_encrypted_store_has_no_plaintext(tmp_path: Path) -> None:
    assert len(readable_words(filled(tmp_path / "open", key=None), tmp_path / "open")) == 5
    sealed = filled(tmp_path / "sealed")
    [own] = [r for r in sealed.sessions.heads(WHO) if r.name == TALK]
    assert own.transcript is not None
    assert readable_words(sealed, tmp_path / "sealed") == set()


def test_encrypted_blobs_are_shared_within_a_tenant_only(tmp_path: Path) -> None:
    store = filled(tmp_path)
    before = set(blob_files(tmp_path))
    again = store.sessions.save(WHO, "again", IDS, snapshot(read(IDS)), transcript=SAID)
    assert len(set(blob_files(tmp_path)) - before) == 2  # its log and its transcript
    assert again.spans == load(store).record.spans
    own, theirs = (
        {ref for record in store.sessions.heads(who) for ref in record.refs}
        for who in (WHO, "somebody else")
    )
    assert not own & theirs and len({path.read_bytes() for path in before}) == len(before)


@pytest.mark.extended
def test_wrong_or_missing_key_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "a").close()
    for key, message in ((OTHER, "another key"), (None, "give --key-file")):
        with pytest.raises(StoreError, match=message):
            store_at(tmp_path / "a", key=key)
    filled(tmp_path / "b", key=None).close()
    with pytest.raises(StoreError, match="begun without a key"):
        store_at(tmp_path / "b", key=KEY)
    (tmp_path / "a" / "store" / KEY_PATH).write_bytes(b"{}")
    with pytest.raises(StoreError, match="put it back"):
        store_at(tmp_path / "a", key=KEY)


@pytest.mark.extended
def test_moved_ciphertext_does_not_decrypt(tmp_path: Path) -> None:
    store = filled(tmp_path)
    own, theirs = (store.sessions.heads(who)[-1] for who in (WHO, "somebody else"))
    with pytest.raises(Damaged):
        store.parts.blobs.get(own.tokens, theirs.tenant)
    file_system = store.parts.file_system
    file_system.replace(theirs.path, file_system.read(own.path))
    assert store.parts.epochs._beside(theirs.key, theirs.epoch) is None
    [stolen, *_] = blob_files(tmp_path)
    stolen.write_bytes(stolen.read_bytes()[:-1] + b"\0")
    problems = [
        each for c in store.maintenance.verify(store.sessions.heads()) for each in c.problems
    ]
    assert len(problems) >= 2


def test_session_moves_between_plain_and_encrypted_stores(tmp_path: Path) -> None:
    plain, sealed = store_at(tmp_path / "a"), store_at(tmp_path / "b", key=KEY)
    plain.sessions.save(WHO, TALK, IDS, snapshot(read(IDS)), transcript=SAID)
    sealed.sessions.import_file(plain.sessions.export(load(plain).record), "x", "moved")
    [record] = sealed.sessions.heads("x")
    back = plain.sessions.import_file(sealed.sessions.export(record), WHO, "back")
    assert plain.parts.reader.transcript(back) == SAID
    assert is_exact(load(plain, "back")) and load(plain, "back").cache is not None


@settings(max_examples=15)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=11), min_size=2, max_size=5))
def test_masked_texts_keep_common_prefix_lengths(texts: list[list[int]]) -> None:
    sealed, plain = AesGcmEncryption(KEY, b"salt"), NoEncryption()
    for left in texts:
        for right in texts:
            pair = [
                [s.masked("t", "", token_bytes(text)) for text in (left, right)]
                for s in (plain, sealed)
            ]
            assert common_prefix_len(*pair[0]) == common_prefix_len(*pair[1])
    one = token_bytes(texts[0])
    assert sealed.masked("t", "", one) != one
    assert sealed.masked("t", "", one)[:4] not in (
        sealed.masked("u", "", one)[:4],
        sealed.masked("t", "before", one)[:4],
    )


def test_keys_are_read_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    assert read_key(None) is None
    path.write_bytes(KEY)
    assert read_key(path) == KEY
    path.write_text(f"{OTHER.hex()}\n")
    assert read_key(path) == OTHER
    monkeypatch.setenv("LARDER_STORE_KEY", KEY.hex())
    assert read_key(None) == KEY and read_key(path) == OTHER
    for result in (b"", b"short", b"g" * 64, b"\xff" * 33):
        path.write_bytes(result)
        with pytest.raises(InputError, match="openssl rand"):
            read_key(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_key(tmp_path / "none")
