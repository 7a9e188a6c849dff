"""Log-likelihood under a policy: of continuations of a context, and of a whole text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.errors import InputError, UsageError
from larder.core.spelling import spell
from larder.core.types import AppendKind, Mode
from larder.engine.completion import EncodedPrompt, prefill_prompt
from larder.models.batch_segment import BatchSegment
from larder.models.lm_head import LOGITS_CHUNK
from larder.prefill.base import run_steps
from larder.session.capacity import check_recent_fits, empty_cache, entries_per_head, resolve_budget
from larder.session.policy import Policy
from larder.session.prefill import (
    ModelRuntime,
    SizeOptions,
    common_prompts,
    require_prompts,
    turn_reader,
    warm_up,
)

Ids = tuple[int, ...]
MAX_PACKED_TOKENS = 2048  # of continuations in one pass; bounds activations


@dataclass(frozen=True)
class TokenScore:
    """Score of consecutive tokens.

    Args:
        log_likelihood: sum over the tokens, in nats.
        is_greedy: whether each token is the most likely one; of equal logits the smaller id.
    """

    log_likelihood: float
    is_greedy: bool

    def __add__(self, other: TokenScore) -> TokenScore:
        return TokenScore(
            self.log_likelihood + other.log_likelihood, self.is_greedy and other.is_greedy
        )


@dataclass(frozen=True)
class ContinuationRequest:
    """Context, and continuations of it that are scored independently.

    Raises:
        InputError: the context or a continuation has no tokens.
    """

    context: Ids
    continuations: tuple[Ids, ...]

    def __post_init__(self) -> None:
        if not self.context or not all(self.continuations):
            what = "A continuation" if self.context else "The context of a continuation"
            raise InputError(f"{what} has no tokens, so nothing can be scored: give one or more.")

    @property
    def inputs(self) -> list[Ids]:
        """Tokens that the model reads behind the cached context, by continuation."""
        return [self.context[-1:] + one[:-1] for one in self.continuations]


@dataclass(frozen=True)
class ScoredText:
    """Scores over one cache.

    Args:
        scores: one per continuation; a single one for a whole text.
        kv_bytes: bytes of the cache behind a context, or at the end of a text, whose last block
            it holds whole.
        full_kv_bytes: a plain cache of the same length, states of recurrent layers included.
    """

    scores: tuple[TokenScore, ...]
    kv_bytes: int
    full_kv_bytes: int


class LikelihoodScorer:
    """Log-likelihoods of a model whose context is cached under a policy.

    A context is read under the policy, all tokens but the last. The last one and a continuation are
    then read behind the cache, without plans, so that every score is one behind what the policy
    kept. Several continuations share the cache. Under `full` the scores are the model's own.

    Where the policy recalls offloaded entries, tokens are read one by one on a copy of the cache,
    as in generation; a text in one pass would attend to all entries.

    Args:
        sizes: sizes that the policy leaves open, as of a context or a text.
    """

    def __init__(self, runtime: ModelRuntime, policy: Policy, sizes: SizeOptions) -> None:
        self._runtime, self._policy, self._sizes = runtime, policy, sizes

    def score_continuations(self, requests: Sequence[ContinuationRequest]) -> list[ScoredText]:
        """Scores of continuations, request by request; the caches of all are held together.

        Raises:
            LarderError: the policy cannot read a context, or sizes do not fit.
        """
        decode = self._runtime.tokenizer.decode
        read = [
            prefill_prompt(
                self._runtime,
                self._policy,
                self._sizes,
                EncodedPrompt(decode(request.context), request.context),
            )
            for request in requests
        ]
        caches = [each.cache for each in read]
        logits = self._continuation_logits(caches, requests)
        return [
            ScoredText(
                tuple(
                    token_score(logits[index, inputs], tokens)
                    for inputs, tokens in zip(request.inputs, request.continuations, strict=True)
                ),
                each.figures.kv_bytes,
                each.figures.full_kv_bytes,
            )
            for index, (request, each) in enumerate(zip(requests, read, strict=True))
        ]

    def score_text(self, ids: Ids, num_scored: int) -> ScoredText:
        """Score of the last tokens of a text, each predicted behind what the policy kept.

        The text is read in blocks of the policy. Each block is scored behind the cache of all text
        before it, and then brought within the budget, as a turn of a conversation is.

        Args:
            num_scored: number of last tokens that are scored, at most all but the first.

        Raises:
            UsageError: the policy forms episodes, or recalls entries, which a text attends to.
        """
        if not 0 < num_scored < len(ids):
            raise InputError(
                f"{num_scored} of {len(ids)} tokens cannot be scored: the first one has no tokens "
                "before it, so give at least two, and score at least one."
            )
        policy = self._sized_for_text(len(ids))
        cache = empty_cache(policy, self._runtime.decoder.spec)
        total = TokenScore(0.0, True)
        first = len(ids) - num_scored
        for start, logits in self._text_logits(policy, cache, ids[:-1]):
            expected = ids[start + 1 : start + 1 + len(logits)]
            skipped = min(max(0, first - start - 1), len(logits))
            total += token_score(logits[skipped:], expected[skipped:])
        cache.compact()
        full = self._runtime.decoder.spec.full_bytes(len(ids) - 1)
        return ScoredText((total,), cache.nbytes, full)

    def _sized_for_text(self, tokens: int) -> Policy:
        """Policy with sizes for a text of `tokens` tokens."""
        policy, spec = self._policy, self._runtime.decoder.spec
        if policy.session.embedders():
            raise UsageError(
                f"{spell(policy.session)} answers from one of several caches, but a text is scored "
                "behind one: leave episodes() out, or score continuations."
            )
        if policy.recall is not None:
            raise UsageError(
                f"{spell(policy.recall)} recalls entries for generated tokens, but a text attends "
                "to all of them, so that the policy would change nothing: score continuations."
            )
        warm_up(self._runtime, policy)
        wanted = resolve_budget(policy, self._sizes.budget, tokens, spec)
        policy = policy.with_sizes(wanted, self._sizes.block)
        check_recent_fits(policy, entries_per_head(policy, spec))
        return policy

    def _text_logits(
        self, policy: Policy, cache: SequenceCache, ids: Ids
    ) -> Iterator[tuple[int, Float[Tensor, "Q V"]]]:
        """Logits of the blocks of a text, with the index of the first token of each."""
        prompts = common_prompts(self._runtime.tokenizer)
        require_prompts(prompts, policy.scorer.required_prompts())
        # The cache itself in place of a snapshot: nothing is undone, so that no copy is needed.
        turn = turn_reader(self._runtime, policy, cache, prompts, cache)
        start = 0
        while start < len(ids):
            run_steps(turn.end_block_steps(1))
            part = ids[start : start + max(1, turn.free_tokens)]
            segment = BatchSegment(cache, part, append_kind=AppendKind.TEXT)
            observer = turn.observer([0], [segment], [0])
            yield (
                start,
                self._runtime.decoder.forward_logits(
                    [segment], Mode.APPEND, range(len(part)), observer
                ),
            )
            start += len(part)

    def _continuation_logits(
        self, caches: Sequence[SequenceCache], requests: Sequence[ContinuationRequest]
    ) -> dict[tuple[int, Ids], Float[Tensor, "Q V"]]:
        """Logits by number of a request and inputs; equal inputs of a request are read once."""
        wanted = [
            (number, inputs)
            for number, request in enumerate(requests)
            for inputs in dict.fromkeys(request.inputs)
        ]
        out = dict[tuple[int, Ids], Tensor]()
        packed = list[tuple[int, Ids]]()
        for number, inputs in wanted:
            if any(tier.has_offloaded for tier in caches[number].tiers):
                out[number, inputs] = self._stepwise_logits(caches[number], inputs)
            else:
                packed.append((number, inputs))
        most = min(MAX_PACKED_TOKENS, max(1, LOGITS_CHUNK // self._runtime.decoder.vocab_size))
        for group in _groups(packed, most):
            out |= self._packed_logits(caches, group)
        return out

    def _packed_logits(
        self, caches: Sequence[SequenceCache], group: Sequence[tuple[int, Ids]]
    ) -> dict[tuple[int, Ids], Float[Tensor, "Q V"]]:
        """Logits of inputs that are read side by side, each behind the cache of its request."""
        by_cache = dict[int, list[Ids]]()
        for number, inputs in group:
            by_cache.setdefault(number, []).append(inputs)
        segments = [
            BatchSegment(
                caches[number],
                tuple(token for inputs in own for token in inputs),
                tuple(map(len, own)),
            )
            for number, own in by_cache.items()
        ]
        order = [(number, inputs) for number, own in by_cache.items() for inputs in own]
        lengths = [len(inputs) for _, inputs in order]
        logits = self._runtime.decoder.forward_logits(segments, Mode.SCRATCH, range(sum(lengths)))
        return dict(zip(order, logits.split(lengths), strict=True))

    def _stepwise_logits(self, cache: SequenceCache, ids: Ids) -> Float[Tensor, "Q V"]:
        """Logits of tokens that are read one by one on a copy of the cache."""
        copy, decoder = cache.fork(), self._runtime.decoder
        return torch.cat(
            [
                decoder.forward_logits([BatchSegment(copy, (token,))], Mode.APPEND, [0])
                for token in ids
            ]
        )


def token_score(logits: Float[Tensor, "Q V"], tokens: Sequence[int]) -> TokenScore:
    """Score of tokens, given the logits before each of them."""
    if not tokens:
        return TokenScore(0.0, True)
    expected = torch.tensor(tokens, device=logits.device)
    likelihoods = logits.gather(1, expected[:, None])[:, 0] - logits.logsumexp(-1)
    return TokenScore(
        float(likelihoods.double().sum()), bool((logits.argmax(-1) == expected).all())
    )


def _groups(items: Iterable[tuple[int, Ids]], most: int) -> Iterator[list[tuple[int, Ids]]]:
    """Consecutive items of at most `most` tokens together, or a single longer one."""
    group, tokens = list[tuple[int, Ids]](), 0
    for item in items:
        if group and tokens + len(item[1]) > most:
            yield group
            group, tokens = [], 0
        group.append(item)
        tokens += len(item[1])
    if group:
        yield group
