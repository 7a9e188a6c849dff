"""Context manager that gives every `generate()` of a model a LarderCache."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, TypeGuard
from weakref import WeakSet

from transformers import DynamicCache

from larder.core.arguments import checked_call
from larder.core.errors import UsageError
from larder.interop.attachment import Attachment, attached
from larder.interop.cache import LarderCache
from larder.interop.press_policy import chosen_policy
from larder.session.policy import Policy
from larder.session.prefill import SizeOptions

# Attribute that generate() sets on a cache that it was given.
GIVEN_BY_CALLER = "_is_user_defined"


class AppliedPolicy:
    """Holder of the cache of the latest `generate()` inside `applied`; None before it.

    Args:
        create: makes an empty cache.

    Examples:
        >>> with larder.applied(model, policy="snapkv", budget=64) as run:
        ...     ids = model.generate(**inputs, max_new_tokens=2)
        >>> run.cache.get_seq_length() == ids.shape[1] - 1
        True
    """

    def __init__(self, create: Callable[[], LarderCache]) -> None:
        self.cache: LarderCache | None = None
        self._create, self._has_warned = create, False
        self._exchanged = WeakSet[DynamicCache]()

    def __repr__(self) -> str:
        return f"AppliedPolicy(cache={self.cache})"

    def _substitute(self, cache: object) -> LarderCache | None:
        """New cache in place of the empty one that `generate` makes.

        None where no cache is used; the first such call is warned about.

        Raises:
            UsageError: a cache of another kind was asked for, or the caller gave one.
        """
        if cache is None:
            self._warn_once()
            return None
        if isinstance(cache, DynamicCache) and cache.get_seq_length():
            raise UsageError(
                f"The {type(cache).__name__} that was given inside larder.applied holds "
                f"{cache.get_seq_length()} tokens that no policy has read: pass "
                "past_key_values=larder.LarderCache(model, ...) from the first call on. With "
                "guidance_scale, which fills a second cache, give generate() that LarderCache "
                "outside larder.applied."
            )
        if not _is_made_for_a_call(cache) or cache in self._exchanged:
            raise UsageError(
                f"A {type(cache).__name__} was given inside larder.applied, so that no policy "
                "would act: leave cache_implementation and past_key_values out, or pass a "
                "larder.LarderCache. After a call of the model itself, pass on the "
                "past_key_values of its output."
            )
        self._exchanged.add(cache)
        self.cache = self._create()
        # Only assisted decoding asks for the logits of more than the last token.
        self.cache.batch.takes_candidates = True
        return self.cache

    def _warn_once(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            "The model was called without a cache inside larder.applied, so that no policy acts on "
            "the call: use model.generate(...) with its cache, or pass past_key_values=larder."
            "LarderCache(model, ...). lm-eval's model hf makes such calls; its model larder does "
            "not (docs/lm_eval.md).",
            UserWarning,
            stacklevel=2,
        )


def _is_made_for_a_call(cache: object) -> TypeGuard[DynamicCache]:
    """True for an empty DynamicCache that is not the caller's, which would stay empty."""
    if type(cache) is not DynamicCache or cache.offloading or cache.get_seq_length():
        return False
    return GIVEN_BY_CALLER not in vars(cache)


class AppliedContext(ContextDecorator, AbstractContextManager[AppliedPolicy]):
    """Context of `applied`, for `with` and as a decorator; it may be entered again.

    Args:
        enter: checks the arguments, and returns the model's attachment and a holder of caches.
    """

    def __init__(self, enter: Callable[[], tuple[Attachment, AppliedPolicy]]) -> None:
        self._enter = enter
        self._entered: list[tuple[Attachment, AppliedPolicy]] = []

    def __enter__(self) -> AppliedPolicy:
        attachment, run = self._enter()
        attachment.substitutes.append(run._substitute)
        self._entered.append((attachment, run))
        return run

    def __exit__(self, *raised: object) -> None:
        if not self._entered:
            raise UsageError("The context of larder.applied was not entered: use it in a `with`.")
        attachment, run = self._entered.pop()
        attachment.substitutes.remove(run._substitute)


@checked_call
def applied(
    model: Any,
    policy: str | Policy | None = None,
    budget: str | int | float | None = None,
    *,
    block: int | None = None,
    tokenizer: Any = None,
    kvpress: Any = None,
) -> AppliedContext:
    """Context in which every `model.generate(...)` runs over a new `LarderCache`.

    Calls that pass their own LarderCache keep it; calls without a cache run the model's own
    attention, with one warning, and so does the model after the block. Blocks may be nested, in
    which case the inner one acts, and left in any order. Not thread-safe.

    Args:
        model: a causal `PreTrainedModel` in eval mode, or a PEFT model of one.
        policy: name of a preset, spelling of parts, or a `Policy`, without episodes; None takes
            `larder.default_policy("prompt")`, which is `snapkv`.
        budget: 512 (tokens per kv head, averaged over layers), `"25%"` of the prompt
            (`"25% min 64"`: 64 tokens at least, for short rows of a batch), `"64MiB"`;
            None takes that of the policy, else 20% of the prompt, at least 128 tokens.
        block: tokens read between two plans; None takes that of the policy.
        tokenizer: tokenizer of the model, for policies that score with prompts or look at words.
        kvpress: press of NVIDIA/kvpress that chooses the entries of each prompt, in place of a
            policy and a budget: `SnapKVPress(compression_ratio=0.5)`.

    Returns:
        Context for `with`, which may be entered again, or decorator of a function. Its value is an
        object whose `cache` is the LarderCache of the latest `generate()`, None before it.

    Raises:
        LarderError: the policy or a size is invalid, needs a tokenizer, or the press does more
            than choose entries.
        ModelError: the model is not supported, compiled, training, or held by `Engine.load`.

    Examples:
        >>> with larder.applied(model, policy="snapkv", budget=512) as run:
        ...     ids = model.generate(**inputs, max_new_tokens=8)
        >>> run.cache.nbytes <= run.cache.peak_nbytes
        True
    """

    def enter() -> tuple[Attachment, AppliedPolicy]:
        attachment = attached(model)
        chosen = chosen_policy(attachment, policy, SizeOptions(budget, block), kvpress)

        def create() -> LarderCache:
            return LarderCache(model, chosen, budget, block=block, tokenizer=tokenizer)

        create()  # refused here rather than inside generate()
        return attachment, AppliedPolicy(create)

    return AppliedContext(enter)
