"""Attention backend of transformers: one attention function that answers from Larder's caches.

Registered under its own name through transformers' public interfaces, it serves every architecture
that dispatches attention through them. The state of the forward batch travels down the model's call
as the keyword `larder`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig

from larder.core.errors import ModelError
from larder.core.spec import ModelSpec
from larder.core.types import Keys, Queries
from larder.ops.attention import NO_SINKS, apply_sinks, causal_attention, chunk_sections

NAME = "larder"
CONTEXT_KEYWORD = "larder"  # the keyword argument that carries the batch through the model

# Keywords without effect here: positions and caches are Larder's, weights are not returned. Any
# other keyword that is set must be rejected, because it would silently change the result.
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


# Mask of no elements, which transformers hands to the layers as it is. Given none, it looks for
# packed sequences among the positions, and waits for the device to say what it found.
NO_MASK = torch.empty(1, 1, 0, 0)

CHUNKED = "chunked_attention"  # kind of a layer whose chunks only its mask shows


@dataclass(frozen=True)
class QueryTemperature:
    """Factor on queries that grows with their position (Llama 4).

    The model counts positions from the first token of the call, whatever its true position is.

    Args:
        floor: tokens between two steps of the factor.
        scale: of the logarithm of the step.
    """

    floor: float
    scale: float

    def factors(self, positions: Int[Tensor, " Q"]) -> Float[Tensor, " Q"]:
        """Factor at each position."""
        return torch.log1p(torch.floor((positions.float() + 1) / self.floor)) * self.scale + 1

    def at_positions(self, queries: Queries, positions: Int[Tensor, " Q"]) -> Queries:
        """Queries with the factors of true positions in place of those of the call."""
        counted = torch.arange(len(positions), device=positions.device)
        factors = self.factors(positions) / self.factors(counted)
        return (queries * factors[:, None]).to(queries.dtype)


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one call of attention.

    Args:
        layer: number of the layer in the model.
        queries, keys, values: post-RoPE; row t of each belongs to token t of the packed call.
        scaling: factor on the logits.
        sliding_window: latest tokens, its own included, that a query sees; None for all.
        softcap: as in `LayerSpec`.
        sinks: logit of each query head that has no value; empty without sinks.
        chunk: as in `LayerSpec`.
        temperature: factor that the model put on the queries, None for none.
        latent_rank: of latents (MLA), which are keys and values at once: first channels of the
            output that are used; 0 for values of their own.
    """

    layer: int
    queries: Queries
    keys: Keys
    values: Float[Tensor, "K Q Dv"]
    scaling: float
    sliding_window: int | None
    softcap: float | None = None
    sinks: Float[Tensor, " _"] = NO_SINKS
    chunk: int | None = None
    temperature: QueryTemperature | None = None
    latent_rank: int = 0

    def queries_at(self, positions: Int[Tensor, " Q"]) -> Queries:
        """Queries as the model makes them at true positions."""
        if self.temperature is None:
            return self.queries
        return self.temperature.at_positions(self.queries, positions)

    def output(
        self, state: tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]
    ) -> Float[Tensor, "H Q D"]:
        """Output for the merged output and log-sum-exp over entries, under the sinks."""
        return apply_sinks(*state, self.sinks).to(self.queries.dtype)


class SteppedSegments(NamedTuple):
    """Attention of segments that were attended to in one call.

    Args:
        segments: their indices.
        out: a token of each.
    """

    segments: list[int]
    out: Float[Tensor, "H N D"]

    def by_segment(self) -> dict[int, Queries]:
        """Attention of each segment."""
        return dict(zip(self.segments, self.out.split(1, 1), strict=True))


@runtime_checkable
class LayerAttention(Protocol):
    """Attention of every layer during one forward batch; the value of the keyword `larder`."""

    def attend(self, inputs: AttentionInputs) -> Queries:
        """Attention output [H, Q, D] of one layer."""
        ...


class CausalAttention:
    """Plain causal attention without a cache, with a callback for the inputs of each layer."""

    def __init__(self, show: Callable[[AttentionInputs], None]) -> None:
        self._show = show

    def attend(self, inputs: AttentionInputs) -> Queries:
        self._show(inputs)
        sections = (inputs.queries.shape[1],)
        if inputs.chunk is not None:
            sections = chunk_sections(sections, (0,), inputs.chunk)
        state = causal_attention(
            inputs.queries,
            inputs.keys,
            inputs.values,
            inputs.scaling,
            sections,
            window=inputs.sliding_window,
            softcap=inputs.softcap,
        )
        return inputs.output(state)


class AttentionProbe:
    """Layer attention that returns zeros and records the inputs of each layer."""

    def __init__(self) -> None:
        self.seen: dict[int, AttentionInputs] = {}

    def attend(self, inputs: AttentionInputs) -> Queries:
        self.seen[inputs.layer] = inputs
        return torch.zeros_like(inputs.queries)


class RenumberedAttention:
    """Layer attention that is given the index of a layer among those with attention."""

    def __init__(self, attention: LayerAttention, spec: ModelSpec) -> None:
        self._attention, self._spec = attention, spec

    def attend(self, inputs: AttentionInputs) -> Queries:
        return self._attention.attend(replace(inputs, layer=self._spec.index_of(inputs.layer)))


