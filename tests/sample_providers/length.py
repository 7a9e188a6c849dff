"""Provider that only tests know: the length of a token's hidden state, kept in a column."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from larder.policy import ActivationProvider


class Length(ActivationProvider):
    """Column `length`."""

    has_column = True

    def capture(
        self, attention: nn.Module, states: Float[Tensor, "Q hidden"]
    ) -> Float[Tensor, " Q"]:
        del attention
        return states.float().norm(dim=-1)


Part = Length
