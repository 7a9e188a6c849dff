"""Offloading and recall in policy sentences, and their sizes by budget."""

from __future__ import annotations

import pytest

from larder import Policy
from larder.core import BadParameter, Codec, Coder, OffloadSpec, TransformSpec, spell
from larder.policy import Exact
from larder.recall import Flat


def test_offload_defaults_to_the_dci_index() -> None:
    assert spell(Policy.parse("park()").recall).startswith("dci(")
    assert spell(Policy.parse("park() > flat(page=4)").recall).startswith("flat(")
    assert Policy.parse("drop()").recall is None


def test_offloaded_entries_can_be_quantized() -> None:
    policy = Policy.parse("park(host_mib=7) > flat() > quantized(bits=8, group=16)").with_sizes(
        64, None
    )
    assert Policy.parse(str(policy)) == policy
    parking = policy.parking
    assert parking is not None and parking.codec == Codec(8, 8, 16)
    assert OffloadSpec.from_text(parking.to_text()) == parking
    assert OffloadSpec.from_text("7 flat(tokens=4)") == OffloadSpec(Flat(tokens=4), 7)
    assert policy.resident_storage == policy.planner.storage == Exact()


def test_corrected_tokens_are_limited_to_recent_ones() -> None:
    assert Policy.parse("protect(recent=2) > park() > flat(corrected=2)").with_sizes(64, None)
    policy = Policy.parse("protect(recent=0.1) > park() > flat(tokens=16, corrected=3)")
    assert policy.with_sizes(46, None)
    with pytest.raises(BadParameter, match="flat.corrected must be at most the 2 latest tokens"):
        policy.with_sizes(45, None)


def test_recalled_pages_leave_room_for_a_token_without_protection() -> None:
    policy = Policy.parse("protect(sinks=0, recent=0) > keydiff() > park() > flat(page=16)")
    assert [policy.with_sizes(tokens, None).recall.tokens for tokens in (64, 65)] == [48, 64]


def test_offloaded_entries_can_be_transform_coded() -> None:
    sentence = 'park(host_mib=7) > flat() > transform(bits=3, coder="widths", block=16)'
    policy = Policy.parse(sentence).with_sizes(64, None)
    assert Policy.parse(str(policy)) == policy
    parking = policy.parking
    assert parking is not None
    assert parking.codec == TransformSpec(Coder.WIDTHS, block=16, bits=3.0)
    named = parking.of_model("ab12")
    assert named.codec == TransformSpec(Coder.WIDTHS, block=16, bits=3.0, model="ab12")
    assert OffloadSpec.from_text(named.to_text()) == named
    assert policy.calibrations == {"transform"}
    assert policy.resident_storage == policy.planner.storage == Exact()


STATES = 32  # of the entropy coder


def test_parked_blocks_have_no_more_entries_than_the_coder_has_states() -> None:
    parking = Policy.parse("park() > flat() > transform()").with_sizes(64, None).parking
    assert parking is not None and isinstance(parking.codec, TransformSpec)
    assert parking.codec.block == STATES
