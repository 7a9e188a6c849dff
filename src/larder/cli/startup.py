"""Pause of garbage collection during start-up of a command.

Imports and model loading create half a million objects that stay, and some ten thousand that do
not. The collector would walk them a thousand times, a quarter of the CPU time of a short
`larder ask`; here it walks them once.
"""

from __future__ import annotations

import gc


def pause_collection() -> None:
    """Stop the garbage collector until `resume_collection`; only for a process of our own."""
    gc.disable()


def resume_collection() -> None:
    """Collect once, exempt what is left from collection, and start a paused collector again.

    Loaded objects live as long as the process; later collections walk only newer objects.
    """
    if not gc.isenabled():
        gc.collect()
        gc.freeze()
        gc.enable()
