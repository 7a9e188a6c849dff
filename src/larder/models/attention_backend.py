"""The one attention function: where a transformers model meets Larder's caches.

Registered under our own name through the public interfaces, it serves every architecture that uses
them. What it must know of a pass comes down the model's own call as the keyword `larder`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig

from larder.core.errors import ModelError
from larder.core.types import Keys, Queries, Values

NAME = "larder"

# Keywords that change nothing we compute: positions are ours, caches are ours, weights are not
# returned. Anything else that is set must be refused, for it would silently change the result.
IGNORED_KEYWORDS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "past_key_values",
        "past_key_value",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "is_causal",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "num_items_in_batch",
        "input_ids",
        "inputs_embeds",
        "labels",
        "logits_to_keep",
    }
)


@runtime_checkable
class LayerAttention(Protocol):
    """What travels down as `larder`: it answers for every layer of one pass."""

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: Keys,
        values: Values,
        scaling: float,
        sliding_window: int | None,
    ) -> Queries:
        """The attention output [H, Q, D] of one layer for post-RoPE queries, keys and values."""
        ...


def register_backend() -> None:
    """Make our attention known to transformers under our own name; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def attend(
    module: nn.Module,
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B K Q D"],
    value: Float[Tensor, "B K Q D"],
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,  # sixth, as in transformers' own: who wraps it hands it on by its place
    scaling: float | None = None,
    sliding_window: int | None = None,
    larder: LayerAttention | None = None,
    **rest: object,
) -> tuple[Float[Tensor, "B Q H D"], None]:
    """Attention as transformers calls it, answered by the pass that travels in `larder`.

    Raises:
        ModelError: no pass was handed down, or the model asks for what cannot be honored.
    """
    if larder is None:
        raise ModelError(
            "The model was called without Larder's pass: call it through larder, or give it back "
            "its own attention with Decoder.release()."
        )
    if attention_mask is not None:
        raise ModelError(_given_mask(attention_mask))
    _check_keywords(rest, dropout)
    index = module.layer_idx
    if not isinstance(index, int):
        raise ModelError(f"{type(module).__name__} does not say which layer it is.")
    factor = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = larder.attend(index, query[0], key[0], value[0], factor, sliding_window)
    return out.transpose(0, 1)[None], None


def _check_keywords(rest: Mapping[str, object], dropout: float) -> None:
    if dropout:
        raise ModelError(f"Attention dropout is {dropout}: put the model in eval mode.")
    for name, value in rest.items():
        if name not in IGNORED_KEYWORDS and value is not None and value is not False:
            raise ModelError(
                f"The model's attention uses {name!r}, which Larder cannot honor: "
                "take a model without it."
            )


def _no_mask(*args: object, attention_mask: Tensor | None = None, **kwargs: object) -> None:
    """Masks follow from true positions; transformers need not build any.

    A mask of three dimensions arrives here too: transformers takes it for padding.
    """
    if attention_mask is not None:
        raise ModelError(_given_mask(attention_mask))


def _given_mask(mask: Tensor) -> str:
    return (
        f"The model was given an attention mask of {mask.dim()} dimensions, but Larder masks by "
        "true positions: leave the mask out, and pack sequences end to end instead of padding."
    )


class PrivateConfigs:
    """Gives every part of a module copies of the configurations that it refers to.

    transformers keeps the attention implementation in a model's configuration, and lets models
    share one. The former ones are not changed, and `restore` puts them back.
    """

    def __init__(self, module: Any) -> None:
        self._former = [
            (part, name, value)
            for part in module.modules()
            for name, value in vars(part).items()
            if isinstance(value, PretrainedConfig)
        ]
        # Copied together, parts that shared one, or a part of one, still do.
        copies = copy.deepcopy([config for _, _, config in self._former])
        for (part, name, _), own in zip(self._former, copies, strict=True):
            vars(part)[name] = own

    def restore(self) -> None:
        """Give the module its former configurations back."""
        for part, name, former in self._former:
            vars(part)[name] = former
