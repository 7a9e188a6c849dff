"""Reader of prompts with contexts that are read apart, in steps of at most a context."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from larder.prefill.reader import PrefillSequence
from larder.server.context_prompts import ContextPrompts
from larder.server.request_state import RequestState


class ContextReader:
    """Reads the contexts of requests by the schedule of their policy. For the model's thread.

    Args:
        contexts: chunks that were read before.
    """

    def __init__(self, contexts: ContextPrompts) -> None:
        self._contexts = contexts

    def nbytes_beside(self, state: RequestState) -> int:
        """Upper bound of the bytes beside the cache while contexts are read."""
        serving = state.session.serving
        count = serving.runtime.decoder.spec.full_bytes(len(state.resolved.prompt_ids))
        return serving.policy.schedule.context_copies * count

    def begin(self, state: RequestState) -> None:
        """Make the steps of a request's prefill."""
        assert state.contexts is not None
        state.prefill.steps = self._steps(state)
        state.prefill.estimated_blocks = len(state.contexts.contexts) + 1

    def read_block(self, state: RequestState) -> int:
        """Run one step; the approximate number of tokens read."""
        prefill = state.prefill
        assert prefill.steps is not None
        try:
            next(prefill.steps)
        except StopIteration:
            prefill.steps = None
        prefill.estimated_blocks -= 1
        contexts = () if state.contexts is None else state.contexts.contexts
        return max(map(len, contexts), default=1)

    def _steps(self, state: RequestState) -> Generator[object, None, None]:
        """Steps that read all but the last token of the prompt, which is left to decoding."""
        session, text = state.session, state.contexts
        cache = session.residency.active
        assert text is not None and cache is not None
        schedule, ids = session.serving.policy.schedule, state.resolved.prompt_ids
        # The question and the end of the template follow the last context.
        text = replace(text, suffix=text.suffix[:-1])
        reader = session.serving.reader(len(ids))
        sequence, source = PrefillSequence(cache, {}), self._contexts.source(session.tenant)
        reuse = yield from schedule.context_steps(reader, sequence, text, source)
        session.residency.cached_ids.extend(ids[:-1])
        state.counts.cached = reuse.cached_tokens
        state.counts.recomputed = reuse.recomputed_tokens
