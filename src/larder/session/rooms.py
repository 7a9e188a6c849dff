"""How many entries a policy's budget comes to, and in what form a cache holds them."""

from __future__ import annotations

from larder.cache.sequence import Form, SequenceCache
from larder.core.errors import BudgetError, UsageError
from larder.core.ledger import Ledger
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.spelling import spell
from larder.policy.budgets.unlimited import WITHOUT_LIMIT
from larder.session.policy import Policy


def governed(policy: Policy, spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """The layers that a policy's budget is for: managed ones that it does not call dense."""
    dense = 0 if policy.recall is None else policy.recall.dense
    if policy.rebuilding is not None:
        dense = policy.rebuilding.depth
    return tuple(layer for layer in spec.managed if layer.index >= dense)


def check_room(policy: Policy, tokens: int) -> None:
    """Raises: BudgetError: recent tokens are protected that generated text has no room for."""
    recent, room = policy.protect.recent_tokens(tokens), policy.timing.room(tokens)
    if room is not None and recent > room:
        raise BudgetError(
            f"{spell(policy.timing)} leaves generated text {room} of {tokens} entries, fewer than "
            f"the {recent} recent tokens that {spell(policy.protect)} keeps: raise --budget, or "
            "protect fewer."
        )


def entries_of(policy: Policy, spec: ModelSpec) -> int:
    """Entries per kv head that the bytes of M come to, in the form that the policy stores them.

    Raises:
        BudgetError: they cannot hold what the form needs.
        UsageError: there is no limit whose bytes could be shared.
    """
    tokens, storage = tokens_of(policy), policy.storage
    if policy.recall is not None:
        storage.check(spec.managed, spec.dtype.itemsize)
        return _beside_pages(policy, tokens)
    if tokens != WITHOUT_LIMIT:
        return storage.entries(tokens, spec.managed, spec.dtype.itemsize)
    if storage.codecs or storage.form != Form.RAGGED.value:
        raise UsageError(
            f"{spell(storage)} shares the bytes of a budget, but {spell(policy.budget)} sets none: "
            "take uniform(kept=1.0) for as many bytes as the context takes, or less."
        )
    return tokens


def pages_of(policy: Policy) -> int:
    """Entries per kv head that a budget leaves for recalled pages."""
    return 0 if policy.recall is None else policy.recall.tokens or 0


def _beside_pages(policy: Policy, tokens: int) -> int:
    """Entries per kv head that stay in the fast tier for good.

    Raises:
        BudgetError: recalled pages leave no room for any.
        UsageError: there is no limit, so nothing is ever parked.
    """
    recall = policy.recall
    assert recall is not None and recall.tokens is not None  # filled in by `Policy.filled`
    if tokens == WITHOUT_LIMIT:
        raise UsageError(
            f"{spell(policy.budget)} keeps everything, so nothing is parked that {spell(recall)} "
            "could find: take uniform(), or drop() in place of park()."
        )
    if recall.tokens >= tokens:
        raise BudgetError(
            f"The budget of {tokens} tokens has no room beside the {recall.tokens} that "
            f"{spell(recall)} fetches: raise --budget, or fetch fewer."
        )
    least = policy.protect.least(tokens).joined(policy.scorer.least()).tokens
    if least > tokens - recall.tokens and not isinstance(policy.protect.recent, float):
        raise BudgetError(
            f"The budget of {tokens} tokens has no room for the {recall.tokens} that "
            f"{spell(recall)} fetches beside the {least} that {spell(policy.protect)} and "
            f"{spell(policy.scorer)} always keep: raise --budget, fetch fewer, or protect fewer."
        )
    return tokens - recall.tokens


def _form(policy: Policy, tokens: int) -> Form:
    """How the managed layers are held."""
    if policy.recall is not None:
        return Form.TIERED
    if policy.rebuilding is not None:
        return Form.REBUILT
    return Form.DENSE if tokens == WITHOUT_LIMIT else Form(policy.storage.form)


def tokens_of(policy: Policy) -> int:
    """M of a policy whose sizes are filled in."""
    tokens = policy.budget.tokens
    assert tokens is not None  # filled in by `Policy.filled`
    return tokens


def empty_cache(policy: Policy, spec: ModelSpec) -> SequenceCache:
    """A cache that has read nothing, in the form that a policy with its sizes filled in asks for.

    Raises:
        BudgetError, UsageError: as `entries_of`.
    """
    form = _form(policy, policy.timing.reading_tokens(entries_of(policy, spec)))
    ledger = Ledger() if form is Form.DENSE else policy.planner.ledger
    storage = policy.staying
    kept = ledger, storage.codecs, storage.pairing, policy.parking, policy.rebuilding
    return SequenceCache(spec, form, *kept)
