"""Chats under policies that act while an answer is generated."""

from __future__ import annotations

import pytest

from chats import HISTORY, STEPWISE, active, raising, same, states, under
from larder import Chat
from larder.models import LoadedModel

PARKED = (
    "episodes(count=2, segment=1, representatives=2) > blockwise() > protect(sinks=2, recent=4) > "
    "sinks_and_window(sinks=2) > uniform() > park() > flat(tokens=80, page=4, dense=1) > "
    "every_step()"
)

pytestmark = pytest.mark.usefixtures("read_once")
EXCESS = {"lagged": 7}


@pytest.mark.extended
@pytest.mark.parametrize("name", STEPWISE)
def test_chat_stays_within_its_budget_without_refreshes(loaded: LoadedModel, name: str) -> None:
    chat = Chat(under(loaded, STEPWISE[name]), history=HISTORY)
    for number in range(5):
        chat.say(f"My dog is {number} years old, and the car is older.", max_new_tokens=8)
        view = chat.episodes[active(chat)]
        assert view.entries_per_head <= chat.figures.budget_tokens + EXCESS.get(name, 0)
        assert chat.figures.active_kv_bytes == view.kv_bytes > 0
        cache = chat.memory.caches.activate(active(chat))
        latest = int(cache.entries(0).head_positions(0)[-1])
        assert latest == cache.next_position - 1, "the end of what was read is remembered"
    assert chat.figures.refreshes == 0
    assert chat.figures.log_tokens > 2 * chat.figures.budget_tokens


@pytest.mark.parametrize("name", ["h2o", pytest.param("episodes", marks=pytest.mark.extended)])
def test_interrupted_turn_restores_the_previous_state(loaded: LoadedModel, name: str) -> None:
    chat = Chat(under(loaded, STEPWISE[name]), history=HISTORY)
    chat.say("My dog eats apples.", max_new_tokens=6)
    before, bytes_before = states(chat), chat.figures.kv_bytes
    with pytest.raises(KeyboardInterrupt):
        chat.say("My dog eats pears.", raising(KeyboardInterrupt), max_new_tokens=6)
    after = states(chat)
    assert all(same(a, b) for a, b in zip(after, before, strict=True))
    assert chat.figures.kv_bytes == bytes_before and len(chat.turns) == 1


def test_peak_includes_the_copy_of_a_turn(loaded: LoadedModel) -> None:
    chat = Chat(under(loaded, STEPWISE["h2o"]), history=HISTORY)
    answer = chat.say("My dog eats apples.", max_new_tokens=6)
    assert answer.held_bytes > 1.9 * chat.figures.kv_bytes
    assert chat.figures.peak_kv_bytes >= answer.held_bytes


@pytest.mark.extended
def test_new_episode_has_only_opening_entries_of_the_history_in_both_tiers(
    loaded: LoadedModel,
) -> None:
    chat = Chat(under(loaded, PARKED), history=HISTORY)
    log_tokens = chat.figures.log_tokens
    # One of 16 is the newest token's.
    assert [view.entries_per_head for view in chat.episodes] == [15, 15]
    chat.say("A star is far away.", max_new_tokens=6)
    assert chat.outcome is not None and chat.outcome.is_new_episode
    state = states(chat)[2]
    saved = {name: held for name, held in state.items() if name.endswith("positions")}
    assert any(len(held) for name, held in saved.items() if "slow" in name)
    for name, held in saved.items():
        first = held[held < log_tokens]
        assert len(first) == 0 or int(first.max()) < 20, name


def test_turn_on_a_new_topic_leaves_other_episodes_unchanged(loaded: LoadedModel) -> None:
    chat = Chat(under(loaded, STEPWISE["episodes"]), history=HISTORY)
    before = states(chat)
    chat.say("A star is far away.", max_new_tokens=6)
    assert chat.outcome is not None and chat.outcome.is_new_episode
    after = states(chat)
    assert len(after) == 3
    assert all(same(a, b) for a, b in zip(after[:2], before, strict=True))
