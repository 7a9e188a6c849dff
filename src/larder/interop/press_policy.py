"""Policy by a press of NVIDIA/kvpress: which entries of a prompt stay; generated tokens all do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from larder.core.errors import UsageError
from larder.interop.adapted_press import AdaptedPress
from larder.interop.attachment import Attachment
from larder.interop.press_budget import PressBudget
from larder.interop.press_scorer import PressScorer
from larder.session.default_policy import TextKind, default_policy
from larder.session.policy import Policy
from larder.session.prefill import SizeOptions

OTHER_PARTS = "whole() > protect(sinks=0, recent=0) > sinks_and_window() > uniform()"


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
    press = AdaptedPress.of(kvpress, attachment.module, attachment.decoder)
    others = Policy.parse(OTHER_PARTS)
    return replace(others, scorer=PressScorer(press), budget=PressBudget(kept=1.0))
