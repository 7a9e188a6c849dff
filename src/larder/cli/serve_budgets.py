"""Byte budgets of `larder serve`, of each tier and each tenant in it, and choices by name."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from larder.core.errors import UsageError
from larder.core.memory_budget import BudgetUnit, MemoryBudget
from larder.store.ledger import ByteBudgets, Tier

QUOTA = "--tenant-quota"


def memory_budgets(kv_budget: str, host_budget: str, quotas: Sequence[str]) -> ByteBudgets:
    """Byte budgets of the device and host tiers.

    Args:
        quotas: values of `--tenant-quota`.

    Raises:
        UsageError: an option is not a number of bytes, or names no tier.
    """
    tenant = _quotas(quotas)
    tenant.pop(Tier.DISK, None)
    return ByteBudgets(
        {
            Tier.DEVICE: _bytes("--kv-budget", kv_budget, Tier.DEVICE),
            Tier.HOST: _bytes("--host-budget", host_budget, Tier.HOST),
        },
        tenant,
    )


def disk_budget(store_budget: str | None, quotas: Sequence[str]) -> ByteBudgets:
    """Byte budget of the disk tier; no limit without `--store-budget`.

    Args:
        quotas: values of `--tenant-quota`.

    Raises:
        UsageError: as `memory_budgets`.
    """
    tenant = {tier: limit for tier, limit in _quotas(quotas).items() if tier is Tier.DISK}
    if store_budget is None:
        return ByteBudgets(tenant=tenant)
    return ByteBudgets({Tier.DISK: _bytes("--store-budget", store_budget, Tier.DISK)}, tenant)


def _quotas(quotas: Sequence[str]) -> dict[Tier, int]:
    """Bytes by tier. Raise UsageError if a quota is not TIER=BYTES, or its tier occurs twice."""
    tiers, found = {tier.value: tier for tier in Tier}, dict[Tier, int]()
    for text in quotas:
        name, _, size = text.partition("=")
        if name not in tiers or not size:
            raise UsageError(
                f"{QUOTA} {text!r} is not TIER=BYTES: take one of {', '.join(tiers)}, as in "
                "host=512MiB."
            )
        if tiers[name] in found:
            raise UsageError(f"{QUOTA} {name}=... is given twice: give each tier one limit.")
        found[tiers[name]] = _bytes(f"{QUOTA} {name}", size, tiers[name])
    return found


def _bytes(option: str, text: str, tier: Tier) -> int:
    """Number of bytes. Raise UsageError if the text is none, or less than one."""
    try:
        amount = MemoryBudget.parse(text, option)
        count = int(amount.number) if amount.unit is BudgetUnit.BYTES else 0
    except UsageError:
        count = 0
    if count < 1:
        raise UsageError(
            f"{option} {text!r} is not a number of bytes: give the {tier.value} tier at least 1 "
            "byte, as in 512MiB or 2GiB."
        )
    return count


def check_choice(option: str, value: str, choices: type[Enum]) -> None:
    """Raise UsageError if the value of an option is none of its choices."""
    known = [each.value for each in choices]
    if value not in known:
        raise UsageError(f"{option} {value!r} is not known: take one of {', '.join(known)}.")
