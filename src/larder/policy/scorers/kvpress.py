"""Scorer that calls a press of NVIDIA/kvpress.

Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution" (2025), arXiv:2510.00636, section 4, presents that library; each press names its own
paper. Any of its presses that only score can be named; the budget, what becomes of the rejected,
the schedule and all else are the policy's. Presses that wrap others share budgets out, chunk or
merge, for which there are other slots. The package must be installed (`larder[kvpress]`).

A press sees keys and values of all entries, and of the tokens of the last pass what it makes of
their hidden states: under `whole()` all tokens of the context where it asks for more than a window
of them. Under `blockwise()` it sees one block beside the entries that were kept, which those made
for a whole context refuse. Heads that hold equally many entries are shown together, others one by
one, each with its own query heads, so that means over a layer are then over a head's own. Numbers
are float32. Weights are those of the model, its own scaling included; what a folded entry counts
for is known to none but those that take weights.

The share that is removed is no concern of a score, but two ask: write it,
`StreamingLLMPress(compression_ratio=0.75)`, `CompactorPress(compression_ratio=0.75)`. Importing
kvpress wraps the attention functions of transformers, for its own sake; to our passes that makes no
difference.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from functools import cached_property
from inspect import signature
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter, DependencyError, ScoreError, SpellingError, UnknownName
from larder.core.observation import Observation
from larder.core.registry import unknown_name_message
from larder.core.spelling import Call, Value, parse
from larder.core.types import Packed
from larder.policy.protect import ProtectedTokens
from larder.policy.scorers._kvpress_module import AttentionModuleAdapter, model_stub
from larder.policy.scorers.base import Scorer

# Presses that judge by the keys, or by a window at the end, and so need not see all queries.
LITTLE = frozenset(
    {
        "CURPress",
        "ExpectedAttentionStatsPress",
        "KeyDiffPress",
        "KnormPress",
        "LagKVPress",
        "PyramidKVPress",
        "QFilterPress",
        "RandomPress",
        "SnapKVPress",
        "StreamingLLMPress",
        "TOVAPress",
    }
)
WEIGHTS = frozenset({"ObservedAttentionPress"})  # take the whole matrix of attention weights
STATES = frozenset({"KVzapPress"})  # take hidden states into networks of their own
LEARNED = frozenset({"KVzapPress", "QFilterPress"})  # look weights up by the name of a model
# Fields of presses that say how many tokens they put above all others.
FIRST = ("n_sink", "num_sinks", "sink_size_start")
LAST = ("window_size", "sink_size_end")
FAULTS = (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Kvpress(Scorer):
    """Scores of a kvpress press.

    Args:
        press: as kvpress calls it, with parameters where they are not the usual ones:
            "SnapKVPress(window_size=32)". What is true or false there is written 1 or 0.
        model: whose learned weights the press is to look up, by its name on the hub; for those
            that need any.
        seed: seed of random presses.
    """

    press: str = "KnormPress()"
    model: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        name = _parse_press(self.press).name
        if name in LEARNED and not self.model:
            raise BadParameter(
                f"{name} has learned from a model: name it on the hub, as in "
                f'kvpress(press="{name}", model="Qwen/Qwen3-8B").'
            )

    def required_providers(self) -> frozenset[str]:
        is_learned = _parse_press(self.press).name in STATES
        return frozenset({"states"}) if is_learned else frozenset()

    def observes_whole_text(self) -> bool:
        return _parse_press(self.press).name not in LITTLE

    def protected_tokens(self) -> ProtectedTokens:
        """Sinks and the window that the press has parameters for.

        Raises:
            DependencyError: kvpress is not installed.
            UnknownName: it has no such press, or the press no such parameter.
        """
        values: dict[str, int] = self._press.__dict__
        first, last = (max((values.get(n, 0) for n in names), default=0) for names in (FIRST, LAST))
        return ProtectedTokens(first, last)

    def score(self, observation: Observation) -> Packed:
        lengths, heads = observation.entries.lengths, list(range(observation.layer.kv_heads))
        if len(set(lengths)) == 1:
            groups = [heads]
        else:
            groups = [[head] for head in heads]
        devices = [observation.queries.device] if observation.queries.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # pyright: ignore
            self._seed_generator(observation, devices)
            return torch.cat([self._of_heads(observation, group) for group in groups])

    def _seed_generator(self, observation: Observation, devices: list[torch.device]) -> None:
        """Seed the generators, for each layer separately."""
        begin = (self.seed << 16) + observation.layer.index
        torch.default_generator.manual_seed(begin)
        if devices:
            torch.cuda.manual_seed(begin)

    def _of_heads(self, observation: Observation, heads: list[int]) -> Packed:
        count = observation.entries.lengths[heads[0]]
        if not count:
            return torch.zeros(0, device=observation.queries.device)
        module, name = AttentionModuleAdapter(observation, heads), _parse_press(self.press).name
        states = self._states(observation) if name in STATES else module.numbers
        weights = module.weights() if name in WEIGHTS else None
        options = {"position_embeddings": module.position_embeddings}
        try:
            scores = self._press.score(module, states, module.keys, module.values, weights, options)
        except FAULTS as error:
            self._refuse(observation, count, f"{type(error).__name__}: {error}", error)
        if tuple(scores.shape) != (1, len(heads), count):
            shown = f"it returned scores of shape {tuple(scores.shape)}"
            self._refuse(observation, count, f"{shown}, not (1, {len(heads)}, {count})", None)
        return scores.detach().float().flatten()

    def _states(self, observation: Observation) -> Float[Tensor, "1 Q hidden"]:
        if "states" not in observation.inputs:
            raise ScoreError(
                f"{self.press} judges by hidden states, which are seen while a context is read: "
                "put prefill_only() behind it."
            )
        return observation.inputs["states"][None].float()

    def _refuse(
        self, observation: Observation, count: int, reason: str, cause: Exception | None
    ) -> NoReturn:
        raise ScoreError(
            f"{self.press} cannot score layer {observation.layer.index}, {count} entries by "
            f"{observation.queries.shape[1]} queries while {observation.phase.value} "
            f"({' '.join(reason.split())}): it may be made for a context that is read in one "
            "piece and larger than its windows; put whole() in front and prefill_only() behind."
        ) from cause

    @cached_property
    def _press(self) -> Any:
        """Press instance, with its learned weights."""
        press = _build_press(_parse_press(self.press))
        try:
            press.post_init_from_model(model_stub(self.model))
        except FAULTS as error:
            raise BadParameter(
                f"{self.press} cannot be given what it learned for the model {self.model!r} "
                f"({' '.join(str(error).split())}): name one that it knows, or take another press."
            ) from error
        return press


def _parse_press(press: str) -> Call:
    """Parsed press: name and parameters."""
    try:
        calls = parse(press, "press")
    except SpellingError as error:
        raise BadParameter(f"kvpress.press cannot be read: {error}") from error
    if len(calls) != 1:
        raise BadParameter(f"kvpress.press must be one press, got {press!r}.")
    return calls[0]


def _build_press(call: Call) -> Any:
    """Press instance from its parsed form.

    Raises:
        UnknownName: unknown press or parameter.
        BadParameter: the press rejects a value.
    """
    kinds = _scoring_presses()
    if call.name in _package_classes() and call.name not in kinds:
        raise BadParameter(
            f"{call.name} of kvpress does more than score: what it shares out, cuts or merges is "
            f"for other slots of the policy; name one of {', '.join(sorted(kinds))}."
        )
    if call.name not in kinds:
        raise UnknownName(unknown_name_message("press that scores", call.name, sorted(kinds)))
    taken = {field.name: field for field in fields(kinds[call.name]) if field.init}
    for name in call.parameters:
        if name not in taken:
            raise UnknownName(
                unknown_name_message(f"parameter of {call.name}", name, sorted(taken))
            )
    arguments = {
        name: _convert_argument(taken[name], value) for name, value in call.parameters.items()
    }
    try:
        return kinds[call.name](**arguments)
    except FAULTS as error:
        raise BadParameter(f"{call.name} refuses its parameters ({error}): give others.") from error


def _scoring_presses() -> dict[str, type]:
    """Presses that score by themselves, by name."""
    offered = _package_classes()
    base = offered.pop("ScorerPress")
    return {
        name: kind
        for name, kind in offered.items()
        if issubclass(kind, base) and "press" not in signature(kind).parameters
    }


def _package_classes() -> dict[str, type]:
    """All classes of the package, by name."""
    names: dict[str, Any] = _library().__dict__
    return {name: kind for name, kind in names.items() if isinstance(kind, type)}


def _convert_argument(field: Field[Any], value: Value) -> Any:
    """Value for a press parameter; booleans are written as numbers."""
    return bool(value) if isinstance(field.default, bool) else value


def _library() -> Any:
    try:
        import kvpress  # pyright: ignore
    except ImportError as error:
        raise DependencyError(
            "scorer kvpress needs the package kvpress, which is not installed; "
            'run `pip install "larder[kvpress]"`, or take a scorer of ours, such as keydiff().'
        ) from error
    return kvpress


Part = Kvpress
