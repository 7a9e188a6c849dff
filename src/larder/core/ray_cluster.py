"""Connection to a Ray cluster, for servers on several machines; optional on one machine."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from larder.core.errors import DependencyError, InputError

ADDRESS_VARIABLE = "RAY_ADDRESS"
OBJECT_BYTES = 200 << 20  # size of Ray's object store: messages are small
LOCAL_OPTIONS = {
    "address": "local",
    "include_dashboard": False,
    "object_store_memory": OBJECT_BYTES,
}
# No usage statistics. Long queue-length deadlines, so that a slow replica is not passed over: its
# sessions would go to a replica that does not hold them.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "4",
}
LOGGING_OPTIONS = {"log_to_driver": False, "logging_level": "warning"}


def require_ray(feature: str) -> None:
    """Check that Ray is installed, before anything else is loaded.

    Args:
        feature: feature that needs Ray, for the error.

    Raises:
        DependencyError: Ray or a part of it is not installed.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import_module("ray.serve")
    except ImportError as error:
        raise DependencyError(
            f"{feature} needs Ray ({error.name} is missing): pip install 'larder[ray]'."
        ) from error


def connect() -> int:
    """Connect to the Ray cluster at RAY_ADDRESS (`auto` for the one on this machine); without that
    variable, start a cluster of this machine alone.

    Returns:
        Number of machines in the cluster.

    Raises:
        InputError: the cluster cannot be reached.
    """
    ray, address = _ray(), os.environ.get(ADDRESS_VARIABLE)
    if not ray.is_initialized():
        try:
            ray.init(
                **(LOCAL_OPTIONS if address is None else {"address": address}), **LOGGING_OPTIONS
            )
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            reason = " ".join(str(error).split())[:200]
            where = "on this machine" if address is None else f"at ${ADDRESS_VARIABLE}={address}"
            raise InputError(
                f"Ray is not available {where} ({reason}): start a cluster with "
                f"'ray start --head', or unset {ADDRESS_VARIABLE} to use this machine alone."
            ) from error
    return len(cpu_counts())


def cpu_counts() -> list[float]:
    """CPUs of each live machine of the cluster."""
    return [node["Resources"].get("CPU", 0.0) for node in _ray().nodes() if node["Alive"]]


def shutdown() -> None:
    """Disconnect from the cluster; stops it if it was started here."""
    _ray().shutdown()


def _ray() -> Any:
    return import_module("ray")
