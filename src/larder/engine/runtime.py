"""Runtime of an engine: embedders and measurements of its model, loaded and made on first use."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from larder.core.observation import Calibration
from larder.core.progress import ProgressStage
from larder.engine.progress_bar import DELAY, progress_bar
from larder.models.calibration import calibrate
from larder.models.decoder import Decoder
from larder.session.prefill import ModelRuntime
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

if TYPE_CHECKING:
    from larder.session.embedders.base import Embedder

delayed_bar: ProgressStage = partial(progress_bar, delay=DELAY)


def engine_runtime(
    decoder: Decoder, tokenizer: TokenizerAdapter, stage: ProgressStage = delayed_bar
) -> ModelRuntime:
    """Model and tokenizer with embedders and measurements, each loaded or made once.

    Args:
        stage: shows measurements in progress.
    """

    @cache
    def embedder(name: str) -> Embedder:
        from larder.session.embedders.base import load_embedder  # episodes need one

        return load_embedder(name, "cpu", decoder.embedding_table(), tokenizer.encode)

    @cache
    def measured(names: frozenset[str]) -> Calibration:
        with stage(f"Measuring the model: {', '.join(sorted(names))}", "percent") as report:
            return calibrate(decoder, tokenizer.encode, names, report)

    return ModelRuntime(decoder, tokenizer, embedder, measured)
