"""How much each layer's keys change when most of the past is hidden.

Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 3.2, eq. 8 and 9. Keys are
compared after RoPE, token by token, as the paper writes it; the released profiler compares
windows of 100 tokens at once, and hands the model a mask that it misreads (a 3-D mask is taken for
padding). The mask here is 4-D and applied by our own attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.types import Keys, Queries, Values
from larder.models.decoder import Decoder


@dataclass(frozen=True)
class Profile:
    """The text length and the mask that sensitivity is measured with.

    The paper reads 16384 tokens in blocks of 4096; the defaults are a quarter of that, in the same
    proportions, so that a laptop measures a model in seconds to minutes.

    Args:
        tokens: N, length of the text.
        sinks: first tokens that every later token sees.
        block: a token sees its own block, up to itself.
        overlap: share of the block before that it sees as well, its last part.
    """

    tokens: int = 4096
    sinks: int = 32
    block: int = 1024
    overlap: float = 0.5

    def __post_init__(self) -> None:
        if self.tokens < 2 or self.block < 1 or self.sinks < 0 or not 0 <= self.overlap <= 1:
            raise BadParameter(
                f"profile needs tokens >= 2, block >= 1, sinks >= 0 and overlap in [0, 1], got "
                f"{self}."
            )


def block_mask(profile: Profile) -> Bool[Tensor, "1 1 N N"]:
    """Which earlier token each token sees while block-wise eviction is imitated."""
    row = torch.arange(profile.tokens)[:, None]
    column = torch.arange(profile.tokens)[None, :]
    reach = int(profile.block * profile.overlap)
    first = (row // profile.block) * profile.block - reach
    seen = (column <= row) & ((column < profile.sinks) | (column >= first))
    return seen[None, None]


@torch.no_grad()
def layer_similarities(
    decoder: Decoder, ids: tuple[int, ...], profile: Profile
) -> tuple[float, ...]:
    """Sigma of every managed layer: mean cosine of its keys with and without the mask.

    Raises:
        BadParameter: the text is shorter than the profile asks for.
    """
    if len(ids) < profile.tokens:
        raise BadParameter(f"The profile reads {profile.tokens} tokens, but got {len(ids)}.")
    mask = block_mask(profile).to(decoder.spec.device)
    causal = torch.ones_like(mask).tril()
    text = torch.tensor([ids[: profile.tokens]], device=decoder.spec.device)
    plain, hidden = _Masked(causal), _Masked(mask)
    for layers in (plain, hidden):
        decoder.module.base_model(
            input_ids=text,
            position_ids=torch.arange(profile.tokens, device=text.device)[None],
            use_cache=False,
            larder=layers,
        )
    return tuple(
        float(F.cosine_similarity(plain.keys[i].float(), hidden.keys[i].float(), dim=-1).mean())
        for i in (layer.index for layer in decoder.spec.managed)
    )


class _Masked:
    """Answers for every layer with attention under one mask, and keeps the keys."""

    def __init__(self, mask: Bool[Tensor, "1 1 N N"]) -> None:
        self.keys: dict[int, Float[Tensor, "K N D"]] = {}
        self._mask = mask

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: Keys,
        values: Values,
        scaling: float,
        sliding_window: int | None,
    ) -> Queries:
        self.keys[layer] = keys
        mask = self._mask
        if sliding_window is not None:
            mask = mask & torch.ones_like(mask).triu(1 - sliding_window)
        return F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], mask, scale=scaling, enable_gqa=True
        )[0]
