"""Engine client over several models, such as adapters of one, chosen by a request's `model`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, ParamSpec, TypeVar

from larder.server import operations
from larder.server.engine_client import EngineClient
from larder.server.operation import Operation, Placement
from larder.server.request import ApiError, Listener, Request, Ticket
from larder.store.components import MODEL_SEPARATOR
from larder.store.fs.deadline import parallel_map

P = ParamSpec("P")
R = TypeVar("R")


class ModelRouter(EngineClient):
    """Router over models that share weights and nothing else; a session belongs to one model.

    A session is looked for under the first model, then under the others in order; all of them are
    listed, and a deletion deletes it under each.

    Args:
        clients: by the first name of their model; the first is the default.
    """

    def __init__(self, clients: Mapping[str, EngineClient]) -> None:
        self._clients = dict(clients)
        self._default = next(iter(self._clients))

    def submit(self, request: Request, listener: Listener) -> Ticket:
        name = request.model or self._default
        scoped = replace(request, tenant=self._scoped(request.tenant, name))
        return self._clients[name].submit(scoped, listener)

    def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> Any:
        if operation.name == operations.models.name:
            served = (client.models() for client in self._clients.values())
            return tuple(chain.from_iterable(served))
        if operation.placement is Placement.ANY:
            return self._clients[self._default].call(operation, *args, **kwargs)
        arguments = operation.arguments(*args, **kwargs)
        if operation.placement is Placement.ALL:
            return self._merged(operation, arguments)
        if operation.name == operations.remove.name:
            return self._removed(operation, arguments)
        return self._first(operation, arguments)

    def close(self) -> None:
        """Close all clients at once: each saves within the same time."""
        parallel_map(lambda client: client.close(), self._clients.values())

    def _scoped(self, tenant: str, name: str) -> str:
        return scoped_tenant(tenant, name, self._default)

    def _merged(self, operation: Operation[..., R], arguments: tuple[Any, ...]) -> R:
        assert operation.merge is not None
        results = list[Any]()
        for name, client in self._clients.items():
            scoped = (self._scoped(arguments[0], name), *arguments[1:]) if arguments else ()
            results.append(client.call(operation, *scoped))
        return operation.merge(results)

    def _removed(self, operation: Operation[..., R], arguments: tuple[Any, ...]) -> Any:
        """Remaining branches of all models, after each has removed its session of the name.

        Raises:
            ApiError: none has it, or one could not remove it; the others have.
        """
        (tenant, *rest), remaining, errors = arguments, dict[str, None](), list[ApiError]()
        for name, client in self._clients.items():
            try:
                left: Any = client.call(operation, self._scoped(tenant, name), *rest)
                remaining |= dict.fromkeys(left)
            except ApiError as error:
                errors.append(error)
        refused = [error for error in errors if error.code != "session_not_found"]
        if refused or len(errors) == len(self._clients):
            raise (refused or errors)[0]
        return tuple(remaining)

    def _first(self, operation: Operation[..., R], arguments: tuple[Any, ...]) -> R:
        """Result of the first model that has the session.

        Raises:
            ApiError: none has it, or as the operation.
        """
        tenant, *rest = arguments
        *others, last = self._clients
        for name in others:
            try:
                return self._clients[name].call(operation, self._scoped(tenant, name), *rest)
            except ApiError as error:
                if error.code != "session_not_found":
                    raise
        return self._clients[last].call(operation, self._scoped(tenant, last), *rest)


def scoped_tenant(tenant: str, name: str, default: str) -> str:
    """Tenant under a model.

    Args:
        name: of the model.
        default: name of the model under which a tenant has its own name.
    """
    return tenant if name == default else f"{tenant}{MODEL_SEPARATOR}{name}"


def unscoped_tenant(scoped: str, name: str, default: str) -> str:
    """Tenant of a name by `scoped_tenant`."""
    return scoped if name == default else scoped.removesuffix(f"{MODEL_SEPARATOR}{name}")


class TurnLock:
    """Lock acquired in the order of requests (FIFO), so that no thread starves."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = self._served = 0

    def __enter__(self) -> None:
        with self._changed:
            turn, self._next = self._next, self._next + 1
            self._changed.wait_for(lambda: self._served == turn)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()
