"""What `larder serve` serves from: this process, or replicas that Ray runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from larder.core.settings import home

if TYPE_CHECKING:
    from larder.cli.serve import ServeOptions
    from larder.server.engine_client import EngineClient
    from larder.server.persistence.base import SessionPersistence
    from larder.server.persistence.store import StoreSessionPersistence
    from larder.store.store import Store

STORE_FOLDER = "store"  # in the home folder
DEFAULT_REPLICAS = 2
STORED_EPOCHS = (
    2  # states of a session that are kept: one to fall back on, if the newest is damaged
)
PersistenceWrapper = Callable[["StoreSessionPersistence"], "SessionPersistence"]


@contextmanager
def local_hub(options: ServeOptions) -> Iterator[EngineClient]:
    """One hub in this process."""
    from larder.store.encryption import read_key

    store = _open_store(options, store_url(options), key=read_key(options.key_file))
    try:
        with _local_hub(options, store, lambda persistence: persistence) as hub:
            yield hub
    finally:
        store.close()


@contextmanager
def ray_hub(options: ServeOptions) -> Iterator[EngineClient]:
    """Several in other processes, which Ray runs.

    Raises:
        DependencyError: Ray Serve is not installed.
        UsageError: the machines have no store in common.
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
    wanted = ReplicaResources(replicas, accelerators=int(options.device.startswith("cuda")))
    secrets = store_secret(home()), read_key(options.key_file)
    opened = partial(replica_hub, options, store_url(options), *secrets)
    machines = connect()
    try:
        check_store(options.store, machines)
        hub = ClusterEngineClient(RayReplicaSet(opened, wanted))
        try:
            yield hub
        finally:
            hub.close()
    finally:
        shutdown()


@contextmanager
def replica_hub(
    options: ServeOptions, url: str, secret: bytes, key: bytes | None = None
) -> Iterator[EngineClient]:
    """One of them, in its process; its index of the store is its machine's own.

    Args:
        url: of the store that all have in common.
        secret, key: likewise.
    """
    from larder.server.persistence.leases import LeasedSessionPersistence, LeaseHeartbeat
    from larder.store.leases import SessionLeases

    store = _open_store(options, url, secret, key)
    claims = SessionLeases(store.parts)
    beating = LeaseHeartbeat(claims)

    try:
        with _local_hub(
            options, store, lambda persistence: LeasedSessionPersistence(persistence, store, claims)
        ) as hub:
            yield hub
    finally:
        beating.close()
        store.close()


def store_url(options: ServeOptions) -> str:
    """Of the store; the same from every folder of this machine."""
    if options.store is None:
        return str(home() / STORE_FOLDER)
    is_path = "://" not in options.store
    return str(Path(options.store).expanduser().absolute()) if is_path else options.store


def _open_store(
    options: ServeOptions, url: str, secret: bytes | None = None, key: bytes | None = None
) -> Store:
    from larder.cli.serve import store_budgets
    from larder.store.eviction.base import EVICTIONS
    from larder.store.store import Store

    own = {"budgets": store_budgets(options), "kept_epochs": STORED_EPOCHS}
    rule = EVICTIONS.load(options.eviction)()
    return Store(url, home(), secret=secret, key=key, eviction=rule, **own)


@contextmanager
def _local_hub(
    options: ServeOptions, store: Store, kept: PersistenceWrapper
) -> Iterator[EngineClient]:
    from larder.cli.question_run import open_engine
    from larder.cli.serve import tier_budgets
    from larder.engine.snapshots import ModelSnapshots
    from larder.server.local_engine_client import LocalEngineClient
    from larder.server.persistence.base import Durability
    from larder.server.persistence.store import StoreSessionPersistence
    from larder.server.persistence.sweeper import StoreSweeper
    from larder.server.tiers.disk import StoreDiskTier

    engine = open_engine(options)
    persistence = StoreSessionPersistence(store, engine.loaded.decoder.spec)
    snapshots = ModelSnapshots(store, engine.loaded, options.codec)
    disk = StoreDiskTier(persistence, snapshots, Durability(options.durability))
    hub = LocalEngineClient(
        engine,
        tier_budgets(options),
        eviction=options.eviction,
        persistence=kept(persistence),
        disk=disk,
    )
    try:
        with StoreSweeper(store):
            yield hub
    finally:
        hub.close()
