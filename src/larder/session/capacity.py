"""Capacity of the caches of a policy: budget to entries per kv head, bounds, cache form."""

from __future__ import annotations

from larder.cache.entry_columns import latest_queries_bytes
from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError, UsageError
from larder.core.memory_budget import BudgetUnit, MemoryBudget, count_of_tokens
from larder.core.part import Ledger
from larder.core.registry import public_name
from larder.core.spec import POSITION_BYTES, LayerSpec, ModelSpec
from larder.core.spelling import spell
from larder.policy.budgets.base import WITHOUT_LIMIT
from larder.prefill.memory import EntryCapacity
from larder.session.caches import CacheUsage, SessionCaches
from larder.session.memory import CacheFigures, Coverage, LayerFigures
from larder.session.policy import Policy
from larder.session.policy_validation import DEFAULT_BLOCK_TOKENS

WITHOUT_COLUMNS = ("dense", "blended", "parallel")  # cache forms of policies that keep everything
DEFAULT_BUDGET = "20%"
MIN_DEFAULT_TOKENS = 128  # tokens; short texts stay whole without an explicit size
DEFAULT_CHAT_BUDGET = "512"  # for a chat without a history
HEAD_BYTES = 8 + 8  # offset and number of entries of a kv head
NUMBER_BYTES = 4  # of one column of an entry, of one scalar of a head


