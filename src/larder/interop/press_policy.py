"""Policy by a press of NVIDIA/kvpress: it chooses entries of a prompt, by what its own hooks would
show it of each layer; generated tokens stay.

Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution" (2025), arXiv:2510.00636, section 4, presents kvpress; each press names its own paper.

The package is not imported. A press is used by its interface: `post_init_from_model(model)`, and
for each layer `compress(module, hidden_states, keys, values, attentions, kwargs)`, which returns
the keys and values that are left and may mark some of them in `module.masked_key_indices`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from larder.core.errors import ScoreError, UsageError
from larder.core.observation import Calibration, Observation, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.core.types import Packed
from larder.interop.attachment import Attachment
from larder.models.decoder import Decoder
from larder.policy.budgets.base import Budget
from larder.policy.scorers.base import Scorer
from larder.policy.scorers.kvpress import FAULTS
from larder.session.default_policy import TextKind, default_policy
from larder.session.policy import Policy
from larder.session.prefill import SizeOptions

OTHER_PARTS = "whole() > protect(sinks=0, recent=0) > sinks_and_window() > uniform()"
GUIDE = "docs/from_kvpress.md names the policy to take in its place"
# Methods in which a press does more than choose entries of a prompt, layer by layer.
HOOKS = ("__call__", "forward_hook")
MASKED = "masked_key_indices"  # attribute of attention modules
# Integers of the same size, to compare bits.
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class PressAdapter:
    """Press with the attention modules that it is shown.

    Args:
        press: press of kvpress, or an object with its interface.
        modules: attention module of each layer, by layer index.
        rotary: rotary embedding of the model.
    """

    press: Any
    modules: Mapping[int, nn.Module]
    rotary: Any

    @staticmethod
    def of(press: Any, model: Any, decoder: Decoder) -> PressAdapter:
        """Press initialized for a model, as its own context manager does.

        Args:
            decoder: decoder of the model.

        Raises:
            UsageError: it is no press, does more than choose entries of a prompt, or cannot be
                initialized for the model; or the model caches latents.
        """
        _check_interface(press)
        if any(layer.latent_rank for layer in decoder.spec.layers):
            raise UsageError(
                f"{press!r} reads keys and values of every head, but a {type(model).__name__} "
                f"caches latents (MLA): give policy= instead of kvpress=; {GUIDE}."
            )
        try:
            press.post_init_from_model(model)
            rotary = decoder.body.rotary_emb
        except FAULTS as error:
            raise UsageError(
                f"{press!r} cannot be initialized for a {type(model).__name__} "
                f"({_line(error)}): give a press that knows the model; {GUIDE}."
            ) from error
        if rotary is None:
            raise UsageError(
                f"{press!r} reads rotary embeddings, but this {type(model).__name__} has none: "
                f"give policy= instead of kvpress=; {GUIDE}."
            )
        return PressAdapter(press, decoder.attentions, rotary)

    def __repr__(self) -> str:
        return repr(self.press)

    def kept_mask(
        self,
        layer: int,
        states: Float[Tensor, "S hidden"],
        keys: Float[Tensor, "K S D"],
        values: Float[Tensor, "K S D"],
    ) -> Bool[Tensor, "K S"]:
        """Mask of the entries of a prompt that the press keeps.

        Args:
            states: input of the layer's attention.
            keys: post-RoPE keys.

        Raises:
            ScoreError: the press failed, or changed keys or values.
        """
        digests = entry_digests(keys, values)
        # A copy, so that what a press notes on the module does not stay on the model.
        module: Any = copy.copy(self.modules[layer])
        rotary = self._rotary_of(module)
        vars(module).update({"rotary_emb": rotary, MASKED: None})
        try:
            left_keys, left_values = self.press.compress(
                module, states[None], keys[None], values[None], None, _arguments(states, rotary)
            )
        except FAULTS as error:
            raise ScoreError(
                f"{self!r} cannot choose among the {len(states)} entries of layer {layer} "
                f"({_line(error)}): change its parameters, or leave it out for prompts of this "
                f"length. Attention weights of a whole prompt are not available here; {GUIDE}."
            ) from error
        return self._mask(digests, left_keys, left_values, vars(module)[MASKED])

    def _mask(
        self, digests: Int64[Tensor, "K S"], keys: Tensor, values: Tensor, masked: Any
    ) -> Bool[Tensor, "K S"]:
        """Mask of the entries that were left and not marked."""
        left = entry_digests(keys[0], values[0])
        indices, is_found = matched_indices(digests, left)
        if not bool(is_found.all()):
            raise ScoreError(
                f"{self!r} returned keys or values that the cache does not hold: it merges, "
                f"rotates or zeroes them, but only a choice of entries can be taken over; {GUIDE}."
            )
        stays = torch.ones_like(left, dtype=torch.bool)
        if masked is not None:
            stays[masked[1], masked[2]] = False
        return torch.zeros_like(digests, dtype=torch.bool).scatter_(1, indices, stays)

    def _rotary_of(self, module: Any) -> Any:
        """Rotary embedding of a layer, in models with one for each kind of attention too."""
        if "layer_type" in signature(self.rotary.forward).parameters:
            return partial(self.rotary, layer_type=module.config.layer_types[module.layer_idx])
        return self.rotary


def _arguments(states: Float[Tensor, "S hidden"], rotary: Any) -> dict[str, Any]:
    """Keyword arguments of a call of an attention module that reads a prompt."""
    indices = torch.arange(len(states), device=states.device)
    return {
        "hidden_states": states[None],
        "position_embeddings": rotary(states[None], indices[None]),
        "position_ids": indices[None],
        "cache_position": indices,
        "attention_mask": None,
    }


def entry_digests(
    keys: Float[Tensor, "K S D"], values: Float[Tensor, "K S D"]
) -> Int64[Tensor, "K S"]:
    """64-bit digest of the bits of each entry's key and value."""
    generator = torch.Generator().manual_seed(0)
    size, bounds = (2, keys.shape[2]), torch.iinfo(torch.int64)
    factors = torch.randint(bounds.min, bounds.max, size, generator=generator).to(keys.device)
    parts = zip((keys, values), factors, strict=True)
    sums = [
        torch.stack([(_bits(head) * numbers).sum(1) for head in part]) for part, numbers in parts
    ]
    return sums[0] + sums[1]


