"""Labels of one passage of text: attention to its entries while the model repeats it.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025),
arXiv:2505.23416, section 3, for the pass, which is that of the scorer `reconstruct`; Jegou and
Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning" (2026), arXiv:2601.07891, for
KVzip+; Huang et al., "Locret: Enhancing Eviction in Long-Context LLM Inference with Trained
Retaining Heads on Consumer-Grade Devices" (2024), arXiv:2410.01805, for logits before the softmax.

Each label is the highest of a kv head's query heads and of the tokens of the copy. A weight is
shared with everything that the token sees, the copy up to itself included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.decoder import Decoder
from larder.models.introspection import weight_inputs
from larder.ops.attention import cap_logits
from larder.ops.attention_weights import softmax_with_sinks
from larder.policy.scorers.reconstruct import Reconstruct

STATES, WEIGHT, PLUS, LOGIT = "states", "kvzip", "kvzip_plus", "logit"
CHUNK_TOKENS = 128  # tokens of the copy whose weights are in memory at a time
STATE_DTYPE = torch.float16

# By label: float32 [K, N], of a layer; `states` are [N, hidden].
LayerLabels = dict[str, Tensor]


@dataclass(frozen=True)
class CopyPass:
    """Text, the request to repeat it, and its copy.

    Args:
        ids: all three.
        context: tokens of the text.
        copy: index of the first token of the copy.
    """

    ids: tuple[int, ...]
    context: int
    copy: int

    @staticmethod
    def of(block: tuple[int, ...], request: tuple[int, ...]) -> CopyPass:
        """Pass of the scorer `reconstruct` over a text that is read whole."""
        [scratch] = Reconstruct(chunk=len(block)).scratch(block, 0, {"repeat": request})
        return CopyPass(block + scratch.ids, len(block), len(block) + len(request))


@torch.no_grad()
def label_layers(decoder: Decoder, text: CopyPass) -> dict[int, LayerLabels]:
    """Labels of every managed layer, by layer index."""
    managed = {layer.index: layer for layer in decoder.spec.managed}
    projections = weight_inputs(decoder.attentions, decoder.spec.managed, {"projection"})
    found, latest = dict[int, LayerLabels](), list[Tensor]()

    def record(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        latest[:] = [(args[0] if args else named["hidden_states"])[0]]

    def show(inputs: AttentionInputs) -> None:
        if inputs.layer in managed:
            projection = projections[inputs.layer]["projection"]
            found[inputs.layer] = _layer_labels(inputs, latest[0], projection, text)

    handles = (
        decoder.attentions[index].register_forward_pre_hook(record, prepend=True, with_kwargs=True)
        for index in managed
    )
    with forward_hooks(handles):
        decoder.forward_uncached(text.ids, CausalAttention(show))
    return found


def _layer_labels(
    inputs: AttentionInputs,
    states: Float[Tensor, "T hidden"],
    projection: Float[Tensor, "H D hidden"],
    text: CopyPass,
) -> LayerLabels:
    kv_heads = inputs.keys.shape[0]
    sizes = written_sizes(inputs.values[:, : text.context].float(), projection.float())
    norms = states.float().norm(dim=-1)
    nothing = torch.full((kv_heads, text.context), -torch.inf)
    best: LayerLabels = {WEIGHT: nothing, PLUS: nothing, LOGIT: nothing}
    rows = torch.arange(text.copy, len(text.ids))
    for some in rows.split(CHUNK_TOKENS):
        logits, weights = row_attention(inputs, int(some[0]), len(some))
        seen, shares = logits[..., : text.context], weights[..., : text.context]
        written = shares * sizes[:, :, None] / norms[some, None]
        for name, numbers in ((LOGIT, seen), (WEIGHT, shares), (PLUS, written)):
            best[name] = torch.maximum(best[name], numbers.amax((1, 2)))
    return {STATES: states[: text.context].to(STATE_DTYPE), **best}


def written_sizes(
    values: Float[Tensor, "K N D"], projection: Float[Tensor, "H D hidden"]
) -> Float[Tensor, "K R N"]:
    """Length of what each query head would write for a value, behind the output projection."""
    groups = projection.unflatten(0, (len(values), -1))  # [K, R, D, hidden]
    grams = groups @ groups.transpose(-1, -2)
    squares = ((values[:, None] @ grams) * values[:, None]).sum(-1)
    return squares.clamp(min=0).sqrt()


def row_attention(
    inputs: AttentionInputs, first: int, count: int
) -> tuple[Float[Tensor, "K R Q S"], Float[Tensor, "K R Q S"]]:
    """Logits and softmax weights of `count` queries over all tokens up to the last of them."""
    kv_heads, stop = inputs.keys.shape[0], first + count
    groups = inputs.queries[:, first:stop].float().unflatten(0, (kv_heads, -1))
    keys = inputs.keys[:, None, :stop].float()
    logits = cap_logits(groups @ keys.transpose(-1, -2) * inputs.scaling, inputs.softcap)
    later = torch.arange(stop) > torch.arange(first, stop)[:, None]
    visible = logits.masked_fill(later, -torch.inf)
    weights = softmax_with_sinks(visible.flatten(0, 1), inputs.sinks)
    return logits, weights.unflatten(0, (kv_heads, -1))
