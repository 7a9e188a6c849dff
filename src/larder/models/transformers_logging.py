"""Suppression of transformers' progress bars, advice and warnings while a model loads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Context manager without output of transformers and the hub; restores their settings."""
    from transformers.utils import logging

    hub = getLogger("huggingface_hub")
    had_bars, verbosity, hub_level = (
        logging.is_progress_bar_enabled(),
        logging.get_verbosity(),
        hub.level,
    )
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub.setLevel(ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.setLevel(hub_level)
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
