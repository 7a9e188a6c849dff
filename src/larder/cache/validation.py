"""Validation of plans before a layer changes, and of saved layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Int8, Int64
from torch import Tensor

from larder.core.errors import CacheError
from larder.core.part import Ledger
from larder.core.plan import Plan
from larder.core.spec import LayerSpec


def check_counts(plan: Plan, heads: int) -> None:
    """Check that a plan's lengths count its kept entries per head.

    Raises:
        CacheError: they do not.
    """
    if len(plan.lengths) != heads or sum(plan.lengths) != len(plan.kept):
        raise CacheError(
            f"A plan's lengths must count the {len(plan.kept)} kept entries of {heads} kv heads, "
            f"one count a head, got {plan.lengths}."
        )


def check_kept(plan: Plan, lengths: tuple[int, ...]) -> None:
    """Check that kept entries ascend and lie within heads of `lengths` entries.

    Raises:
        CacheError: they do not.
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


def tokens_kept(plan: Plan, num_entries: int) -> Int64[Tensor, " N"] | None:
    """Entries that a plan keeps in every head, in host memory; None where heads differ.

    Args:
        num_entries: entries of each head.
    """
    heads = plan.kept.cpu().split(plan.lengths)
    chosen = [part - head * num_entries for head, part in enumerate(heads)]
    return chosen[0] if all(torch.equal(part, chosen[0]) for part in chosen) else None


def check_dropped(plan: Plan, rejected: Int64[Tensor, " G"]) -> None:
    """Check that dropped entries are among the rejected ones.

    Raises:
        CacheError: they are not.
    """
    dropped = plan.dropped.cpu()
    if bool((dropped.diff() <= 0).any()) or not bool(torch.isin(dropped, rejected).all()):
        raise CacheError(
            f"The {len(dropped)} entries that a plan drops must ascend, without repeats, and be "
            f"among the {len(rejected)} that it does not keep: drop only rejected entries, sorted."
        )


def check_single_precision(plan: Plan) -> None:
    """Check that a plan lowers no precision.

    Raises:
        CacheError: it does.
    """
    if len(plan.grades) and bool(plan.grades.any()):
        raise CacheError(
            "A cache of one precision cannot hold entries of different grades, but the plan "
            "requests them: use a compensation that lowers no precision."
        )


def check_dtypes(
    layer: LayerSpec, stored: torch.dtype, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Check that new entries have the dtype of the stored ones.

    Raises:
        CacheError: they have another.
    """
    if (keys.dtype, values.dtype) != (stored, stored):
        raise CacheError(
            f"Layer {layer.index} was given keys in {keys.dtype} and values in "
            f"{values.dtype}, but its cache holds {stored}: bring the model to one dtype, as by "
            f"model.to({stored}), and call it outside torch.autocast."
        )


def check_grades(plan: Plan, grades: Int8[Tensor, " T"], coarsest: int) -> Int8[Tensor, " T"]:
    """New grades of the kept entries, whose present grades are `grades`; in host memory.

    Targets of folds have grade 0, because they are new sums.

    Raises:
        CacheError: a grade that does not exist, or is finer than the present one.
    """
    if not len(plan.grades):
        return grades
    wanted = plan.grades.cpu()
    if wanted.shape != grades.shape:
        raise CacheError(
            f"A plan has {len(wanted)} grades for {len(grades)} kept entries: give one each, "
            "or none."
        )
    if bool(((wanted < 0) | (wanted > coarsest)).any()):
        raise CacheError(
            f"Grades of a plan lie in [{int(wanted.min())}, {int(wanted.max())}], but this cache "
            f"has 0 to {coarsest}: configure a codec for every grade that plans request."
        )
    if bool((wanted < grades).any()):
        worst = int((wanted < grades).nonzero()[0])
        raise CacheError(
            f"Kept entry {worst} has grade {int(grades[worst])}, but the plan asks for "
            f"{int(wanted[worst])}: precision cannot be restored, so request no finer grade."
        )
    return wanted


def check_channels(plan: Plan, layer: LayerSpec) -> None:
    """Check that channel weights cover all key channels or none.

    Raises:
        CacheError: they cover some.
    """
    shape = (layer.kv_heads, layer.head_dim)
    if plan.channels.numel() and plan.channels.shape != shape:
        raise CacheError(
            f"A plan's channel weights have shape {list(plan.channels.shape)}, but layer "
            f"{layer.index} has [{shape[0]}, {shape[1]}] key channels: weigh each once."
        )


def check_merges_whole(plan: Plan, layer: LayerSpec) -> None:
    """Check that keys and values are merged by the same weights.

    Raises:
        CacheError: the weights differ.
    """
    if not torch.equal(plan.folds.key_weights, plan.folds.value_weights):
        raise CacheError(
            f"A plan merges keys and values of layer {layer.index} by different weights, but its "
            "latents (MLA) are both at once: take fold_ema(variant='paper'), or drop()."
        )


def check_ledger(ledger: Ledger, layer: int, names: Iterable[str]) -> None:
    """Check that a saved layer has the columns of its ledger.

    Raises:
        CacheError: it has others.
    """
    named = sorted(ledger.columns + ledger.scalars)
    if sorted(names) != named:
        raise CacheError(
            f"Layer {layer} of the saved cache has {', '.join(sorted(names)) or 'no columns'}, "
            f"but its description names {', '.join(named) or 'none'}: build the cache again."
        )


def check_offload_plan(plan: Plan) -> None:
    """Check that a plan for a tiered layer neither merges nor quantizes.

    Raises:
        CacheError: it does.
    """
    check_single_precision(plan)
    if len(plan.folds):
        raise CacheError(
            f"A tiered cache offloads rejected entries, but a plan merges {len(plan.folds)} of "
            "them: use a ragged cache for plans that merge."
        )


def refuse_eviction(count: int, layer: LayerSpec) -> None:
    """Refuse a plan for a layer without offload.

    Raises:
        CacheError: always.
    """
    raise CacheError(
        f"Layer {layer.index} offloads nothing, but a plan rejects {count} of its entries: leave "
        "the first layers, which the recall part calls dense, out of plans."
    )
