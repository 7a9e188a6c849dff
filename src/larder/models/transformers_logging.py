"""Keep transformers from talking over our own output while it loads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger


@contextmanager
def silence_transformers() -> Iterator[None]:
    """No progress bars, advice or warnings from transformers and the hub; settings come back."""
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
