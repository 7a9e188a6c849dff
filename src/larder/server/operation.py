"""Operation of an engine client: its function, the replicas that run it, and its HTTP endpoint.

Everything else follows from these: the method of the engine client, the relay to replicas, the HTTP
route and its entry in the OpenAPI document. `operations.py` is the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial, wraps
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    get_type_hints,
    overload,
    runtime_checkable,
)

from larder.server.engine_context import EngineContext
from larder.server.engine_core import EngineCore

P = ParamSpec("P")
R = TypeVar("R")


class Placement(Enum):
    """Replicas of a cluster that run an operation."""

    SESSION = "the replica of the session: the first arguments are tenant and name"
    ANY = "any one replica"
    ALL = "every replica; their results are merged"


def default_response(name: str, result: Any) -> Any:
    """JSON of a result that has `as_json`."""
    return result.as_json()


@dataclass(frozen=True)
class Endpoint:
    """HTTP endpoint of an operation. The tenant comes from the request's key.

    A parameter of the operation is a part of the path if the path names it, the body if its type is
    `bytes`, and otherwise a field of `body` or of the query.

    Args:
        method: HTTP method.
        path: with the session as `{name:path}`.
        name: in the OpenAPI document; the operation's own if empty.
        body: model of the JSON body, whose `arguments()` are keyword arguments of the operation;
            a request without a body has none of them.
        response: makes the JSON value, or the bytes of a file, of session name and result.
    """

    method: str
    path: str
    name: str = ""
    body: type[Any] | None = None
    response: Callable[[str, Any], Any] = default_response


@runtime_checkable
class Caller(Protocol):
    """Engine client as operations see it."""

    def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation where the model is."""
        ...


@dataclass(frozen=True)
class Operation(Generic[P, R]):
    """One row of the table of operations; as an attribute of an engine client, a method.

    Args:
        run: the operation where the model is.
        placement: replicas that run it.
        merge: one result of the results of all replicas.
        is_constant: the result never changes.
        endpoint: its HTTP endpoint, if it has one.
    """

    run: Callable[Concatenate[EngineContext, P], R]
    placement: Placement = Placement.SESSION
    merge: Callable[[Sequence[R]], R] | None = None
    is_constant: bool = False
    endpoint: Endpoint | None = None

    @overload
    def __get__(self, client: None, owner: type) -> Operation[P, R]: ...

    @overload
    def __get__(self, client: Caller, owner: type) -> Callable[P, R]: ...

    def __get__(self, client: Caller | None, owner: type) -> Operation[P, R] | Callable[P, R]:
        return self if client is None else partial(client.call, self)

    @property
    def description(self) -> str:
        """Description of the operation in the OpenAPI document."""
        return inspect.getdoc(self.run) or ""

    @property
    def name(self) -> str:
        """Name of the operation, and of the method of the engine client."""
        return self.run.__name__

    @cached_property
    def parameters(self) -> tuple[inspect.Parameter, ...]:
        """Parameters of a call, with resolved types."""
        function = inspect.unwrap(self.run)
        types = get_type_hints(function, include_extras=True)
        _, *rest = inspect.signature(function).parameters.values()
        return tuple(each.replace(annotation=types[each.name]) for each in rest)

    def arguments(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
        """Arguments of a call by position, defaults included."""
        bound = inspect.Signature(self.parameters).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args


def operation(
    placement: Placement = Placement.SESSION,
    *,
    merge: Callable[[Sequence[Any]], Any] | None = None,
    is_constant: bool = False,
    endpoint: Endpoint | None = None,
) -> Callable[[Callable[Concatenate[EngineContext, P], R]], Operation[P, R]]:
    """Decorator that makes an `Operation` of a function; the arguments are its fields."""
    return lambda run: Operation(run, placement, merge, is_constant, endpoint)


def on_model_thread(
    act: Callable[Concatenate[EngineCore, str, str, P], R],
) -> Callable[Concatenate[EngineContext, str, str, P], R]:
    """Decorator of an operation on one session that runs as a whole between two steps of the
    model; the session is in memory by then."""

    @wraps(act)
    def run(context: EngineContext, tenant: str, name: str, *args: P.args, **kwargs: P.kwargs) -> R:
        with context.resident(tenant, name):
            return context.call(lambda: act(context.core, tenant, name, *args, **kwargs))

    return run
