"""Output of transformers while a model loads: silenced, and its progress reported."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from io import StringIO
from logging import ERROR, getLogger
from threading import Lock, get_ident
from typing import Any

from larder.core.progress import Progress, ProgressStage


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


@contextmanager
def loading_progress(stage: ProgressStage) -> Iterator[dict[str, Any]]:
    """Context in which transformers reports what it loads to stages.

    It yields options of `from_pretrained`. They are empty, and nothing is reported, on releases of
    transformers that take no hook.
    """
    try:
        from transformers.utils.logging import set_tqdm_hook
    except ImportError:
        yield {}
        return
    thread = get_ident()

    def counted(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if get_ident() == thread and args and isinstance(args[0], Collection):
            return counted_items(args[0], stage)
        return factory(*args, **options)

    former = set_tqdm_hook(counted)
    try:
        with ExitStack() as stack:
            yield {"tqdm_class": download_bars(stage, stack)}
    finally:
        set_tqdm_hook(former)


def counted_items(items: Collection[Any], stage: ProgressStage) -> Iterator[Any]:
    """Items, counted by a stage as each is done."""
    with stage("Loading weights", "tensors") as report:
        for done, item in enumerate(items, start=1):
            yield item
            report(done, len(items))


def download_bars(stage: ProgressStage, stack: ExitStack) -> type:
    """Class of bars in the place of tqdm's, whose bytes a single stage counts together.

    Args:
        stack: holds the stage, which opens with the first bar.
    """
    from tqdm import tqdm

    lock, reports = Lock(), list[Progress]()
    bars = list[Any]()

    class DownloadBar(tqdm):
        """Bar of a download that draws nothing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": StringIO(), "leave": False})
            with lock:
                if not reports:
                    reports.append(stack.enter_context(stage("Downloading", "bytes")))
                bars.append(self)

        def update(self, n: int | float | None = 1) -> bool | None:
            drawn = super().update(n)
            with lock:
                done = sum(int(bar.n) for bar in bars)
                reports[0](done, max(done, sum(int(bar.total or 0) for bar in bars)))
            return drawn

    return DownloadBar
