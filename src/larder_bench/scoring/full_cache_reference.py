"""Reference of the full cache on a text, and distances of other caches from it, without a task.

The beginning of a conversation is read, and the real continuation is read after it in scratch mode.
Besides next-token distributions, attention is compared: the share of each query head's attention on
entries that the other cache still holds, new tokens included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import BadParameter, Conversation, LayerSpec, Mode
from larder.engine import Engine
from larder.models import BatchSegment as Tokens
from larder.models import LayerActivations
from larder.ops import cap_logits, sink_logits, sinks_by_group, softmax_with_sinks
from larder.session import ConversationMemory, PrefillInput, TokenizedTranscript, prefill_memory


@dataclass(frozen=True)
class ContextContinuation:
    """Beginning of a conversation, and the tokens that follow it."""

    source: PrefillInput
    following: tuple[int, ...]

    @property
    def last_utterance(self) -> str:
        """Last utterance, which determines the episode."""
        message = self.source.conversation.messages[-1]
        return message.utterance or message.content


def split_context(
    engine: Engine, conversation: Conversation, following: int
) -> ContextContinuation:
    """Conversation cut where `following` tokens follow: after a message if one ends in the later
    half of the context, else within one.

    Raises:
        BadParameter: the conversation is too short.
    """
    transcript = engine.tokenizer.encode_conversation(conversation)
    spans = transcript.spans
    ids = transcript.ids[: spans[-1][1]]  # without the template's suffix after the last message
    most = len(ids) - following
    if most < following:
        raise BadParameter(
            f"{conversation.name} has {len(ids)} tokens, too few to compare {following} after "
            "the rest: take more tokens, or fidelity(following=...)."
        )
    stops = [stop for _, stop in spans if most // 2 <= stop <= most]
    cut = stops[-1] if stops else most
    count = sum(start < cut for start, _ in spans)
    spans = tuple((start, min(stop, cut)) for start, stop in spans[:count])
    beginning = replace(conversation, messages=conversation.messages[:count], questions=())
    return ContextContinuation(
        PrefillInput(beginning, TokenizedTranscript(ids[:cut], spans)), ids[cut : cut + following]
    )


@dataclass(frozen=True, eq=False)
class FullCacheReference:
    """Logits of the full cache after each token of the continuation, and its attention.

    Args:
        recorded: queries and new keys by layer.
    """

    engine: Engine
    passage: ContextContinuation
    memory: ConversationMemory
    logits: Float[Tensor, "N V"]
    recorded: dict[int, LayerActivations] = field(repr=False)

    @staticmethod
    def of(engine: Engine, cut: ContextContinuation) -> FullCacheReference:
        """Read a passage with the engine's policy, which must be the full cache."""
        recorded = dict[int, LayerActivations]()
        memory = prefill_memory(engine.runtime, cut.source, engine.policy, {})

        def record(row: int, layer: int, activations: LayerActivations) -> None:
            recorded[layer] = activations

        cache, _ = memory.activate_for(cut.last_utterance)
        segments, rows = [Tokens(cache, cut.following)], range(len(cut.following))
        logits = engine.loaded.decoder.forward_logits(segments, Mode.SCRATCH, rows, record)
        return FullCacheReference(engine, cut, memory, logits, recorded)

    def expected(self, memory: ConversationMemory) -> tuple[Float[Tensor, "N V"], SequenceCache]:
        """Logits of another cache on the continuation, and the cache."""
        cache, _ = memory.activate_for(self.passage.last_utterance)
        segments = [Tokens(cache, self.passage.following)]
        rows = range(len(self.passage.following))
        return self.engine.loaded.decoder.forward_logits(segments, Mode.SCRATCH, rows), cache

    def attention_mass_kept(self, other: SequenceCache) -> Float[Tensor, " N"]:
        """Share of each token's attention on entries that the other cache holds.

        Mean over managed layers and query heads.
        """
        full, _ = self.memory.activate_for(self.passage.last_utterance)
        layers = full.spec.managed
        shares = [self._of_layer(layer, full, other) for layer in layers]
        return torch.stack(shares).mean(0)

    def _of_layer(
        self, layer: LayerSpec, full: SequenceCache, other: SequenceCache
    ) -> Float[Tensor, " N"]:
        recorded, entries = self.recorded[layer.index], full.entries(layer.index)
        resident = resident_positions(other, layer, full.next_position)
        shares: list[Tensor] = []
        for head in range(layer.kv_heads):
            keys = entries.head_keys(head).float()
            queries = recorded.queries[head * layer.group : (head + 1) * layer.group].float()
            among = queries @ recorded.keys[head].float().T * layer.scaling  # [R, N, N]
            ahead = torch.ones(among.shape[1:], dtype=torch.bool, device=among.device).triu(1)
            before = queries @ keys.T * layer.scaling  # [R, N, S]
            before, among = (cap_logits(part, layer.softcap) for part in (before, among))
            logits = torch.cat([before, among.masked_fill(ahead, -torch.inf)], -1)
            sinks = sinks_by_group(sink_logits(layer, logits), layer.kv_heads)[head]
            both = softmax_with_sinks(logits, sinks)
            lost = both[..., : before.shape[-1]] * ~resident[head]
            shares.append(1 - lost.sum(-1))  # [R, N]
        return torch.cat(shares).mean(0)


def resident_positions(cache: SequenceCache, layer: LayerSpec, tokens: int) -> Bool[Tensor, "K S"]:
    """Mask of the tokens of the text that each kv head still has in its fast tier."""
    entries = cache.entries(layer.index)
    heads: Sequence[Tensor] = [entries.head_positions(h).long() for h in range(layer.kv_heads)]
    resident = torch.zeros(layer.kv_heads, tokens, dtype=torch.bool, device=entries.keys.device)
    for head, positions in enumerate(heads):
        resident[head, positions] = True
    return resident