def budgeted_layers(policy: Policy, spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Layers that the budget of a policy covers: managed layers that are not dense."""
    dense = _num_dense_layers(policy)
    return tuple(layer for layer in spec.managed if layer.index >= dense)


def layer_coverage(policy: Policy, spec: ModelSpec) -> tuple[Coverage, ...]:
    """Bound of the entries of each layer: budget, none, or sliding window."""
    covered = () if budget_tokens(policy) == WITHOUT_LIMIT else budgeted_layers(policy, spec)
    known = {layer.index: Coverage.DENSE for layer in spec.managed}
    known |= {layer.index: Coverage.BUDGET for layer in covered}
    shared = [layer.index for layer in spec.layers if layer.kv_source is not None]
    known |= dict.fromkeys(shared, Coverage.SHARED)
    return tuple(known.get(layer.index, Coverage.WINDOW) for layer in spec.layers)


def cache_figures(
    policy: Policy,
    spec: ModelSpec,
    caches: SessionCaches,
    *,
    context_tokens: int,
    peak_kv_bytes: int,
    peak_entries: int,
    prefill_seconds: float,
    setup_seconds: float = 0.0,
) -> CacheFigures:
    """Figures of the caches of a prefilled conversation; the arguments are its fields."""
    largest = max(caches.usage(), key=lambda cache: cache.fast_tier_bytes)
    return CacheFigures(
        context_tokens=context_tokens,
        budget_tokens=min(budget_tokens(policy), context_tokens),
        full_kv_bytes=spec.full_bytes(context_tokens),
        kv_bytes=caches.nbytes,
        active_kv_bytes=largest.fast_tier_bytes,
        peak_kv_bytes=peak_kv_bytes,
        peak_entries=peak_entries,
        prefill_seconds=prefill_seconds,
        setup_seconds=setup_seconds,
        layers=layer_figures(policy, spec, largest, context_tokens),
    )


def layer_figures(
    policy: Policy, spec: ModelSpec, usage: CacheUsage, context: int
) -> tuple[LayerFigures, ...]:
    """Figures of each layer of a cache that has read `context` tokens."""
    rows = zip(spec.layers, layer_coverage(policy, spec), usage.layers, strict=True)
    return tuple(
        LayerFigures(layer.index, coverage, active, layer.full_bytes(spec.dtype, context))
        for layer, coverage, active in rows
    )


def check_recent_fits(policy: Policy, tokens: int) -> None:
    """Validate the protected recent tokens.

    Raises:
        BudgetError: the capacity for generated text is below the protected recent tokens.
    """
    recent, room = policy.protect.recent_tokens(tokens), policy.timing.generation_capacity(tokens)
    if room is not None and recent > room:
        raise BudgetError(
            f"{spell(policy.timing)} leaves {room} of {tokens} entries for generated text, fewer "
            f"than the {recent} recent tokens that {spell(policy.protect)} keeps: "
            "raise the budget, or protect fewer."
        )


def entries_per_head(policy: Policy, spec: ModelSpec) -> int:
    """Entries per kv head that fit in the bytes of M, in the storage form of the policy.

    Raises:
        BudgetError: the bytes are below the minimum of the storage form.
        UsageError: the storage shares the bytes of a budget, but the budget has no limit.
    """
    tokens, storage = budget_tokens(policy), policy.storage
    if policy.recall is not None:
        storage.check(spec.managed, spec.dtype.itemsize)
        return _resident_entries(policy, tokens)
    if tokens != WITHOUT_LIMIT:
        left = _beside(policy, tokens, policy.compensation.added_entries)
        entries = storage.entries(left, spec.managed, spec.dtype.itemsize)
        return _beside_state(policy, spec, entries)
    if storage.codecs or storage.transform is not None or storage.form != "ragged":
        raise UsageError(
            f"{spell(storage)} shares the bytes of a budget, but {spell(policy.budget)} sets none: "
            "take uniform(kept=1.0) for as many bytes as the context takes, or less."
        )
    return tokens


def _beside_state(policy: Policy, spec: ModelSpec, entries: int) -> int:
    """Entries per kv head that a budget of `entries` leaves beside the compensation's state.

    Raises:
        BudgetError: it leaves none.
    """
    size, part = spec.dtype.itemsize, policy.compensation
    taken = max((part.state_entries(layer, size) for layer in spec.managed), default=0)
    return _beside(policy, entries, taken)


def _beside(policy: Policy, entries: int, taken: int) -> int:
    """Entries per kv head that stay of a budget when the compensation takes some.

    Raises:
        BudgetError: none stay.
    """
    part = policy.compensation
    if taken and entries <= taken:
        raise BudgetError(
            f"The budget of {count_of_tokens(entries)} has no room beside the state of "
            f"{spell(part)}, which "
            f"takes {taken}: raise the budget, or take drop()."
        )
    return entries - taken


def block_tokens(policy: Policy) -> int:
    """M_block; the default block for schedules without blocks."""
    tokens = policy.schedule.block_tokens
    return min(DEFAULT_BLOCK_TOKENS, budget_tokens(policy)) if tokens is None else tokens


def entry_bound(policy: Policy, spec: ModelSpec) -> EntryCapacity | None:
    """Bound of L x K x M entries between turns, L x K x M_block more during a turn; None without
    limit.

    New entries are at full precision: where a policy quantizes entries, the number of entries that
    are not quantized yet is bounded as well, otherwise they would exceed the bytes of M.
    """
    if budget_tokens(policy) == WITHOUT_LIMIT:
        return None
    layers, recall = budgeted_layers(policy, spec), policy.recall
    heads = sum(layer.kv_heads for layer in layers)
    entries, block = entries_per_head(policy, spec), block_tokens(policy)
    added = policy.compensation.added_entries
    resting = heads * (entries + policy.lag + added)
    if recall is not None:
        resting += sum(recall.sets(layer) for layer in layers) * (recall.tokens or 0)
    if not policy.resident_storage.codecs:
        return EntryCapacity(resting, heads, block)
    size = spec.dtype.itemsize
    rooms = [
        layer.kv_heads * (policy.storage.full_precision_entries(entries, layer, size) + added)
        for layer in spec.managed
    ]
    finest_heads = sum(layer.kv_heads for layer in spec.managed)
    return EntryCapacity(resting, heads, block, sum(rooms), finest_heads)


def recall_budget_tokens(policy: Policy) -> int:
    """Entries per kv head of the budget reserved for recalled pages."""
    return 0 if policy.recall is None else policy.recall.tokens or 0


def recall_slot_entries(policy: Policy, spec: ModelSpec) -> int:
    """Largest capacity of the page slots, in entries per kv head."""
    if policy.recall is None:
        return 0
    sets = [
        -(-policy.recall.sets(layer) // layer.kv_heads) for layer in budgeted_layers(policy, spec)
    ]
    return recall_budget_tokens(policy) * max(sets, default=1)


def prefill_allowance(policy: Policy) -> int:
    """Entries per kv head beyond the quotas that a cache may hold before entries are offloaded, or
    others are added to those that stay.
    """
    beside = policy.compensation.added_entries
    return recall_budget_tokens(policy) + beside + max(0, policy.lag - 1)


def _resident_entries(policy: Policy, tokens: int) -> int:
    """Entries per kv head that stay in the fast tier permanently.

    Entries that accumulate between two plans are part of the budget, so that no step attends to
    more.

    Raises:
        BudgetError: recalled pages leave no capacity for resident entries.
        UsageError: the budget has no limit, so nothing is ever offloaded.
    """
    recall = policy.recall
    assert recall is not None and recall.tokens is not None  # filled in by `Policy.with_sizes`
    if tokens == WITHOUT_LIMIT:
        raise UsageError(
            f"{spell(policy.budget)} keeps everything, so no entry is offloaded that "
            f"{spell(recall)} could recall: take uniform(), or drop() in place of park()."
        )
    resident = tokens - recall.tokens - policy.lag
    taken = f"the {recall.tokens} that {spell(recall)} fetches"
    if policy.lag:
        taken += f" and the {policy.lag} that {spell(policy.timing)} lets accumulate"
    if resident < 1:
        raise BudgetError(
            f"The budget of {count_of_tokens(tokens)} has no room beside {taken}: raise the "
            "budget, fetch "
            "fewer, or lag less."
        )
    least = policy.protect.least(tokens).union(policy.scorer.protected_tokens()).tokens
    if least > resident and not isinstance(policy.protect.recent, float):
        raise BudgetError(
            f"The budget of {count_of_tokens(tokens)} has no room for {taken} beside the {least} "
            "that "
            f"{spell(policy.protect)} and {spell(policy.scorer)} always keep: raise the budget, "
            "fetch fewer, or protect fewer."
        )
    return resident


def _cache_form(policy: Policy, tokens: int) -> str:
    """Cache form of the managed layers."""
    is_dense = tokens == WITHOUT_LIMIT and not policy.schedule.narrows
    form = (policy.schedule.cache_form or "dense") if is_dense else policy.storage.form
    return policy.compensation.cache_form or form


def budget_tokens(policy: Policy) -> int:
    """M, the budget of a policy whose sizes are filled in."""
    tokens = policy.budget.tokens
    assert tokens is not None  # filled in by `Policy.with_sizes`
    return tokens


def empty_cache(policy: Policy, spec: ModelSpec) -> SequenceCache:
    """Empty cache in the form of a policy whose sizes are filled in.

    Raises:
        BudgetError, UsageError: as `entries_per_head`.
        UsageError: the policy merges keys and values of latents (MLA) apart.
    """
    _check_merging(policy, spec)
    form = _cache_form(policy, policy.timing.prefill_tokens(entries_per_head(policy, spec)))
    ledger = Ledger() if form in WITHOUT_COLUMNS else policy.planner.ledger
    storage = policy.resident_storage
    return SequenceCache(
        spec,
        form,
        ledger,
        storage.codecs,
        storage.pairing,
        policy.parking,
        policy.rebuilding,
        storage.transform,
        storage.residual,
    )


def _check_merging(policy: Policy, spec: ModelSpec) -> None:
    latent = [layer for layer in spec.managed if layer.latent_rank]
    if latent and policy.compensation.merges_apart:
        raise UsageError(
            f"{spell(policy.compensation)} merges values but not keys, and layer "
            f"{latent[0].index} of the model caches latents (MLA), which are both at once: take "
            "fold_ema(variant='paper'), or drop()."
        )


def resolve_budget(
    policy: Policy, requested: str | int | float | None, context_tokens: int, spec: ModelSpec
) -> int:
    """Resolve the budget of a policy to entries per kv head of one cache.

    Args:
        requested: budget as for `MemoryBudget.parse`, where the policy leaves it open; None for 20%
            of the context, but at least `MIN_DEFAULT_TOKENS`.
        context_tokens: length of the context.

    Raises:
        UsageError: the budget is not a size, or the policy has one already.
        BudgetError: the budget holds no token.
    """
    budget = policy.budget
    if requested is not None and (budget.tokens is not None or budget.kept is not None):
        raise UsageError(
            f"The budget {requested} contradicts {spell(budget)} in the policy: "
            "give one of the two."
        )
    if budget.tokens is not None:
        return budget.tokens
    if budget.kept is not None:
        return max(1, round(context_tokens * budget.kept))
    if requested is None:
        return max(
            MIN_DEFAULT_TOKENS,
            amount_tokens(MemoryBudget.parse(DEFAULT_BUDGET), context_tokens, policy, spec),
        )
    tokens = amount_tokens(MemoryBudget.parse(requested), context_tokens, policy, spec)
    if tokens < 1:
        raise BudgetError(
            f"The budget of {requested} holds no token: one takes {_one_token_bytes(policy, spec)} "
            "bytes "
            "over all layers. Raise the budget."
        )
    return tokens


def resolve_budget_without_context(
    policy: Policy, requested: str | int | float | None, spec: ModelSpec
) -> int:
    """Resolve the budget of a chat without a history to entries per kv head.

    Raises:
        UsageError: the budget is a share of the context.
    """
    budget = policy.budget
    has_size = budget.tokens is not None or budget.kept is not None or requested is not None
    size = requested if has_size else DEFAULT_CHAT_BUDGET
    if budget.kept is not None or (
        size is not None and MemoryBudget.parse(size).unit is BudgetUnit.SHARE
    ):
        share = spell(budget) if budget.kept is not None else f"The budget {size}"
        raise UsageError(
            f"{share} is a share of the context, but a chat without a history has none: "
            "give tokens (512) or bytes (64MiB)."
        )
    return resolve_budget(policy, size, 0, spec)


def amount_tokens(
    amount: MemoryBudget, context_tokens: int, policy: Policy, spec: ModelSpec
) -> int:
    """Convert an amount to entries per kv head of one cache, averaged over managed layers."""
    if amount.unit is BudgetUnit.BYTES:
        return _tokens_in_bytes(int(amount.number), policy, spec)
    return amount.tokens(context_tokens, 1)


def _tokens_in_bytes(capacity_bytes: int, policy: Policy, spec: ModelSpec) -> int:
    """Entries per kv head at full precision that fit in a number of bytes, columns included."""
    left = capacity_bytes - fixed_bytes(policy, spec, _num_managed_heads(spec))
    entry, columns = _entry_bytes(policy, spec)
    tokens = left // max(1, entry + columns)
    if tokens < 1 or not columns:
        return tokens
    # Quantized entries are more in number, and each of them has its columns.
    entries = policy.storage.entries(tokens, spec.managed, spec.dtype.itemsize)
    return left * tokens // (entry * tokens + columns * max(entries, tokens))


def _one_token_bytes(policy: Policy, spec: ModelSpec) -> int:
    """Bytes of a cache with one token, fixed bytes included."""
    fixed = fixed_bytes(policy, spec, _num_managed_heads(spec))
    return sum(_entry_bytes(policy, spec)) + fixed


def _entry_bytes(policy: Policy, spec: ModelSpec) -> tuple[int, int]:
    """Bytes of one token over all managed layers and heads with its position, and of its
    columns.
    """
    heads = _num_managed_heads(spec)
    columns = NUMBER_BYTES * len(policy.planner.ledger.columns)
    return spec.managed_bytes_per_token() + heads * POSITION_BYTES, heads * columns


def fixed_bytes(policy: Policy, spec: ModelSpec, kv_heads: int) -> int:
    """Bytes that do not depend on the number of entries: per kv head, of the last tokens, and of
    recurrent layers.
    """
    ledger = policy.planner.ledger
    tail = spec.width * spec.dtype.itemsize if policy.planner.token_providers else 0
    latest = latest_queries_bytes(ledger.queries, spec.managed, spec.dtype.itemsize)
    heads = kv_heads * (HEAD_BYTES + NUMBER_BYTES * len(ledger.scalars))
    return heads + tail + latest + spec.recurrent_bytes


def _num_managed_heads(spec: ModelSpec) -> int:
    return sum(layer.kv_heads for layer in spec.managed)


def beyond_budget(policy: Policy, spec: ModelSpec | None = None) -> tuple[str, ...]:
    """Exceptions from "budget between turns, budget + block during a turn", a clause each.

    Args:
        spec: spec of the model, where it is known.
    """
    slides = _sliding_layers(spec)
    if spec is not None and not spec.managed:
        return slides
    if policy.budget.keeps_everything:
        return (f"{spell(policy.budget)} keeps everything that is read", *slides)
    clauses = list[str]()
    if not policy.schedule.has_blocks:
        part = public_name(type(policy.schedule))
        clauses.append(f"{part}() holds a whole context until all of it is read")
    clauses += _dense_layers(policy)
    if policy.recall is not None:
        part = public_name(type(policy.compensation))
        clauses.append(f"{part}() keeps what is rejected in host memory, and what finds it")
    if policy.rebuilding is not None:
        part = public_name(type(policy.compensation))
        clauses.append(f"{part}() keeps what rejected entries are rebuilt from")
    return (*clauses, *slides)


def beyond_budget_line(clauses: tuple[str, ...]) -> str:
    """Clauses of `beyond_budget` in one line."""
    return f"beyond the budget: {'; '.join(clauses)}"


def _num_dense_layers(policy: Policy) -> int:
    """Number of first layers that a policy keeps whole."""
    if policy.rebuilding is not None:
        return policy.rebuilding.depth
    return 0 if policy.recall is None else policy.recall.dense


def _dense_layers(policy: Policy) -> list[str]:
    dense = _num_dense_layers(policy)
    if not dense:
        return []
    return [f"the first {'layer keeps' if dense == 1 else f'{dense} layers keep'} everything"]


def _sliding_layers(spec: ModelSpec | None) -> tuple[str, ...]:
    if spec is None or not spec.windows:
        return ()
    if not spec.managed:
        return (f"all {len(spec.layers)} layers slide: policy and budget change nothing here",)
    return (f"{len(spec.windows)} of {len(spec.layers)} layers hold sliding windows of their own",)
