"""Chunks of caches at several levels, and the levels loaded within a deadline."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cache_stores import same_bits
from larder.core import BadParameter, LayerSpec
from larder.store import (
    BlobRef,
    ChunkStream,
    Entropy,
    LoadedSession,
    Store,
    StreamController,
    StreamedChunk,
    StreamProgress,
    StreamRule,
    codec_named,
    prefix_digest,
)
from references import stream_controller as loops

from .caches import (
    IDS,
    LONGER,
    SPEC,
    TALK,
    WHO,
    asking,
    compressed,
    go_on,
    read,
    save,
    snapshot,
    store_at,
)

MB = 10**6
GIGABIT = 1e9 / 8
# Four chunks of 80, 60 and 40 MB: .64, .48 and .32 s each at a gigabit per second.
SIZES = ((80 * MB, 60 * MB, 40 * MB),) * 4


def progress(**changes: object) -> StreamProgress:
    return replace(StreamProgress(SIZES, 4, 0.0, GIGABIT, 100.0), **changes)


@pytest.mark.parametrize("rule", StreamRule)
def test_level_hand_values_of_four_chunks_in_two_seconds(rule: StreamRule) -> None:
    controller = StreamController(2.0, rule)
    assert controller.level(progress()) == 1
    assert controller.level(progress(bandwidth=2 * GIGABIT)) == 0
    assert controller.level(progress(bandwidth=0.7 * GIGABIT)) == 2
    assert controller.level(progress(bandwidth=None)) == 1


def test_paper_rule_uses_the_remaining_time() -> None:
    controller = StreamController(2.0)
    last = {"sizes": SIZES[:1], "elapsed": 1.3}
    assert controller.level(progress(**last)) == 0  # .64 of .70 s
    assert controller.level(progress(**last | {"elapsed": 1.5})) == 1  # .48 of .50 s
    assert controller.level(progress(**last | {"recompute": 0.7})) is None
    # Where nothing is in time: the coarsest level takes .32 s, the text .3 or .4 s.
    assert controller.level(progress(**last | {"elapsed": 1.9, "recompute": 0.3})) is None
    assert controller.level(progress(**last | {"elapsed": 1.9, "recompute": 0.4})) == 2


def test_code_rule_uses_an_equal_share_of_the_deadline() -> None:
    controller = StreamController(2.0, StreamRule.CODE)
    late = progress(sizes=SIZES[:1], elapsed=1.9)
    assert controller.level(late) == 1
    assert controller.level(replace(late, bandwidth=0.6 * GIGABIT)) is None


def test_without_a_deadline_the_finest_level_is_loaded() -> None:
    assert StreamController().level(progress(bandwidth=1.0, recompute=0.0)) == 0
    for seconds in (0.0, -1.0, math.nan):
        with pytest.raises(BadParameter, match="deadline"):
            StreamController(seconds)


def test_controller_equals_its_reference() -> None:
    draw = random.Random(5)
    for _ in range(300):
        sizes = [sorted((draw.randint(1, 99) for _ in range(3)), reverse=True) for _ in range(3)]
        deadline, elapsed = draw.uniform(1, 9), draw.uniform(0, 4)
        bandwidth, recompute = draw.uniform(5, 90), draw.uniform(0, 9)
        now = StreamProgress(sizes, 5, elapsed, bandwidth, recompute)
        wanted = loops.level(deadline, elapsed, sizes, bandwidth, recompute)
        assert StreamController(deadline).level(now) == wanted


class SlowLink:
    """Clock of a link whose bandwidth changes from chunk to chunk."""

    def __init__(self, *bandwidths: float) -> None:
        self.now, self._bandwidths = 0.0, iter(bandwidths)

    def clock(self) -> float:
        return self.now

    def carry(self, count: int) -> None:
        self.now += count / next(self._bandwidths)


CHUNK = 4
LAYER = LayerSpec(0, 1, 1, 2, 1.0)


def stream_over(link: SlowLink, deadline: float, prefill: float) -> list[int]:
    """Levels of four chunks of 80, 60 and 40 bytes over a link."""
    spec = replace(SPEC, layers=(LAYER,))
    ids = tuple(range(4 * CHUNK))
    chunks = [
        StreamedChunk(tuple(BlobRef(f"{at}", n) for n in (80, 60, 40)), at, at + CHUNK)
        for at in range(0, len(ids), CHUNK)
    ]

    def load(ref: BlobRef) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        link.carry(ref.bytes)
        start = int(ref.digest)
        tensors = {f"0.{side}": torch.zeros(1, CHUNK, 2) for side in ("keys", "values")}
        prefix = prefix_digest(ids[: start + CHUNK])
        return tensors, {"start": start, "n_tokens": CHUNK, "prefix": prefix}

    stream = ChunkStream(
        chunks, ids, StreamController(deadline), load, lambda n: n * prefill, None, link.clock
    )
    cache, levels, damage = stream.restore(spec)
    assert damage is None
    assert cache.next_position == CHUNK * len(levels)
    return levels


def test_levels_follow_the_bandwidth_of_the_previous_chunk() -> None:
    assert stream_over(SlowLink(*[100.0] * 4), 3.2, 99.0) == [1, 0, 0, 0]
    # The link slows down behind the first chunk, which costs 1.2 s more than was foreseen.
    assert stream_over(SlowLink(100.0, 50.0, 50.0, 50.0), 3.2, 99.0) == [1, 0, 2, 2]
    assert stream_over(SlowLink(100.0, 50.0, 200.0, 200.0), 3.2, 99.0) == [1, 0, 2, 0]


def test_stream_ends_where_recomputing_meets_the_deadline() -> None:
    assert stream_over(SlowLink(*[100.0] * 4), 3.2, 0.21) == [1]  # 12 tokens in 2.52 of 2.6 s
    assert stream_over(SlowLink(), 3.2, 0.2) == []


@pytest.fixture
def store(tmp_path: Path, small_chunks: None) -> Iterator[Store]:
    del small_chunks
    opened = store_at(tmp_path)
    yield opened
    opened.close()


def restored(store: Store, deadline: float = math.inf) -> LoadedSession:
    requirements = replace(asking(), streaming=StreamController(deadline))
    found = store.sessions.load(WHO, TALK, requirements)
    assert found is not None
    return found


def test_saved_cache_has_every_chunk_at_every_level(store: Store) -> None:
    save(store, IDS, "cachegen")
    [record] = store.sessions.heads()
    assert record.codec == "cachegen" and not record.lossless
    assert len(record.spans) == 3 * 6
    found = restored(store)
    assert found.levels == (0,) * 6
    wanted = codec_named("entropy_fine")
    assert isinstance(wanted, Entropy)
    assert found.cache is not None and found.cache.next_position == len(IDS)
    held, exact = found.cache.state(), read(IDS).state()
    assert held.keys() == exact.keys()
    for name in held:
        assert (held[name] - exact[name]).abs().max() < wanted.step_scale
    assert not torch.equal(held["0.keys"], exact["0.keys"])


def test_session_is_recomputed_where_the_deadline_allows_it(store: Store) -> None:
    save(store, IDS, "cachegen")
    store.parts.throughput.initialize({"disk": 1e15, "reading": 1.0})
    # The last of 21 tokens is read in a second.
    assert restored(store, 5.0).levels == (0,) * 5
    assert restored(store, 30.0).reason == "slower"  # 21 tokens are read in 21 s


def test_slow_tier_is_loaded_at_the_coarsest_level(store: Store) -> None:
    save(store, IDS, "cachegen")
    store.parts.throughput.initialize({"disk": 1e-3, "reading": 1e-9})
    found = restored(store, 1.0)
    assert found.levels[0] == 2


def test_coarsely_loaded_session_keeps_its_finest_levels(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, IDS, "cachegen")
    finest, [before] = restored(store).cache, store.sessions.heads()
    with monkeypatch.context() as slow:
        slow.setattr(StreamController, "level", lambda self, now: 2)
        coarse = restored(store)
    # The last chunk is not full: it is encoded again once it has grown, from its finest level.
    assert coarse.levels == (2, 2, 2, 2, 2, 0)
    assert coarse.cache is not None and finest is not None
    assert not same_bits(coarse.cache.state(), finest.state())
    go_on(coarse.cache, LONGER[len(IDS) :], IDS)
    store.sessions.save(WHO, TALK, LONGER, snapshot(coarse.cache, "cachegen"))
    [after] = store.sessions.heads()
    assert after.spans[:15] == before.spans[:15]
    again = restored(store).cache
    assert again is not None
    again.truncate(CHUNK * 5)
    finest.truncate(CHUNK * 5)
    assert same_bits(again.state(), finest.state())


def test_chunks_of_a_changed_text_are_replaced(store: Store) -> None:
    save(store, IDS, "cachegen")
    [before] = store.sessions.heads()
    edited = (*IDS[:9], 99, *IDS[10:])
    save(store, edited, "cachegen")
    [after] = store.sessions.heads()
    assert after.spans[:6] == before.spans[:6]
    assert not {*after.spans[6:]} & {*before.spans}
    exact, finest = read(edited).state(), codec_named("entropy_fine")
    held = restored(store).cache
    assert held is not None and isinstance(finest, Entropy)
    for name, tensor in held.state().items():
        assert (tensor - exact[name]).abs().max() < finest.step_scale


def test_caches_of_other_forms_fall_back_to_entropy(store: Store) -> None:
    store.sessions.save(WHO, TALK, IDS, snapshot(compressed(IDS), "cachegen"))
    [record] = store.sessions.heads()
    assert record.codec == "entropy"
    assert restored(store).levels == () and restored(store).cache is not None


@pytest.mark.parametrize("number", [0, 1, 4])
def test_damaged_chunk_is_not_used(store: Store, tmp_path: Path, number: int) -> None:
    save(store, IDS, "cachegen")
    whole, [record] = restored(store), store.sessions.heads()
    for path in (tmp_path / "store").rglob(f"*{record.spans[3 * number].digest}*"):
        path.write_bytes(b"x" + path.read_bytes()[1:])
    found = restored(store)
    assert found.reason == "damaged" and found.levels == (0,) * number
    assert store.parts.refusals.counts() == {"damaged": 1}
    if not number:
        assert found.cache is None
        return
    assert found.cache is not None and whole.cache is not None
    whole.cache.truncate(CHUNK * number)
    assert same_bits(found.cache.state(), whole.cache.state())


def test_chunks_decode_at_their_own_position_only(store: Store) -> None:
    save(store, IDS, "cachegen")
    [record] = store.sessions.heads()
    swapped = replace(record, spans=(*record.spans[3:6], *record.spans[:3], *record.spans[6:]))
    with pytest.raises(Exception, match="not of the tokens from 0 on"):
        store.parts.reader.caches(swapped, IDS, asking())
    with pytest.raises(Exception, match="blobs"):
        store.parts.reader.caches(replace(record, spans=record.spans[:-1]), IDS, asking())
