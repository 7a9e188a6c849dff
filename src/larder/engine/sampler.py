"""Sampling of the next token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import check_integer, check_number
from larder.core.errors import BadParameter, UnknownName
from larder.core.family import unknown_name_message

# Keywords of transformers' generate that have another name here, and what to give instead.
TRANSFORMERS_KEYWORDS: Mapping[str, str] = MappingProxyType(
    {
        "do_sample": "temperature=0 takes the most likely token, and any other samples",
        "max_length": "give max_new_tokens, which does not count the prompt",
        "stop_strings": "give stop=[...]",
        "streamer": "iterate over engine.stream(prompt)",
        "num_return_sequences": "repeat the call with another seed",
        "num_beams": "larder.engine samples one sequence per prompt",
        "past_key_values": "engine.read keeps a context, and engine.ask answers over it",
    }
)
KEYWORDS = ("temperature", "top_p", "top_k", "seed", "max_new_tokens", "stop", "progress")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: temperature, top-k, top-p and seed.

    Args:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: sample among the k most likely tokens; 0 for all.
        top_p: nucleus in (0, 1]: sample among the most likely of these k that together reach this
            share of their probability (the order of Hugging Face's generation: top-k first).
        seed: seed of the random generator, in 64 bits.

    Raises:
        BadParameter: a value is outside its range.

    Examples:
        >>> from larder.engine.sampler import SamplingParams
        >>> answer = engine.ask(memory, "Who?", SamplingParams(temperature=0.7), max_new_tokens=8)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            check_number(name, getattr(self, name))
        for name in ("top_k", "seed"):
            check_integer(name, getattr(self, name))
        if not 0 <= self.temperature < math.inf:
            raise BadParameter(
                f"temperature must be a finite number, 0 or more, got {self.temperature}."
            )
        if self.top_k < 0:
            raise BadParameter(f"top_k must be 0 (all) or more, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise BadParameter(f"top_p must be in (0, 1], got {self.top_p}.")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise BadParameter(f"seed must fit into 64 bits, got {self.seed}.")

    def generator(self) -> torch.Generator:
        """New random generator for one answer.

        Returns:
            CPU generator that begins with the seed.

        Examples:
            >>> generator = SamplingParams(temperature=0.7, seed=1).generator()
        """
        return torch.Generator().manual_seed(self.seed)

    def sample(self, logits: Float[Tensor, " V"], random_generator: torch.Generator) -> int:
        """Sample the next token; of equal logits the smaller id comes first.

        Args:
            logits: logits of the next token.
            random_generator: state of the sampling; not used at temperature 0.

        Returns:
            Token id.

        Shape:
            logits: [V]

        Examples:
            >>> SamplingParams().sample(torch.tensor([0.0, 2.0, 2.0]), torch.Generator())
            1
        """
        if self.temperature == 0:
            return int(logits.argmax())
        ranked, ids = torch.sort(logits.float().cpu(), descending=True, stable=True)
        ranked = ranked[: self.top_k or None].double()
        # The best is 0 before dividing: however small the temperature, nothing overflows upwards.
        shares = ((ranked - ranked[0]) / self.temperature).softmax(-1)
        before = shares.cumsum(-1) - shares
        return int(
            ids[torch.multinomial(shares * (before < self.top_p), 1, generator=random_generator)]
        )


def check_keywords(unknown: Mapping[str, object]) -> None:
    """Reject keyword arguments of generation that do not exist.

    Raises:
        UnknownName: there is one; the message names the nearest, or the way that Larder has.
    """
    for name in unknown:
        message = unknown_name_message("sampling keyword", name, list(KEYWORDS))
        if name in TRANSFORMERS_KEYWORDS:
            message = f"No sampling keyword named {name!r}: {TRANSFORMERS_KEYWORDS[name]}."
        raise UnknownName(message)
