"""Replicas under Ray Serve, which places them, checks their health and routes by session key."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Any

from larder.core.errors import ModelError, UsageError
from larder.core.ray_cluster import cpu_counts
from larder.server.cluster.client import Frame, Replica, ReplicaLost, ReplicaSet
from larder.server.engine_client import EngineClient
from larder.server.request import Request

NAME = "larder"
ROUTER: Any = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
MOST_REQUESTS = 1000  # concurrent per replica: Larder's scheduler queues them
DRAIN_SECONDS = 60.0
ASK_SECONDS = 10.0
ERROR_LINE = re.compile(r"[A-Za-z_.]*Error: (.+)")


@dataclass(frozen=True)
class ReplicaResources:
    """Number and resources of replicas.

    Args:
        replicas: number of replicas.
        cpus: CPUs of each; None divides those of the machines.
        accelerators: accelerators of each.
    """

    replicas: int
    cpus: int | None = None
    accelerators: int = 0


def check_store(url: str | None, machines: int) -> None:
    """Raise UsageError for several machines without a common store."""
    if url is None and machines > 1:
        raise UsageError(
            f"The Ray cluster has {machines} machines, so they need one store: give --store URL "
            "that all of them reach, such as a mounted folder or s3://..."
        )


class RayReplicaSet(ReplicaSet):
    """Replicas of one Ray Serve application, which `close` shuts down.

    Args:
        open_client: opens the engine client of a replica; must be picklable.
    """

    def __init__(
        self,
        open_client: Callable[[], AbstractContextManager[EngineClient]],
        resources: ReplicaResources,
    ) -> None:
        from ray import serve  # pyright: ignore

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        try:
            self._handle = serve.run(
                ray_application(open_client, resources), name=NAME, route_prefix=None
            )
        except RuntimeError as error:
            reason = error_reason(_status_messages(serve.status()) or str(error))
            self.close()
            raise ModelError(f"No replica could start: {reason}") from error

    async def answer(self, key: str, request: Request) -> AsyncGenerator[Frame, None]:
        handle = self._handle.options(stream=True, session_id=key, method_name="answer")
        frames = handle.remote(request)
        is_over = False
        try:
            async with aclosing(_frames(frames)) as results:
                async for several in results:
                    for frame in several:
                        yield frame
            is_over = True
        finally:
            if not is_over:
                asyncio.get_running_loop().run_in_executor(None, frames.cancel)

    async def ask(self, key: str, operation: str, *arguments: Any) -> Any:
        from ray.exceptions import RayError  # pyright: ignore
        from ray.serve.exceptions import RayServeException  # pyright: ignore

        handle = self._handle.options(session_id=key, method_name="ask")
        try:
            return await handle.remote(operation, *arguments)
        except (RayError, RayServeException) as error:
            raise ReplicaLost(type(error).__name__) from error

    async def ask_all(self, operation: str, *arguments: Any) -> list[Any]:
        from ray.serve.exceptions import RayServeException  # pyright: ignore

        try:
            broadcast = self._handle.broadcast("ask", operation, *arguments)
            results = await broadcast.results_async(timeout_s=ASK_SECONDS, return_exceptions=True)
        except (RayServeException, TimeoutError):
            return []
        return [each for each in results if not isinstance(each, Exception)]

    def close(self) -> None:
        from ray import serve  # pyright: ignore

        serve.delete(NAME)
        serve.shutdown()


def error_reason(results: str) -> str:
    """Last error message in the output of a replica, without its traceback."""
    lines = [line.strip() for line in results.splitlines() if line.strip()]
    for line in reversed(lines):
        if found := ERROR_LINE.match(line):
            return found[1]
    return lines[-1] if lines else "Ray gives no reason."


def _status_messages(status: Any) -> str:
    deployments = (d for app in status.applications.values() for d in app.deployments.values())
    return "\n".join(each.message for each in deployments)


def ray_application(
    open_client: Callable[[], AbstractContextManager[EngineClient]], resources: ReplicaResources
) -> Any:
    """Ray Serve application of the replicas."""
    from ray import serve  # pyright: ignore
    from ray.serve.config import RequestRouterConfig  # pyright: ignore

    share = _cpus(resources) if resources.cpus is None else resources.cpus
    deployment = serve.deployment(
        Replica,
        name="replica",
        num_replicas=resources.replicas,
        max_ongoing_requests=MOST_REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2.0,
        max_constructor_retry_count=1,
        ray_actor_options={"num_cpus": share, "num_gpus": resources.accelerators},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        logging_config={"log_level": "WARNING"},
    )
    return deployment.bind(open_client)


def _cpus(resources: ReplicaResources) -> float:
    """CPUs of one replica: those of the smallest machine, divided by its share of the replicas."""
    machines = [count for count in cpu_counts() if count]
    if not machines:
        raise UsageError("The Ray cluster has no CPUs: start it with --num-cpus.")
    share = min(machines) / -(-resources.replicas // len(machines))
    return float(int(share)) if share >= 1 else share


async def _frames(frames: Any) -> AsyncGenerator[list[Frame], None]:
    """Frames of a replica.

    Raises:
        ReplicaLost: the replica is gone.
    """
    from ray.exceptions import RayError  # pyright: ignore
    from ray.serve.exceptions import RayServeException  # pyright: ignore

    try:
        async for several in frames:
            yield several
    except (RayError, RayServeException) as error:
        raise ReplicaLost(type(error).__name__) from error
