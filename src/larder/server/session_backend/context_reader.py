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

    def nbytes_beside(self, job: RequestState) -> int:
        """Upper bound of the bytes beside the cache while contexts are read."""
        serving = job.session.serving
        count = serving.runtime.decoder.spec.full_bytes(len(job.resolved.prompt_ids))
        return serving.policy.schedule.context_copies * count

    def begin(self, job: RequestState) -> None:
        """Make the steps of a request's prefill."""
        assert job.contexts is not None
        job.prefill.steps = self._steps(job)
        job.prefill.estimated_blocks = len(job.contexts.contexts) + 1

    def read_block(self, job: RequestState) -> int:
        """Run one step; the approximate number of tokens read."""
        prefill = job.prefill
        assert prefill.steps is not None
        try:
            next(prefill.steps)
        except StopIteration:
            prefill.steps = None
        prefill.estimated_blocks -= 1
        contexts = () if job.contexts is None else job.contexts.contexts
        return max(map(len, contexts), default=1)

    def _steps(self, job: RequestState) -> Generator[object, None, None]:
        """Steps that read all but the last token of the prompt, which is left to decoding."""
        session, text = job.session, job.contexts
        cache = session.residency.active
        assert text is not None and cache is not None
        schedule, ids = session.serving.policy.schedule, job.resolved.prompt_ids
        # The question and the end of the template follow the last context.
        text = replace(text, suffix=text.suffix[:-1])
        reader = session.serving.reader(len(ids))
        sequence, source = PrefillSequence(cache, {}), self._contexts.source(session.tenant)
        reuse = yield from schedule.context_steps(reader, sequence, text, source)
        session.residency.cached_ids.extend(ids[:-1])
        job.counts.cached = reuse.cached_tokens
        job.counts.recomputed = reuse.recomputed_tokens
