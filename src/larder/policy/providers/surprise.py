"""Provider of the surprise of each token: -log p given all tokens before it, in nats.

"Before it" is what the cache held when the token was read. Read by `novelty` (SirLLM,
arXiv:2405.12528) and `infinipot` (arXiv:2410.01518).
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from larder.policy.providers.base import TokenProvider


class Surprise(TokenProvider):
    """Column `surprise`."""

    def measure(self, logits: Float[Tensor, "N V"], ids: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        return logits.logsumexp(-1) - logits.gather(1, ids[:, None])[:, 0]


Part = Surprise
