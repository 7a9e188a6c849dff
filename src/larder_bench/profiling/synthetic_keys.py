"""Random keys and queries distributed like real ones, and their injection into caches.

Independent random numbers have no neighbors, so a search among them is meaningless. Here a text
moves from topic to topic; keys of a topic are near its center, keys of one of its words nearer
still, and all share a component per head. A query searches for one cached word for some steps, then
for another. Norms are those of Qwen3, whose keys are normalized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache import NewTokens, SequenceCache
from larder.core import LayerSpec, ModelSpec

TOPICS, WORDS, TOKENS_PER_TOPIC = (
    48,
    32,
    96,
)  # topics of a head, words of a topic, tokens before it changes
SPREADS = (0.6, 0.6, 0.45, 0.3)  # of the shared component, topics, words, and around a word
QUERY_NOISE = 0.5  # added to the target of a query at each step


@dataclass(frozen=True)
class KeyQueryStream:
    """Synthetic input of one layer: keys of a text, then a key and queries per decode step."""

    keys: Float[Tensor, "K S D"]
    later: Float[Tensor, "K N D"]
    queries: Float[Tensor, "H N D"]


def draw_stream(layer: LayerSpec, tokens: int, steps: int, steps_per_target: int) -> KeyQueryStream:
    """Keys of a text of `tokens` tokens and of `steps` steps after it; queries keep a target for
    `steps_per_target` steps.
    """
    source = torch.Generator().manual_seed(layer.index)
    heads, size = layer.kv_heads, layer.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, size, generator=source)

    common, topic, word, around = SPREADS
    whole = normal(heads, 1) * common
    topics = normal(heads, TOPICS) * topic
    words = normal(heads, TOPICS, WORDS) * word
    count = tokens + steps
    of = torch.randint(
        TOPICS, (count // TOKENS_PER_TOPIC + 1,), generator=source
    ).repeat_interleave(TOKENS_PER_TOPIC)
    of, which = of[:count], torch.randint(WORDS, (count,), generator=source)
    keys = whole + topics[:, of] + words[:, of, which] + normal(heads, count) * around
    keys = _scaled(keys, size**0.5)
    targets = torch.randint(
        tokens, (layer.query_heads, steps // steps_per_target + 1), generator=source
    )
    targets = targets.repeat_interleave(steps_per_target, 1)[:, :steps]
    owners = torch.arange(layer.query_heads)[:, None] // layer.group
    sought = keys[owners, targets] + normal(layer.query_heads, steps) * QUERY_NOISE
    return KeyQueryStream(
        keys[:, :tokens].contiguous(),
        keys[:, tokens:].contiguous(),
        _scaled(sought, 1.3 * size**0.5),
    )


def inject_streams(
    caches: Sequence[SequenceCache], streams: Sequence[KeyQueryStream]
) -> Callable[[int], None]:
    """Replace keys and queries of single tokens by those of the streams; return a function that
    sets the next step.

    Steps that one call runs for all layers, of caches without a search, keep the model's own.
    """
    step = [0]

    def with_stream(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(layer: int, new: NewTokens, *rest: Any) -> Tensor:
            stream, at = streams[layer], step[0]
            queries = stream.queries[:, at : at + 1].to(new.queries)
            keys = stream.later[:, at : at + 1].to(new.keys)
            return inner(layer, replace(new, queries=queries, keys=keys), *rest)

        return attend

    def set_step(number: int) -> None:
        step[0] = number % streams[0].queries.shape[1]

    for cache in caches:
        cache.attend = with_stream(cache.attend)  # type: ignore[method-assign]
    return set_step


def stop_injection(caches: Sequence[SequenceCache]) -> None:
    """Stop the injection; an injected cache refers to itself."""
    for cache in caches:
        vars(cache).pop("attend", None)


def draw_values(spec: ModelSpec, layer: LayerSpec, tokens: int) -> Tensor:
    source = torch.Generator().manual_seed(1000 + layer.index)
    shape = layer.kv_heads, tokens, layer.head_dim
    return torch.randn(*shape, generator=source, dtype=spec.dtype)


def _scaled(rows: Tensor, norm: float) -> Tensor:
    return rows * (norm / rows.norm(dim=-1, keepdim=True))
