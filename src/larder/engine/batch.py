"""Many requests offline: prefixes that several share are read once, answers run together.

Zheng et al., "BatchLLM: Optimizing Large Batched LLM Inference with Global Prefix Sharing and
Throughput-oriented Token Batching" (2024), arXiv:2412.03594. All requests are known before the
first is read: a tree of their tokens has the shared prefixes. A prefix is read when its
first request is due and freed behind its last one; groups with long answers to short prompts come
first; as many answers run together as memory holds, by bytes and not by number.

Larder takes every shared prefix; the paper regroups nested ones by dynamic programming, and mixes
prompts and answers in one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from larder.cache.prefix_forks import prefix_nbytes
from larder.cache.sequence import SequenceCache
from larder.cache.shared_storage import SHORT_SEGMENT
from larder.core.errors import BudgetError, InputError
from larder.core.types import AppendKind, Mode
from larder.engine.detokenizer import IncrementalDetokenizer, discard_text
from larder.engine.generate import GenerationBatch, StoppingCriteria
from larder.engine.sampler import SamplingParams
from larder.models.decoder import Decoder
from larder.models.forward_batch import BatchSegment

BLOCK_TOKENS = 1024  # of a prefix, read at once


@dataclass(frozen=True)
class BatchRequest:
    """Request of a batch.

    Args:
        name: name of the request in its results.
        ids: prompt, at least one token.
        sampling: sampling parameters.
        max_new_tokens: most tokens of the answer.
        stop: strings that end the answer.
    """

    name: str
    ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchResult:
    """Answer to a request of a batch.

    Args:
        request: the request.
        text: text of the answer.
        ids: its token ids, the stop token left out.
        reason: `stop` or `length`.
        cached_tokens: tokens of the prompt that were read for several requests.
    """

    request: BatchRequest
    text: str
    ids: tuple[int, ...]
    reason: str
    cached_tokens: int


@dataclass
class PrefixNode:
    """Prefix that several requests share.

    Args:
        ids: its tokens, those of its parents included.
        requests: requests that share no longer prefix with another one.
        children: longer prefixes.
    """

    ids: tuple[int, ...] = ()
    requests: list[BatchRequest] = field(default_factory=list[BatchRequest])
    children: list[PrefixNode] = field(default_factory=list["PrefixNode"])

    def read_tokens(self, prefix_len: int = 0) -> int:
        """Tokens that are read for all requests below a prefix of `prefix_len` tokens."""
        num_new = len(self.ids) - prefix_len
        rest = sum(len(each.ids) - len(self.ids) for each in self.requests)
        return num_new + rest + sum(child.read_tokens(len(self.ids)) for child in self.children)

    def new_tokens(self) -> int:
        """Most tokens that are generated for all requests below."""
        new_tokens = sum(each.max_new_tokens for each in self.requests)
        return new_tokens + sum(child.new_tokens() for child in self.children)

    def walk(self) -> Iterator[PrefixNode]:
        """Prefixes from this one on, those with most new tokens per token read first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            prefix_len = len(node.ids)
            waiting += sorted(
                node.children,
                key=lambda one: one.new_tokens() / max(1, one.read_tokens(prefix_len)),
            )


def prefix_tree(requests: Sequence[BatchRequest]) -> PrefixNode:
    """Tree of the prefixes that requests share; each leaves at least a token to its requests.

    Raises:
        InputError: a prompt has no tokens.
    """
    if any(not each.ids for each in requests):
        raise InputError("A prompt of the batch has no tokens: give at least one.")
    ordered = sorted(requests, key=lambda each: each.ids)
    pairs = zip(ordered, ordered[1:], strict=False)
    shared = [0, *(_shared_len(one, other) for one, other in pairs), 0]
    root = PrefixNode()
    stack = [root]
    for number, request in enumerate(ordered):
        before, longest = shared[number], max(shared[number], shared[number + 1])
        while len(stack[-1].ids) > before:
            node = stack.pop()
            if len(stack[-1].ids) < before:
                stack.append(PrefixNode(request.ids[:before]))
            stack[-1].children.append(node)
        if len(stack[-1].ids) < longest:
            stack.append(PrefixNode(request.ids[:longest]))
        stack[-1].requests.append(request)
    while len(stack) > 1:
        node = stack.pop()
        stack[-1].children.append(node)
    return root


def _shared_len(one: BatchRequest, other: BatchRequest) -> int:
    """Length of the common prefix of two prompts, at most all but the last token of each."""
    limit = min(len(one.ids), len(other.ids)) - 1
    pairs = zip(one.ids[:limit], other.ids[:limit], strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), limit)


