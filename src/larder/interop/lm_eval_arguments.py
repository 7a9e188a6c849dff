"""Arguments of the model `larder` of lm-eval, and options of generation in its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from larder.core.errors import UsageError
from larder.core.registry import unknown_name_message
from larder.engine.completion import CompletionOptions
from larder.engine.engine import Engine
from larder.engine.sampler import SamplingParams

AUTO_BATCH = 8  # contexts or prompts at a time where lm-eval leaves the choice to the model
ARGUMENTS = (
    "pretrained",
    "policy",
    "budget",
    "min_budget",
    "block",
    "tokenizer",
    "device",
    "dtype",
    "revision",
    "adapter",
    "max_length",
    "max_gen_toks",
    "add_bos_token",
    "prefix_token_id",
    "batch_size",
)
# Names of the number of tokens to generate, in tasks of lm-eval.
LENGTH_ARGUMENTS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
GENERATION_ARGUMENTS = ("until", "do_sample", "temperature", "top_p", "top_k", *LENGTH_ARGUMENTS)


@dataclass(frozen=True)
class GenerationOptions:
    """Options of generation in a task.

    Args:
        until: strings that end a text.
        temperature: 0 takes the most likely token.
    """

    until: tuple[str, ...]
    max_gen_toks: int
    temperature: float
    top_p: float
    top_k: int

    @staticmethod
    def of(gen_kwargs: Mapping[str, Any], max_gen_toks: int) -> GenerationOptions:
        """Options from the keywords of a request.

        Args:
            max_gen_toks: tokens to generate where the request does not say.

        Raises:
            UsageError: a keyword is unknown.
        """
        for name in gen_kwargs:
            if name not in GENERATION_ARGUMENTS:
                known = [*map(str, GENERATION_ARGUMENTS)]
                raise UsageError(unknown_name_message("argument of generation", name, known))
        until = gen_kwargs.get("until") or ()
        lengths = [
            int(gen_kwargs[name]) for name in LENGTH_ARGUMENTS if gen_kwargs.get(name) is not None
        ]
        temperature = float(gen_kwargs.get("temperature") or 0.0)
        is_sampled = gen_kwargs.get("do_sample", temperature > 0)
        return GenerationOptions(
            tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
            lengths[0] if lengths else max_gen_toks,
            (temperature or 1.0) if is_sampled else 0.0,
            float(gen_kwargs.get("top_p", 1.0)),
            int(gen_kwargs.get("top_k", 0)),
        )

    def for_engine(self, seed: int) -> CompletionOptions:
        """Options of the engine."""
        sampling = SamplingParams(self.temperature, self.top_k, self.top_p, seed)
        return CompletionOptions(sampling, self.max_gen_toks, self.until)


def check_arguments(pretrained: Any, policy: Any, unknown: Mapping[str, object]) -> None:
    """Check that model and policy are given.

    Args:
        unknown: arguments that do not exist.

    Raises:
        UsageError: one is missing, or there is an unknown one; the message lists the known ones.
    """
    for name in unknown:
        raise UsageError(
            unknown_name_message("argument of the model larder", name, list(ARGUMENTS))
        )
    if pretrained is None:
        raise UsageError("The model larder needs pretrained: a name as for Engine.load, or a path.")
    if policy is None:
        raise UsageError(
            "The model larder needs a policy: give policy=full for the whole cache, or for example "
            "policy=kvzip,budget=0.25."
        )


def batch_size_of(batch_size: int | str) -> int:
    """Number of contexts at a time.

    Raises:
        UsageError: it is neither a number nor `auto`, with or without a schedule.
    """
    text = str(batch_size)
    if text.startswith("auto"):
        return AUTO_BATCH
    if not text.isdecimal() or not int(text):
        raise UsageError(f"batch_size must be a number of contexts or auto, got {batch_size!r}.")
    return int(text)


def engine_of(
    pretrained: Any, device: str | None, loading: Mapping[str, Any], sizes: Mapping[str, Any]
) -> Engine:
    """Engine of a model by name, or of one in memory.

    Args:
        device: None for the first GPU, else the CPU; `cuda`, which is lm-eval's default on every
            machine, is the CPU where there is none.
        loading: options of `Engine.load` beside the device.
        sizes: policy, budget and block.

    Raises:
        UsageError: an option of loading was given for a model in memory.
    """
    if isinstance(pretrained, str):
        is_gpu = device is None or device.startswith("cuda")
        target = "cpu" if is_gpu and not torch.cuda.is_available() else device or "cuda"
        return Engine.load(pretrained, device=target, **loading, **sizes)
    given = {name: value for name, value in {**loading, "device": device}.items() if value}
    tokenizer = given.pop("tokenizer", None)
    if given:
        raise UsageError(
            f"{', '.join(given)} given for a model in memory, which is used as it is: leave it out."
        )
    return Engine(pretrained, tokenizer, **sizes)
