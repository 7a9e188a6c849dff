"""How many entries a policy's budget comes to, and in what form a cache holds them."""

from __future__ import annotations

from larder.cache.latest_activations import latest_queries_bytes
from larder.cache.sequence import CacheForm, SequenceCache
from larder.core.errors import BudgetError, UsageError
from larder.core.ledger import SURPRISE, Ledger
from larder.core.memory_budget import BudgetUnit, MemoryBudget
from larder.core.spec import POSITION_BYTES, LayerSpec, ModelSpec
from larder.core.spelling import name_of, spell
from larder.policy.budgets.unlimited import WITHOUT_LIMIT, Unlimited
from larder.prefill.memory import EntryCapacity
from larder.prefill.schedules.whole import Whole
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
    recent, room = policy.protect.recent_tokens(tokens), policy.timing.generation_capacity(tokens)
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
    if not policy.resident_storage.codecs:
        return EntryCapacity(resting, heads, block)
    size = spec.dtype.itemsize
    rooms = [
        layer.kv_heads * policy.storage.full_precision_entries(entries, layer, size)
        for layer in spec.managed
    ]
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
    least = policy.protect.least(tokens).union(policy.scorer.protected_tokens()).tokens
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
    form = _cache_form(policy, policy.timing.prefill_tokens(entries_per_head(policy, spec)))
    ledger = Ledger() if form is CacheForm.DENSE else policy.planner.ledger
    storage = policy.resident_storage
    kept = ledger, storage.codecs, storage.pairing, policy.parking, policy.rebuilding
    return SequenceCache(spec, form, *kept)


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


def beyond_budget(policy: Policy, spec: ModelSpec | None = None) -> tuple[str, ...]:
    """The exceptions from "budget at rest, budget + block while a turn runs", a clause each.

    Args:
        spec: of the model, where it is known.
    """
    slides = _sliding_layers(spec)
    if spec is not None and not spec.managed:
        return slides
    if isinstance(policy.budget, Unlimited):
        return (f"{spell(policy.budget)} keeps everything that is read", *slides)
    found = list[str]()
    if isinstance(policy.schedule, Whole):
        found.append("whole() holds a whole context until all of it is read")
    found += _dense_layers(policy)
    if policy.recall is not None:
        part = name_of(type(policy.compensation))
        found.append(f"{part}() keeps what is rejected in host memory, and what finds it")
    if policy.rebuilding is not None:
        part = name_of(type(policy.compensation))
        found.append(f"{part}() keeps what rejected entries are rebuilt from")
    return (*found, *slides)


def beyond_budget_line(clauses: tuple[str, ...]) -> str:
    """Clauses in one line."""
    return f"beyond the budget: {'; '.join(clauses)}"


def _dense_layers(policy: Policy) -> list[str]:
    dense = 0 if policy.recall is None else policy.recall.dense
    if policy.rebuilding is not None:
        dense = policy.rebuilding.depth
    if not dense:
        return []
    return [f"the first {'layer keeps' if dense == 1 else f'{dense} layers keep'} everything"]


def _sliding_layers(spec: ModelSpec | None) -> tuple[str, ...]:
    if spec is None or len(spec.managed) == len(spec.layers):
        return ()
    if not spec.managed:
        return (f"all {len(spec.layers)} layers slide: policy and budget change nothing here",)
    count = len(spec.layers) - len(spec.managed)
    return (f"{count} of {len(spec.layers)} layers hold sliding windows of their own",)
