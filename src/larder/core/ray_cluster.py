"""Machines that work together, by Ray; nothing of it is needed on one machine."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from larder.core.errors import DependencyError, InputError

ADDRESS_VARIABLE = "RAY_ADDRESS"
OBJECT_BYTES = 200 << 20  # of Ray's own store: what we send through it is small
LOCAL_OPTIONS = {
    "address": "local",
    "include_dashboard": False,
    "object_store_memory": OBJECT_BYTES,
}
# Nothing is told to others, and a replica that is slow to say how busy it is is not passed by: its
# sessions would go to one that does not know them.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "4",
}
LOGGING_OPTIONS = {"log_to_driver": False, "logging_level": "warning"}


def require_ray(what: str) -> None:
    """See that Ray is there, before anything is loaded.

    Args:
        what: needs it; for the error.

    Raises:
        DependencyError: it is not installed, or not all of it.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import_module("ray.serve")
    except ImportError as error:
        raise DependencyError(
            f"{what} needs Ray ({error.name} is missing): pip install 'larder[ray]'."
        ) from error


def connect() -> int:
    """Become part of the Ray cluster that RAY_ADDRESS names, `auto` for the one that runs on this
    machine; without it, start one of this machine alone.

    Returns:
        how many machines there are.

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
            said = " ".join(str(error).split())[:200]
            where = "on this machine" if address is None else f"at ${ADDRESS_VARIABLE}={address}"
            raise InputError(
                f"Ray cannot be had {where} ({said}): start a cluster with 'ray start --head', or "
                f"unset {ADDRESS_VARIABLE} to use this machine alone."
            ) from error
    return len(cpu_counts())


def cpu_counts() -> list[float]:
    """How many each machine of the cluster has to give."""
    return [node["Resources"].get("CPU", 0.0) for node in _ray().nodes() if node["Alive"]]


def shutdown() -> None:
    """End the cluster, if it was started here; else only leave it."""
    _ray().shutdown()


def _ray() -> Any:
    return import_module("ray")
