"""How many entries a policy's budget comes to, and in what form a cache holds them."""

from __future__ import annotations

from larder.cache.sequence import CacheForm, SequenceCache
from larder.core.errors import BudgetError, UsageError
from larder.core.ledger import Ledger
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.spelling import spell
from larder.policy.budgets.unlimited import WITHOUT_LIMIT
from larder.prefill.memory import EntryCapacity
from larder.session.caches import CacheUsage
from larder.session.memory import Coverage, LayerFigures
from larder.session.policy import Policy
from larder.session.policy_validation import DEFAULT_BLOCK_TOKENS


def budgeted_layers(policy: Policy, spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """The layers that a policy's budget is for: managed ones that it does not call dense."""
    dense = 0 if policy.recall is None else policy.recall.dense
    if policy.rebuilding is not None:
        dense = policy.rebuilding.depth
    return tuple(layer for layer in spec.managed if layer.index >= dense)


def layer_coverage(policy: Policy, spec: ModelSpec) -> tuple[Coverage, ...]:
    """What bounds the entries of each layer."""
    covered = () if budget_tokens(policy) == WITHOUT_LIMIT else budgeted_layers(policy, spec)
    known = {layer.index: Coverage.DENSE for layer in spec.managed}
    known |= {layer.index: Coverage.BUDGET for layer in covered}
    return tuple(known.get(layer.index, Coverage.WINDOW) for layer in spec.layers)


def layer_figures(
    policy: Policy, spec: ModelSpec, holding: CacheUsage, context: int
) -> tuple[LayerFigures, ...]:
    """What each layer of a cache takes that has read so many tokens."""
    rows = zip(spec.layers, layer_coverage(policy, spec), holding.layers, strict=True)
    return tuple(
        LayerFigures(layer.index, coverage, active, layer.full_bytes(spec.dtype, context))
        for layer, coverage, active in rows
    )


def check_recent_fits(policy: Policy, tokens: int) -> None:
    """Raises: BudgetError: recent tokens are protected that generated text has no room for."""
    recent, room = policy.protect.recent_tokens(tokens), policy.timing.room(tokens)
    if room is not None and recent > room:
        raise BudgetError(
            f"{spell(policy.timing)} leaves generated text {room} of {tokens} entries, fewer than "
            f"the {recent} recent tokens that {spell(policy.protect)} keeps: raise --budget, or "
            "protect fewer."
        )


def entries_per_head(policy: Policy, spec: ModelSpec) -> int:
    """Entries per kv head that the bytes of M come to, in the form that the policy stores them.

    Raises:
        BudgetError: they cannot hold what the form needs.
        UsageError: there is no limit whose bytes could be shared.
    """
    tokens, storage = budget_tokens(policy), policy.storage
    if policy.recall is not None:
        storage.check(spec.managed, spec.dtype.itemsize)
        return _resident_entries(policy, tokens)
    if tokens != WITHOUT_LIMIT:
        return storage.entries(tokens, spec.managed, spec.dtype.itemsize)
    if storage.codecs or storage.form != CacheForm.RAGGED.value:
        raise UsageError(
            f"{spell(storage)} shares the bytes of a budget, but {spell(policy.budget)} sets none: "
            "take uniform(kept=1.0) for as many bytes as the context takes, or less."
        )
    return tokens


def block_tokens(policy: Policy) -> int:
    """M_block; schedules without blocks get as much room as a default block."""
    tokens = policy.schedule.tokens
    return min(DEFAULT_BLOCK_TOKENS, budget_tokens(policy)) if tokens is None else tokens


def entry_bound(policy: Policy, spec: ModelSpec) -> EntryCapacity | None:
    """L x K x M at rest, and L x K x M_block more while a turn runs; None without a limit.

    What is read is at full precision at first: where a policy stores entries in few bits, those
    that it has not rounded yet are bounded as well, or they would outgrow the bytes of M.
    """
    if budget_tokens(policy) == WITHOUT_LIMIT:
        return None
    layers, recall = budgeted_layers(policy, spec), policy.recall
    heads = sum(layer.kv_heads for layer in layers)
    entries, block = entries_per_head(policy, spec), block_tokens(policy)
    resting = heads * (entries + policy.lag)
    if recall is not None:
        resting += sum(recall.sets(layer) for layer in layers) * (recall.tokens or 0)
    if not policy.staying.codecs:
        return EntryCapacity(resting, heads, block)
    size = spec.dtype.itemsize
    rooms = [layer.kv_heads * policy.storage.finest(entries, layer, size) for layer in spec.managed]
    finest_heads = sum(layer.kv_heads for layer in spec.managed)
    return EntryCapacity(resting, heads, block, sum(rooms), finest_heads)


def recall_budget_tokens(policy: Policy) -> int:
    """Entries per kv head that a budget leaves for recalled pages."""
    return 0 if policy.recall is None else policy.recall.tokens or 0


def recall_slot_entries(policy: Policy, spec: ModelSpec) -> int:
    """Entries per kv head that the slots for recalled pages hold, at most."""
    if policy.recall is None:
        return 0
    sets = [
        -(-policy.recall.sets(layer) // layer.kv_heads) for layer in budgeted_layers(policy, spec)
    ]
    return recall_budget_tokens(policy) * max(sets, default=1)


def prefill_allowance(policy: Policy) -> int:
    """Entries per kv head beyond the quotas that a cache may hold as long as nothing is parked."""
    return recall_budget_tokens(policy) + max(0, policy.lag - 1)


def _resident_entries(policy: Policy, tokens: int) -> int:
    """Entries per kv head that stay in the fast tier for good.

    What piles up between two plans is part of the budget, so that no step attends to more.

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
    rest = tokens - recall.tokens - policy.lag
    taken = f"the {recall.tokens} that {spell(recall)} fetches"
    if policy.lag:
        taken += f" and the {policy.lag} that {spell(policy.timing)} lets pile up"
    if rest < 1:
        raise BudgetError(
            f"The budget of {tokens} tokens has no room beside {taken}: raise --budget, fetch "
            "fewer, or lag less."
        )
    least = policy.protect.least(tokens).joined(policy.scorer.least()).tokens
    if least > rest and not isinstance(policy.protect.recent, float):
        raise BudgetError(
            f"The budget of {tokens} tokens has no room for {taken} beside the {least} that "
            f"{spell(policy.protect)} and {spell(policy.scorer)} always keep: raise --budget, "
            "fetch fewer, or protect fewer."
        )
    return rest


def _cache_form(policy: Policy, tokens: int) -> CacheForm:
    """How the managed layers are held."""
    if policy.recall is not None:
        return CacheForm.TIERED
    if policy.rebuilding is not None:
        return CacheForm.REBUILT
    return CacheForm.DENSE if tokens == WITHOUT_LIMIT else CacheForm(policy.storage.form)


def budget_tokens(policy: Policy) -> int:
    """M of a policy whose sizes are filled in."""
    tokens = policy.budget.tokens
    assert tokens is not None  # filled in by `Policy.filled`
    return tokens


def empty_cache(policy: Policy, spec: ModelSpec) -> SequenceCache:
    """A cache that has read nothing, in the form that a policy with its sizes filled in asks for.

    Raises:
        BudgetError, UsageError: as `entries_per_head`.
    """
    form = _cache_form(policy, policy.timing.reading_tokens(entries_per_head(policy, spec)))
    ledger = Ledger() if form is CacheForm.DENSE else policy.planner.ledger
    storage = policy.staying
    kept = ledger, storage.codecs, storage.pairing, policy.parking, policy.rebuilding
    return SequenceCache(spec, form, *kept)
