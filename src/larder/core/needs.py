"""What a scorer or a budget asks to see beside queries, keys and entries."""

from __future__ import annotations

from enum import Enum


class Need(Enum):
    """Something that costs memory or a hook, so that it is there only where it is asked for.

    STATES: the hidden states that entered attention (`Seen.states`), while a context is read.
    TEXT: all queries of a context at once, where it is read in one piece anyway: `whole()` then
        does so, however long it is.
    """

    STATES = "states"
    TEXT = "text"
