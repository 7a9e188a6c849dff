"""What is asked of a plan before a store changes anything, and of a saved layer."""

from __future__ import annotations

import torch

from larder.core.errors import CacheError
from larder.core.ledger import Ledger
from larder.core.observation import Entries
from larder.core.plan import Plan


def check_counts(plan: Plan, heads: int) -> None:
    """See that a plan counts what it keeps, head by head. Raises: CacheError: it does not."""
    if len(plan.lengths) != heads or sum(plan.lengths) != len(plan.kept):
        raise CacheError(
            f"A plan's lengths must count the {len(plan.kept)} kept entries of {heads} kv heads, "
            f"one count a head, got {plan.lengths}."
        )


def check_kept(plan: Plan, lengths: tuple[int, ...]) -> None:
    """See that a plan keeps entries of heads that hold `lengths`, in order.

    Raises:
        CacheError: it does not.
    """
    check_counts(plan, len(lengths))
    held, kept = torch.tensor(lengths), plan.kept.cpu()
    ends = torch.repeat_interleave(held.cumsum(0), torch.tensor(plan.lengths))
    firsts = ends - torch.repeat_interleave(held, torch.tensor(plan.lengths))
    if bool((kept.diff() <= 0).any() or (kept < firsts).any() or (kept >= ends).any()):
        raise CacheError(
            f"The kept entries of a plan must ascend and lie within their own heads, which hold "
            f"{lengths} packed entries, but they do not: sort them, and count them in the plan's "
            "lengths head by head."
        )


def refuse_grades(plan: Plan) -> None:
    """For stores of one precision. Raises: CacheError: the plan lowers that of some entries."""
    if bool(plan.grades.any()):
        raise CacheError(
            "A cache of one precision cannot give entries different grades, but the plan asks for "
            "it: use a compensation that lowers no precision."
        )


def check_ledger(ledger: Ledger, layer: int, held: Entries) -> None:
    """See that a saved layer remembers what its ledger names. Raises: CacheError: it does not."""
    found = sorted([*held.columns, *held.scalars])
    named = sorted(ledger.columns + ledger.scalars)
    if found != named:
        raise CacheError(
            f"Layer {layer} of the saved cache remembers {', '.join(found) or 'nothing'}, but its "
            f"description names {', '.join(named) or 'nothing'}: build the cache again."
        )