class BatchRunner:
    """Answers to all requests of a batch, over lossless caches within some bytes. Used once.

    Args:
        decode: text of token ids.
        stop_ids: token ids that end a turn.
        max_bytes: bytes of all caches; None for no limit.
        on_result: receives each result as it is complete.
        on_error: receives a request that does not fit, and why.
    """

    def __init__(
        self,
        decoder: Decoder,
        decode: Callable[[Sequence[int]], str],
        stop_ids: frozenset[int],
        max_bytes: int | None,
        on_result: Callable[[BatchResult], None],
        on_error: Callable[[BatchRequest, BudgetError], None],
    ) -> None:
        self._decoder, self._decode, self._stop_ids = decoder, decode, stop_ids
        self._max_bytes, self._on_result, self._on_error = max_bytes, on_result, on_error
        self._waiting = list[tuple[BatchRequest, SequenceCache, int]]()
        self._waiting_bytes = 0
        self.num_read_tokens = 0

    def run(self, requests: Sequence[BatchRequest]) -> None:
        """Answer all requests."""
        path = list[tuple[PrefixNode, SequenceCache]]()
        for node in prefix_tree(requests).walk():
            while path and path[-1][0].ids != node.ids[: len(path[-1][0].ids)]:
                path.pop()
            cache = self._cache_of(node, path)
            path.append((node, cache))
            held = _held_bytes([each for _, each in path])
            for request in sorted(node.requests, key=lambda each: -each.max_new_tokens):
                self._add(request, cache, held)
        path.clear()
        self._answer()

    def _cache_of(
        self, node: PrefixNode, path: Sequence[tuple[PrefixNode, SequenceCache]]
    ) -> SequenceCache:
        """Cache that has read a prefix, made from that of its parent."""
        parent = path[-1][1] if path else SequenceCache(self._decoder.spec, "dense")
        cache = parent.fork()
        self._read(cache, node.ids)
        cache.compact()
        return cache

    def _add(self, request: BatchRequest, prefix: SequenceCache, held: int) -> None:
        """Add a request to those that are answered next, once there is room.

        Args:
            held: bytes of all prefixes.
        """
        spec = self._decoder.spec
        length = len(request.ids) + request.max_new_tokens
        demand = spec.full_bytes(length) - _shared_bytes(prefix)
        if self._max_bytes is not None:
            if held + self._waiting_bytes + demand > self._max_bytes:
                self._answer()
            if held + demand > self._max_bytes:
                message = (
                    f"The request takes {demand} bytes beside the {held} of its prefixes, but the "
                    f"batch may take {self._max_bytes}: raise --memory, or shorten it."
                )
                self._on_error(request, BudgetError(message))
                return
        cache = prefix.fork()
        cache.reserve(length - prefix.next_position)
        self._read(cache, request.ids[:-1])
        self._waiting.append((request, cache, prefix.next_position))
        self._waiting_bytes += demand

    def _read(self, cache: SequenceCache, ids: tuple[int, ...]) -> None:
        """Read what a cache lacks of some tokens."""
        for start in range(cache.next_position, len(ids), BLOCK_TOKENS):
            block = ids[start : min(start + BLOCK_TOKENS, len(ids))]
            segment = BatchSegment(cache, block, append_kind=AppendKind.TEXT)
            self._decoder.read([segment], Mode.APPEND)
            self.num_read_tokens += len(block)

    def _answer(self) -> None:
        """Answer the waiting requests, those with the same parameters together."""
        groups = dict[str, list[tuple[BatchRequest, SequenceCache, int]]]()
        for one in self._waiting:
            alike = replace(one[0], name="", ids=(0,), stop=())
            groups.setdefault(repr(alike), []).append(one)
        self._waiting, self._waiting_bytes = [], 0
        for group in groups.values():
            self._answer_group(group)

    def _answer_group(self, group: Sequence[tuple[BatchRequest, SequenceCache, int]]) -> None:
        first, caches = group[0][0], [cache for _, cache, _ in group]
        contexts = [request.ids for request, _, _ in group]
        prompts = [ids[-1:] for ids in contexts]
        self.num_read_tokens += len(prompts)
        streams = [
            IncrementalDetokenizer(self._decode, request.stop, discard_text)
            for request, _, _ in group
        ]
        limits = StoppingCriteria(first.max_new_tokens, self._stop_ids)
        batch = GenerationBatch(
            self._decoder, caches, prompts, first.sampling, limits, contexts=contexts
        )
        while batch.is_running:
            for number, token in batch.step():
                if not streams[number].push(token):
                    batch.stop(number)
        for number, (request, _, cached) in enumerate(group):
            streams[number].finish()
            ids, stream = tuple(batch.generated[number]), streams[number]
            is_cut = len(ids) == request.max_new_tokens and stream.matched_stop is None
            reason = "length" if is_cut else "stop"
            self._on_result(BatchResult(request, stream.text, ids, reason, cached))


def _held_bytes(path: Sequence[SequenceCache]) -> int:
    """Bytes of caches of prefixes, each of which shares the storage of the one before it."""
    shared = sum(map(_shared_bytes, path[:-1]))
    return sum(cache.nbytes for cache in path) - shared


def _shared_bytes(prefix: SequenceCache) -> int:
    """Bytes of a cache that its forks share with it once they have read more."""
    length = prefix.next_position
    return prefix_nbytes(prefix, length) if length >= SHORT_SEGMENT else 0
