"""Engine clients of `larder serve`, in this process or in processes that Ray runs, and its options
of bytes and choices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from larder.cli.store_options import check_store_access
from larder.core.errors import UsageError
from larder.core.home import home
from larder.core.memory_budget import BudgetUnit, MemoryBudget
from larder.engine.progress_bar import progress_bar
from larder.store.ledger import ByteBudgets, Tier

if TYPE_CHECKING:
    from larder.cli.serve import ServeOptions
    from larder.core.progress import ProgressStage
    from larder.server.engine_client import EngineClient
    from larder.server.persistence.base import SessionLocks
    from larder.store.store import Store

STORE_FOLDER = "store"  # in the home folder
ADDRESS_OF_ONE_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")
DEFAULT_REPLICAS = 2
# Saved states of a session: the newest, and one to fall back on if that is damaged.
STORED_EPOCHS = 2
QUOTA = "--tenant-quota"


@contextmanager
def local_engine_client(
    options: ServeOptions, stage: ProgressStage = progress_bar
) -> Iterator[EngineClient]:
    """Engine client in this process, over the store of the options.

    Args:
        stage: shows the stages of loading and measuring.
    """
    from larder.server.persistence.base import SessionLocks
    from larder.store.encryption import read_key

    store = _open_store(options, store_url(options), key=read_key(options.key_file))
    try:
        with _local_engine_client(options, store, SessionLocks(), stage) as client:
            yield client
    finally:
        store.close()


@contextmanager
def ray_engine_client(
    options: ServeOptions, stage: ProgressStage = progress_bar
) -> Iterator[EngineClient]:
    """Engine client of replicas in processes that Ray runs.

    Args:
        stage: shows the start of the replicas.

    Raises:
        DependencyError: Ray Serve is not installed.
        UsageError: the machines do not share the store.
        ModelError: no replica starts.
    """
    from larder.cli.question_run import check_model_options
    from larder.core.ray_cluster import connect, require_ray, shutdown
    from larder.server.cluster.client import ClusterEngineClient
    from larder.server.cluster.ray_serve import RayReplicaSet, ReplicaResources, check_store
    from larder.store.encryption import read_key, store_secret

    require_ray("'larder serve --ray'")
    check_model_options(options)
    replicas = DEFAULT_REPLICAS if options.replicas is None else options.replicas
    resources = ReplicaResources(replicas, accelerators=int(options.device.startswith("cuda")))
    start_replica = partial(
        replica_engine_client,
        options,
        store_url(options),
        secret=store_secret(home()),
        key=read_key(options.key_file),
    )
    machines = connect()
    try:
        check_store(options.store, machines)
        with stage("Starting replicas", "replicas"):
            client = ClusterEngineClient(RayReplicaSet(start_replica, resources))
        try:
            yield client
        finally:
            client.close()
    finally:
        shutdown()


@contextmanager
def replica_engine_client(
    options: ServeOptions, url: str, secret: bytes, key: bytes | None = None
) -> Iterator[EngineClient]:
    """Engine client of one replica, in its own process; its store index is local to its machine.

    Args:
        url: address of the store that all replicas share.
        secret: secret of the store, the same in every replica.
        key: encryption key; None leaves blobs unencrypted.
    """
    from larder.server.cluster.leases import LeasedSessionLocks, LeaseHeartbeat, SessionLeases
    from larder.server.persistence.sweeper import limit_memory

    limit_memory()
    store = _open_store(options, url, secret, key)
    leases = SessionLeases(store.parts)
    heartbeat = LeaseHeartbeat(leases)

    try:
        with _local_engine_client(options, store, LeasedSessionLocks(store, leases)) as client:
            yield client
    finally:
        heartbeat.close()
        store.close()


def store_url(options: ServeOptions) -> str:
    """Store address, absolute where it is a folder.

    Raises:
        UsageError: the address has one slash only.
    """
    if options.store is None:
        return str(home() / STORE_FOLDER)
    if ADDRESS_OF_ONE_SLASH.match(options.store):
        address = options.store.replace(":/", "://", 1)
        raise UsageError(
            f"--store {options.store!r} has no '://': write {address!r}, or "
            f"'./{options.store}' for a folder of that name."
        )
    if "://" in options.store:
        return options.store
    return str(Path(options.store).expanduser().absolute())


def _open_store(
    options: ServeOptions, url: str, secret: bytes | None = None, key: bytes | None = None
) -> Store:
    from larder.cli.served_models import split_adapters
    from larder.store.eviction.base import EVICTIONS
    from larder.store.store import Store

    check_store_access(url)
    return Store(
        url,
        home(),
        secret=secret,
        key=key,
        eviction=EVICTIONS.load(options.eviction)(),
        budgets=disk_budget(options.store_budget, options.tenant_quota or ()),
        models=tuple(split_adapters(options.adapter or ()).named),
        kept_epochs=STORED_EPOCHS,
    )


@contextmanager
def _local_engine_client(
    options: ServeOptions, store: Store, locks: SessionLocks, stage: ProgressStage = progress_bar
) -> Iterator[EngineClient]:
    from larder.cli.served_models import model_clients
    from larder.server.persistence.sweeper import StoreSweeper

    quotas = options.tenant_quota or ()
    budgets = memory_budgets(options.kv_budget, options.host_budget, quotas)
    client = model_clients(options, budgets, store, locks, stage)
    try:
        with StoreSweeper(store):
            yield client
    finally:
        client.close()


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