def register_backend() -> None:
    """Register the attention and mask functions with transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def text_implementation(config: Any, name: str) -> str | dict[str, str]:
    """Argument of `set_attn_implementation` that sets a language model, and no vision tower."""
    text = config.get_text_config()
    return {key: name for key in config.sub_configs if getattr(config, key) is text} or name


def attend(
    module: nn.Module,
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B K Q D"],
    value: Float[Tensor, "B K Q Dv"],
    attention_mask: Tensor | NewTokenMask | None = None,
    dropout: float = 0.0,  # sixth, as in transformers: wrappers pass it by position
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    larder: LayerAttention | None = None,
    **rest: object,
) -> tuple[Float[Tensor, "B Q H Dv"], None]:
    """Attention function in transformers' signature, answered by the batch in `larder`.

    Raises:
        ModelError: there is no batch, or the model passes an unsupported argument.
    """
    if larder is None:
        raise ModelError(
            "The model was called without a forward batch of Larder: call it through larder, or "
            "restore its own attention with Decoder.release(). If another thread uses the model "
            "with Larder, take a lock around its calls."
        )
    if attention_mask is not None and not _is_no_mask(attention_mask):
        raise ModelError(_given_mask(attention_mask))
    _check_keywords(rest, dropout)
    index = module.layer_idx
    if not isinstance(index, int):
        raise ModelError(f"{type(module).__name__} has no integer layer_idx, got {index!r}.")
    factor = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = NO_SINKS if s_aux is None else s_aux.detach().float()
    chunk = _chunk_of(module, index)
    inputs = AttentionInputs(
        index,
        query[0],
        key[0],
        value[0],
        factor,
        sliding_window if chunk is None else chunk,
        softcap,
        sinks,
        chunk,
        _temperature_of(module),
    )
    out = larder.attend(inputs)
    return out.transpose(0, 1)[None], None


def _chunk_of(module: nn.Module, index: int) -> int | None:
    """Tokens of a chunk of a layer with chunked attention; None for other layers."""
    config: Any = vars(module).get("config")
    kinds = getattr(config, "layer_types", None) or ()
    is_chunked = index < len(kinds) and kinds[index] == CHUNKED
    return config.attention_chunk_size if is_chunked else None


def _temperature_of(module: nn.Module) -> QueryTemperature | None:
    """Factor on the queries of a layer of Llama 4 without RoPE; None for other layers."""
    attributes = vars(module)
    if not attributes.get("attn_temperature_tuning") or attributes.get("use_rope", True):
        return None
    return QueryTemperature(float(attributes["floor_scale"]), float(attributes["attn_scale"]))


def _check_keywords(rest: Mapping[str, object], dropout: float) -> None:
    if dropout:
        raise ModelError(f"Attention dropout is {dropout}: put the model in eval mode.")
    for name, value in rest.items():
        if name not in IGNORED_KEYWORDS and value is not None and value is not False:
            raise ModelError(
                f"The model's attention uses {name!r}, which Larder does not support: "
                "choose a model without it."
            )


@dataclass(frozen=True)
class NewTokenMask:
    """Mask of the new tokens of a call, for a caller that packs them: layers do not take it.

    Args:
        padding: mask of two dimensions that the model was given; None without.
        sees_next: tokens that attend to the one behind them, as those of an image may; of each row
            and each new token but the last.
    """

    padding: Bool[Tensor, "B S"] | None
    sees_next: Bool[Tensor, "B Q"]


def _no_mask(
    *args: object,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] | None = None,
    allow_is_causal_skip: bool = True,
    batch_size: int = 1,
    q_length: int = 1,
    q_offset: int = 0,
    device: Any = "cpu",
    **kwargs: object,
) -> NewTokenMask | None:
    """Mask function that builds no mask, because masks follow from true positions.

    A mask of three dimensions arrives here too: transformers treats it as padding.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ModelError(_given_mask(attention_mask))
    sees_next = torch.zeros(batch_size, max(q_length - 1, 0), dtype=torch.bool, device=device)
    if mask_function is not None and not allow_is_causal_skip and q_length > 1:
        rows = torch.arange(batch_size, device=device)[:, None]
        positions = torch.arange(q_offset, q_offset + q_length - 1, device=device)[None]
        sees_next |= mask_function(rows, torch.zeros_like(rows), positions, positions + 1)
    if attention_mask is None and not sees_next.any():
        return None
    return NewTokenMask(attention_mask, sees_next)


def _is_no_mask(mask: Tensor | NewTokenMask) -> bool:
    return isinstance(mask, Tensor) and mask.shape == NO_MASK.shape


def _given_mask(mask: Tensor | NewTokenMask) -> str:
    dimensions = 2 if isinstance(mask, NewTokenMask) else mask.dim()
    return (
        f"The model was given an attention mask of {dimensions} dimensions, but Larder masks by "
        "true positions: leave the mask out, and pack sequences end to end instead of padding."
    )


class PrivateConfigs:
    """Private copies of the configurations that the parts of a module refer to.

    transformers stores the attention implementation in a model's configuration, which several
    models may share. The original configurations are not changed; `restore` puts them back.
    """

    def __init__(self, module: Any) -> None:
        self._former = [
            (part, name, value)
            for part in module.modules()
            for name, value in vars(part).items()
            if isinstance(value, PretrainedConfig)
        ]
        # One deepcopy of all: parts that shared a configuration, or a piece of one, still share it.
        self._copies = copy.deepcopy([config for _, _, config in self._former])
        self.install()

    def install(self) -> None:
        """Put the private copies in place."""
        for (part, name, _), held in zip(self._former, self._copies, strict=True):
            vars(part)[name] = held

    def restore(self) -> None:
        """Put the original configurations back."""
        for part, name, former in self._former:
            vars(part)[name] = former


class AttentionPerCall:
    """Context manager that installs private configurations for one call of a model. Reentrant.

    Args:
        configs: configurations with Larder's attention.
    """

    def __init__(self, configs: PrivateConfigs) -> None:
        self._configs, self._depth = configs, 0

    def __enter__(self) -> None:
        if not self._depth:
            self._configs.install()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._configs.restore()