def matched_indices(
    whole: Int64[Tensor, "K S"], left: Int64[Tensor, "K N"]
) -> tuple[Int64[Tensor, "K N"], Bool[Tensor, "K N"]]:
    """Index of each digest in `whole`, and whether it is there; equal ones get indices in turn."""
    ordered, order = whole.sort(dim=1, stable=True)
    wanted, wanted_order = left.sort(dim=1, stable=True)
    turn = torch.arange(left.shape[1], device=left.device) - torch.searchsorted(wanted, wanted)
    ranks = (torch.searchsorted(ordered, wanted) + turn).clamp(max=whole.shape[1] - 1)
    is_found = ordered.gather(1, ranks) == wanted
    indices = torch.empty_like(ranks).scatter_(1, wanted_order, order.gather(1, ranks))
    return indices, is_found


def _bits(numbers: Float[Tensor, "S D"]) -> Int64[Tensor, "S D"]:
    return numbers.contiguous().view(INTEGERS[numbers.itemsize]).long()


def _check_interface(press: Any) -> None:
    name = type(press).__name__
    if isinstance(press, type):
        raise UsageError(
            f"kvpress={press.__name__} is a class: give an instance, such as "
            f"{press.__name__}(compression_ratio=0.5)."
        )
    if isinstance(press, str):
        raise UsageError(
            f"kvpress={press!r} is a text: give the object, as in kvpress=SnapKVPress(0.5), or its "
            f"policy by policy=; {GUIDE}."
        )
    missing = [each for each in ("compress", "post_init_from_model") if not hasattr(press, each)]
    if missing:
        raise UsageError(
            f"kvpress= must be a press of NVIDIA/kvpress, but {name} has no {missing[0]}(): give "
            "one such as SnapKVPress(0.5), or a policy by policy=."
        )
    for hook in HOOKS:
        if sum(hook in vars(base) for base in type(press).__mro__) > 1:
            raise UsageError(
                f"{name} has a {hook}() of its own: it acts beyond a choice of entries layer by "
                f"layer, the only thing that can be taken over; {GUIDE}."
            )


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def chosen_policy(
    attachment: Attachment, policy: str | Policy | None, sizes: SizeOptions, kvpress: Any
) -> str | Policy:
    """Policy that was given, else that of a press if there is one, else the default of prompts.

    Raises:
        UsageError: the press cannot be taken over, or was given beside a policy or a size.
    """
    if kvpress is None:
        return default_policy(TextKind.PROMPT) if policy is None else policy
    if policy is not None or sizes != SizeOptions():
        raise UsageError(
            "kvpress= was given together with a policy, a budget or a block, but a press chooses "
            "by its own compression ratio from a whole prompt: leave the others out."
        )
    press = PressAdapter.of(kvpress, attachment.module, attachment.decoder)
    others = Policy.parse(OTHER_PARTS)
    return replace(others, scorer=PressScorer(press), budget=PressBudget(kept=1.0))


@dataclass(frozen=True)
class PressBudget(Budget):
    """Entries with a score above 0, however many each head has.

    The press sets the size, so that `tokens` and `kept` are upper bounds.
    """

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        """No entries without a plan: the press is asked about every prompt."""
        return (0,) * layers

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {
            index: Plan.from_mask(scored.scores > 0, scored.lengths)
            for index, scored in ready.items()
        }


@dataclass(frozen=True, eq=False)
class PressScorer(Scorer):
    """Choice of a press, for `PressBudget`.

    A press is asked about a first text, which it sees whole, as under kvpress. All entries of later
    texts score 1.
    """

    press: PressAdapter

    def required_providers(self) -> frozenset[str]:
        return frozenset({"states"})

    def observes_whole_text(self) -> bool:
        return True

    def score(self, observation: Observation) -> Packed:
        entries, heads = observation.entries, range(observation.layer.kv_heads)
        if set(entries.lengths) != {observation.queries.shape[1]}:
            return torch.ones(sum(entries.lengths), device=entries.keys.device)
        keys = torch.stack([entries.head_keys(head) for head in heads])
        values = torch.stack([entries.head_values(head) for head in heads])
        kept = self.press.kept_mask(
            observation.layer.index, observation.inputs["states"], keys, values
        )
        return kept.float().flatten()
