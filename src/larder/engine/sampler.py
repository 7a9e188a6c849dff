"""Sampling of the next token: penalties and biases of logits, temperature, top-k, top-p, min-p."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import check_integer, check_number, check_type, require
from larder.core.errors import BadParameter, UnknownName
from larder.core.registry import unknown_name_message

if TYPE_CHECKING:
    from larder.engine.constraint import ConstraintMatcher

# Keywords of transformers' generate, or of other calls, that have another name here, and what to
# give instead.
TRANSFORMERS_KEYWORDS: Mapping[str, str] = MappingProxyType(
    {
        "do_sample": "temperature=0 takes the most likely token, and any other samples",
        "max_tokens": "give max_new_tokens",
        "max_length": "give max_new_tokens, which does not count the prompt",
        "stop_strings": "give stop=[...]",
        "streamer": "iterate over engine.stream(prompt)",
        "num_return_sequences": "repeat the call with another seed",
        "num_beams": "beams run in model.generate(...) inside larder.applied(model, ...)",
        "eos_token_id": "the model's own end tokens stop an answer, and stop=[...] does at a text",
        "policy": "it is an argument of Engine(...) and Engine.load(...)",
        "budget": "it is an argument of Engine(...) and Engine.load(...)",
        "past_key_values": "engine.read keeps a context, and engine.ask answers over it",
    }
)
MAX_BIASES = 1024  # token ids with a bias, of one answer


class SamplingKeywords(TypedDict, total=False):
    """Keywords of `SamplingParams`, as methods of `Engine` take them."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of an answer.

    They act on the logits in this order: `logit_bias`, penalties, `temperature`, `min_p`, `top_k`,
    `top_p`. Bias and penalties hold at temperature 0, too.

    Args:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: sample among the k most likely tokens; 0 for all.
        top_p: nucleus in (0, 1]: sample among the most likely of these k that together reach this
            share of their probability (the order of Hugging Face's generation: top-k first).
        seed: seed of the random generator, in 64 bits.
        min_p: sample among tokens that are at least this share as likely as the most likely one,
            in [0, 1].
        repetition_penalty: logits of tokens that the prompt or the answer contains are divided by
            it if positive, else multiplied (Keskar et al., "CTRL" (2019), arXiv:1909.05858,
            section 4.1); 1 for none. In `Engine.ask` and `Chat.say` the message alone counts.
        presence_penalty: subtracted from the logits of tokens that the answer contains.
        frequency_penalty: subtracted as many times as the answer contains the token.
        logit_bias: number added to the logit of a token, by token id; at most 1,024 of them.

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
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            check_number(name, getattr(self, name))
        for name in ("top_k", "seed"):
            check_integer(name, getattr(self, name))
        if not 0 <= self.temperature < math.inf:
            raise BadParameter(
                f"temperature must be a finite number, 0 or more, got {self.temperature}."
            )
        require(self.top_k >= 0, "top_k", "0 (all) or more", self.top_k)
        require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise BadParameter(f"seed must fit into 64 bits, got {self.seed}.")
        require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        if not 0 < self.repetition_penalty < math.inf:
            raise BadParameter(
                f"repetition_penalty must be above 0 and finite, got {self.repetition_penalty}."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            _check_finite(name, getattr(self, name))
        _check_biases(self.logit_bias)

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
        scaled = (ranked - ranked[0]) / self.temperature
        if self.min_p:
            scaled = _min_p_logits(self.min_p, scaled)
        shares = scaled.softmax(-1)
        before = shares.cumsum(-1) - shares
        return int(
            ids[torch.multinomial(shares * (before < self.top_p), 1, generator=random_generator)]
        )


class TokenSampler:
    """Sampling of one answer: random state, and the prompt's tokens for the repetition penalty.

    Args:
        prompt_ids: token ids that `repetition_penalty` counts beside those of the answer.
        matcher: what the answer must match; None for any text.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        matcher: ConstraintMatcher | None = None,
    ) -> None:
        self._params, self._random_generator = params, params.generator()
        self._matcher = matcher
        is_counted = params.repetition_penalty != 1
        self._prompt_ids = sorted(set(prompt_ids)) if is_counted else []

    @property
    def is_complete(self) -> bool:
        """True if nothing may follow the tokens so far."""
        return self._matcher is not None and self._matcher.is_complete

    def sample(self, logits: Float[Tensor, " V"], answer_ids: Sequence[int]) -> int:
        """Sample the next token.

        Args:
            logits: logits of the next token; they stay as they are.
            answer_ids: tokens of the answer so far.
        """
        if self._matcher is None:
            return self._sample(logits, answer_ids)
        token = self._sample(self._matcher.masked(logits), answer_ids)
        self._matcher.accept(token)
        return token

    def forced(self, vocab_size: int) -> list[int]:
        """Tokens that must follow the latest one, whatever the logits are; they count as sampled.

        Args:
            vocab_size: number of logits, on which the random numbers of a sample depend.
        """
        tokens = [] if self._matcher is None else self._matcher.forced()
        for token in tokens:
            assert self._matcher is not None
            self._matcher.accept(token)
            if self._params.temperature:  # later tokens are those of one sample per token
                self._params.sample(torch.zeros(vocab_size), self._random_generator)
        return tokens

    def _sample(self, logits: Float[Tensor, " V"], answer_ids: Sequence[int]) -> int:
        params = self._params
        if params.logit_bias:
            logits = _biased(logits, params.logit_bias)
        if params.repetition_penalty != 1:
            counted = (*self._prompt_ids, *answer_ids)
            logits = _repetition_penalized(logits, params.repetition_penalty, counted)
        if answer_ids and (params.presence_penalty or params.frequency_penalty):
            ids = torch.tensor(answer_ids, device=logits.device)
            counts = torch.bincount(ids, minlength=len(logits))
            logits = logits - params.frequency_penalty * counts
            logits -= params.presence_penalty * (counts > 0)
        return params.sample(logits, self._random_generator)


def _min_p_logits(min_p: float, logits: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
    from transformers.generation.logits_process import MinPLogitsWarper

    return MinPLogitsWarper(min_p)(_no_ids(), logits[None])[0]


def _biased(logits: Float[Tensor, " V"], bias: Mapping[int, float]) -> Float[Tensor, " V"]:
    """Logits with biases added. Raise BadParameter if a token id is outside the vocabulary."""
    from transformers.generation.logits_process import SequenceBiasLogitsProcessor

    if max(bias) >= len(logits):
        raise BadParameter(
            f"logit_bias has the token id {max(bias)}, but the model has {len(logits)} tokens: "
            "take the ids of its own tokenizer."
        )
    by_sequence: Any = {(token,): float(number) for token, number in bias.items()}
    return SequenceBiasLogitsProcessor(by_sequence)(_no_ids(), logits[None])[0]


def _repetition_penalized(
    logits: Float[Tensor, " V"], penalty: float, ids: Sequence[int]
) -> Float[Tensor, " V"]:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    counted: Any = torch.tensor([ids], device=logits.device, dtype=torch.long)
    return RepetitionPenaltyLogitsProcessor(penalty)(counted, logits[None])[0]


def _no_ids() -> torch.LongTensor:
    return torch.LongTensor([[]])


def _check_finite(name: str, value: float) -> None:
    """Raise BadParameter if the value is not a finite number."""
    check_number(name, value)
    require(math.isfinite(value), f"{name}", "a finite number", value)


def _check_biases(bias: Mapping[int, float]) -> None:
    """Raise BadParameter if the biases are malformed or too many."""
    check_type("logit_bias", bias, Mapping, "a mapping of token ids to numbers")
    if len(bias) > MAX_BIASES:
        raise BadParameter(f"logit_bias must have at most {MAX_BIASES} ids, got {len(bias)}.")
    for token, number in bias.items():
        check_integer("a token id of logit_bias", token)
        if token < 0:
            raise BadParameter(f"The token ids of logit_bias must be 0 or more, got {token}.")
        _check_finite(f"logit_bias[{token}]", number)


def params_of(keywords: SamplingKeywords) -> SamplingParams:
    """Sampling parameters of keyword arguments of generation.

    Raises:
        UnknownName: one does not exist; the message names the nearest, or the way that Larder has.
        BadParameter: a value is outside its range.
    """
    known = [each.name for each in fields(SamplingParams)]
    for name in keywords.keys() - set(known):
        others = ("max_new_tokens", "stop", "progress", "images")
        message = unknown_name_message("sampling keyword", name, [*known, *others])
        if name in TRANSFORMERS_KEYWORDS:
            message = f"No sampling keyword named {name!r}: {TRANSFORMERS_KEYWORDS[name]}."
        raise UnknownName(message)
    return SamplingParams(**keywords)
