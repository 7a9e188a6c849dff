"""Entries that a memory budget comes to under a policy and a model.

How a budget is written: `larder.core.memory_budget`. Tokens and shares are of keys and values.
Bytes are all that managed layers hold, with positions and with what the policy has the cache
remember.

Every form is per cache: a policy that keeps one cache per episode holds as many budgets as it has
episodes, one of them on the device.
"""

from __future__ import annotations

from larder.cache.latest_activations import latest_queries_bytes
from larder.core.errors import BudgetError, UsageError
from larder.core.ledger import SURPRISE
from larder.core.memory_budget import BudgetUnit, MemoryBudget
from larder.core.spec import POSITION_BYTES, ModelSpec
from larder.core.spelling import spell
from larder.session.policy import Policy

DEFAULT_BUDGET = "20%"
MIN_DEFAULT_TOKENS = 128  # tokens; a short text is kept whole unless a size was asked for
DEFAULT_CHAT_BUDGET = "512"  # for a chat that starts from nothing
HEAD_BYTES = 8 + 8  # where a kv head begins, and how many entries it has
NUMBER_BYTES = 4  # of a column for an entry, of a scalar for a head


def resolve_budget(
    policy: Policy, asked: str | int | float | None, context_tokens: int, spec: ModelSpec
) -> int:
    """Entries per kv head of one cache that a policy's budget comes to for a context.

    Args:
        asked: the budget as `Amount.parse` takes it, for a spelling that leaves it open; None for
            20% of the context, but no less than what a question and its surroundings need.

    Raises:
        UsageError: it is no size, or the spelling names one, too.
        BudgetError: nothing would be left.
    """
    budget = policy.budget
    if asked is not None and (budget.tokens is not None or budget.kept is not None):
        raise UsageError(
            f"The budget {asked} contradicts {spell(budget)} in the policy: give one of the two."
        )
    if budget.tokens is not None:
        return budget.tokens
    if budget.kept is not None:
        return max(1, round(context_tokens * budget.kept))
    if asked is None:
        return max(
            MIN_DEFAULT_TOKENS,
            amount_tokens(MemoryBudget.parse(DEFAULT_BUDGET), context_tokens, policy, spec),
        )
    tokens = amount_tokens(MemoryBudget.parse(asked), context_tokens, policy, spec)
    if tokens < 1:
        raise BudgetError(
            f"The budget of {asked} holds no token: one takes {_one_token_bytes(policy, spec)} "
            "bytes "
            "over all layers. Raise the budget."
        )
    return tokens


def resolve_budget_without_context(
    policy: Policy, asked: str | int | float | None, spec: ModelSpec
) -> int:
    """Entries per kv head where there is no context yet, as in a chat that starts from nothing.

    Raises:
        UsageError: the size is a share of the context.
    """
    budget = policy.budget
    is_given = budget.tokens is not None or budget.kept is not None or asked is not None
    size = asked if is_given else DEFAULT_CHAT_BUDGET
    if budget.kept is not None or (
        size is not None and MemoryBudget.parse(size).unit is BudgetUnit.SHARE
    ):
        share = spell(budget) if budget.kept is not None else f"The budget {size}"
        raise UsageError(
            f"{share} is a share of the context, but a chat that starts from nothing has none: "
            "give tokens (512) or bytes (64MiB)."
        )
    return resolve_budget(policy, size, 0, spec)


def amount_tokens(
    amount: MemoryBudget, context_tokens: int, policy: Policy, spec: ModelSpec
) -> int:
    """Entries per kv head of one cache that an amount comes to, averaged over managed layers."""
    if amount.unit is BudgetUnit.BYTES:
        return _tokens_in_bytes(int(amount.number), policy, spec)
    return amount.tokens(context_tokens, 1)


def _tokens_in_bytes(room: int, policy: Policy, spec: ModelSpec) -> int:
    """Entries per kv head at full precision whose bytes fit, all that is remembered included."""
    left = room - _fixed_bytes(policy, spec)
    entry, columns = _entry_bytes(policy, spec)
    tokens = left // max(1, entry + columns)
    if tokens < 1 or not columns:
        return tokens
    # In few bits they are more entries, and each of these has its columns.
    held = policy.storage.entries(tokens, spec.managed, spec.dtype.itemsize)
    return left * tokens // (entry * tokens + columns * max(held, tokens))


def _one_token_bytes(policy: Policy, spec: ModelSpec) -> int:
    """Bytes of one token, and of what there is without any."""
    return sum(_entry_bytes(policy, spec)) + _fixed_bytes(policy, spec)


def _entry_bytes(policy: Policy, spec: ModelSpec) -> tuple[int, int]:
    """Bytes of one token over all managed layers and heads with its position; of its columns."""
    heads = _num_managed_heads(spec)
    columns = NUMBER_BYTES * len(policy.planner.ledger.columns)
    return spec.managed_bytes_per_token() + heads * POSITION_BYTES, heads * columns


def _fixed_bytes(policy: Policy, spec: ModelSpec) -> int:
    """Bytes of what is held of each kv head, however many entries it has, and of the last token."""
    ledger = policy.planner.ledger
    tail = spec.width * spec.dtype.itemsize if SURPRISE in ledger.columns else 0
    latest = latest_queries_bytes(ledger.queries, spec.managed, spec.dtype.itemsize)
    return (
        _num_managed_heads(spec) * (HEAD_BYTES + NUMBER_BYTES * len(ledger.scalars)) + tail + latest
    )


def _num_managed_heads(spec: ModelSpec) -> int:
    return sum(layer.kv_heads for layer in spec.managed)
