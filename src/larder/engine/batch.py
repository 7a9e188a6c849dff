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

from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError, InputError
from larder.core.types import AppendKind, Mode, TokenIds
from larder.engine.detokenizer import IncrementalDetokenizer, discard_text
from larder.engine.generate import GenerationBatch, StoppingCriteria
from larder.engine.sampler import SamplingParams
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import Decoder

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
    for index, request in enumerate(ordered):
        before, longest = shared[index], max(shared[index], shared[index + 1])
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


class CacheCharges:
    """Bytes of caches and their forks, each storage once.

    What a window holds is replaced at each step, and charged at its most instead.
    """

    def __init__(self) -> None:
        self.total = 0
        self._storages = dict[int, int]()  # bytes by address

    def add(self, cache: SequenceCache, length: int, block: int) -> None:
        """Charge a cache; arguments as for `with_cache`."""
        self.total = self.with_cache(cache, length, block)
        self._storages |= _storages(cache)

    def with_cache(self, cache: SequenceCache, length: int, block: int) -> int:
        """Total with one cache more, whose storage is allocated.

        Args:
            length: tokens that it will have read.
            block: tokens that it reads at once, which a window holds beside its own.
        """
        spec = cache.spec
        if spec.arena is not None:  # pages are shared, but not by address
            return self.total + spec.full_bytes(length)
        added = {key: n - self._storages.get(key, 0) for key, n in _storages(cache).items()}
        windows = sum(
            layer.bytes_per_token(spec.dtype) * min(length, layer.sliding_window + block)
            for layer in spec.layers
            if layer.sliding_window is not None
        )
        return self.total + sum(added.values()) + windows + spec.recurrent_bytes


def _storages(cache: SequenceCache) -> dict[int, int]:
    """Bytes of the storages of layers without windows, by address."""
    stores = (each for each in cache.layers if each.layer.sliding_window is None)
    held = [tensor.untyped_storage() for store in stores for tensor in store.tensors()]
    return {storage.data_ptr(): storage.nbytes() for storage in held if storage.nbytes()}


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
        self._path = list[tuple[PrefixNode, SequenceCache]]()  # prefixes from the root on
        self._charges = CacheCharges()
        self.num_read_tokens = 0

    def run(self, requests: Sequence[BatchRequest]) -> None:
        """Answer all requests."""
        for node in prefix_tree(requests).walk():
            while self._path and self._path[-1][0].ids != node.ids[: len(self._path[-1][0].ids)]:
                self._path.pop()
            self._visit(node)
        self._path.clear()
        self._answer()

    def _visit(self, node: PrefixNode) -> None:
        """Read a prefix behind its parent, and add its requests; they are refused without room."""
        parent = self._path[-1][1] if self._path else SequenceCache(self._decoder.spec, "dense")
        cache = self._fork(parent, len(node.ids), len(node.ids))
        if cache is None:
            for request in node.requests:
                self._refuse(request)
            return
        self._read(cache, node.ids)
        cache.compact()
        self._path.append((node, cache))
        for request in sorted(node.requests, key=lambda each: -each.max_new_tokens):
            self._add(request, cache)

    def _add(self, request: BatchRequest, prefix: SequenceCache) -> None:
        """Add a request to those that are answered next, once there is room."""
        num_read = len(request.ids) - 1
        cache = self._fork(prefix, num_read + 1 + request.max_new_tokens, num_read)
        if cache is None:
            self._refuse(request)
            return
        self._read(cache, request.ids[:-1])
        self._waiting.append((request, cache, prefix.next_position))

    def _refuse(self, request: BatchRequest) -> None:
        length = len(request.ids) + request.max_new_tokens
        message = (
            f"The request of {length} tokens, whose keys and values take "
            f"{self._decoder.spec.full_bytes(length)} bytes, does not fit into the "
            f"{self._max_bytes} that the batch may take: give it more memory, or shorten the "
            "request."
        )
        self._on_error(request, BudgetError(message))

    def _fork(self, prefix: SequenceCache, length: int, num_read: int) -> SequenceCache | None:
        """Fork of a prefix with storage for a text, charged, once there is room; None if there is
        none beside the prefixes.

        Args:
            length: tokens of the text.
            num_read: tokens among them that are read before others are generated.
        """
        while (cache := self._fork_now(prefix, length, num_read)) is None and self._waiting:
            self._answer()
        return cache

    def _fork_now(self, prefix: SequenceCache, length: int, num_read: int) -> SequenceCache | None:
        """Fork as by `_fork`; None if there is no room now."""
        most = self._max_bytes
        least = self._decoder.spec.full_bytes(length) - prefix.nbytes
        if most is not None and self._charges.total + least > most:
            return None  # not even allocated
        cache = prefix.fork()
        cache.allocate(length - prefix.next_position)
        if most is not None:
            block = min(BLOCK_TOKENS, num_read - prefix.next_position)
            if self._charges.with_cache(cache, length, block) > most:
                return None
            self._charges.add(cache, length, block)
        return cache

    def _read(self, cache: SequenceCache, ids: TokenIds) -> None:
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
        self._waiting = []
        for group in groups.values():
            self._answer_group(group)
        self._charges = CacheCharges()
        for _, cache in self._path:
            self._charges.add(cache, cache.next_position, 0)

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
