"""Pause of garbage collection during start-up of a command.

Imports and model loading create half a million objects and no cyclic garbage. The collector would
walk them a thousand times, a quarter of the CPU time of a short `larder ask`.
"""

from __future__ import annotations

import gc


def pause_collection() -> None:
    """Stop the garbage collector until `resume_collection`; only for a process of our own."""
    gc.disable()


def resume_collection() -> None:
    """Exempt what start-up created from collection, and start the collector if it was paused.

    Loaded objects live as long as the process; later collections walk only newer objects.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
