"""Reference of the full cache on a text, and distances of other caches from it, without a task.

The beginning of a conversation is read, and the tokens that really follow are read behind it in
scratch mode. Beside the distributions of the next token, attention itself is compared: how much of
what each query head pays goes to entries that the other cache still holds, new tokens included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.conversation import Conversation
from larder.core.errors import BadParameter
from larder.core.spec import LayerSpec
from larder.core.types import Mode
from larder.engine.engine import Engine
from larder.models.forward_batch import BatchSegment as Tokens
from larder.models.forward_batch import LayerActivations
from larder.session.memory import ConversationMemory
from larder.session.prefill import PrefillInput, prefill_memory
from larder.session.transcript.tokenizer_adapter import Transcript


@dataclass(frozen=True)
class ContextContinuation:
    """The beginning of a conversation, and the tokens that follow it."""

    source: PrefillInput
    following: tuple[int, ...]

    @property
    def last_utterance(self) -> str:
        """What was said last, by which an episode is found."""
        message = self.source.conversation.messages[-1]
        return message.utterance or message.content


def split_context(
    engine: Engine, conversation: Conversation, following: int
) -> ContextContinuation:
    """A conversation cut where so many tokens follow: behind a message if one ends in the later
    half of what is read, else in the middle of one.

    Raises:
        BadParameter: it is too short for that.
    """
    written = engine.tokenizer.encode_conversation(conversation)
    spans = written.spans
    ids = written.ids[: spans[-1][1]]  # without what the template puts behind the last message
    most = len(ids) - following
    if most < following:
        raise BadParameter(
            f"{conversation.name} has {len(ids)} tokens, too few to compare {following} behind "
            "the rest: take more tokens, or fidelity(following=...)."
        )
    stops = [stop for _, stop in spans if most // 2 <= stop <= most]
    cut = stops[-1] if stops else most
    count = sum(start < cut for start, _ in spans)
    spans = tuple((start, min(stop, cut)) for start, stop in spans[:count])
    begun = replace(conversation, messages=conversation.messages[:count], questions=())
    return ContextContinuation(
        PrefillInput(begun, Transcript(ids[:cut], spans)), ids[cut : cut + following]
    )


@dataclass(frozen=True, eq=False)
class FullCacheReference:
    """What the full cache expects after each token that follows, and where it looks.

    Args:
        recorded: by layer, what its queries and new keys were.
    """

    engine: Engine
    passage: ContextContinuation
    memory: ConversationMemory
    logits: Float[Tensor, "N V"]
    recorded: dict[int, LayerActivations] = field(repr=False)

    @staticmethod
    def of(engine: Engine, cut: ContextContinuation) -> FullCacheReference:
        """Read a passage under the full cache, which is the engine's."""
        recorded = dict[int, LayerActivations]()
        memory = prefill_memory(engine.runtime, cut.source, engine.policy, {})

        def note(row: int, layer: int, own: LayerActivations) -> None:
            del row
            recorded[layer] = own

        cache, _ = memory.activate_for(cut.last_utterance)
        rows, wanted = [Tokens(cache, cut.following)], range(len(cut.following))
        logits = engine.loaded.decoder.forward_logits(rows, Mode.SCRATCH, wanted, note)
        return FullCacheReference(engine, cut, memory, logits, recorded)

    def expected(self, memory: ConversationMemory) -> tuple[Float[Tensor, "N V"], SequenceCache]:
        """Logits of another cache, and the cache."""
        cache, _ = memory.activate_for(self.passage.last_utterance)
        rows = [Tokens(cache, self.passage.following)]
        wanted = range(len(self.passage.following))
        return self.engine.loaded.decoder.forward_logits(rows, Mode.SCRATCH, wanted), cache

    def attention_mass_kept(self, other: SequenceCache) -> Float[Tensor, " N"]:
        """Of the attention of each token, the share on entries that the other cache holds.

        A mean over managed layers and query heads.
        """
        own, _ = self.memory.activate_for(self.passage.last_utterance)
        layers = own.spec.managed
        shares = [self._of_layer(layer, own, other) for layer in layers]
        return torch.stack(shares).mean(0)

    def _of_layer(
        self, layer: LayerSpec, own: SequenceCache, other: SequenceCache
    ) -> Float[Tensor, " N"]:
        seen, entries = self.recorded[layer.index], own.entries(layer.index)
        held = resident_positions(other, layer, own.next_position)
        shares: list[Tensor] = []
        for head in range(layer.kv_heads):
            keys = entries.head_keys(head).float()
            queries = seen.queries[head * layer.group : (head + 1) * layer.group].float()
            among = queries @ seen.keys[head].float().T * layer.scaling  # [R, N, N]
            ahead = torch.ones(among.shape[1:], dtype=torch.bool, device=among.device).triu(1)
            before = queries @ keys.T * layer.scaling  # [R, N, S]
            both = torch.cat([before, among.masked_fill(ahead, -torch.inf)], -1).softmax(-1)
            lost = both[..., : before.shape[-1]] * ~held[head]
            shares.append(1 - lost.sum(-1))  # [R, N]
        return torch.cat(shares).mean(0)


def resident_positions(cache: SequenceCache, layer: LayerSpec, tokens: int) -> Bool[Tensor, "K S"]:
    """Which tokens of the text each kv head still has in its fast tier."""
    entries = cache.entries(layer.index)
    heads: Sequence[Tensor] = [entries.head_positions(h).long() for h in range(layer.kv_heads)]
    held = torch.zeros(layer.kv_heads, tokens, dtype=torch.bool, device=entries.keys.device)
    for head, positions in enumerate(heads):
        held[head, positions] = True
    return held
