"""Engine client over several models, such as adapters of one, chosen by a request's `model`; and
contexts that one of them takes from another of its shape, in one process.

Liu et al., "DroidSpeak: KV Cache Sharing for Cross-LLM Communication and Multi-LLM Serving" (2024),
arXiv:2411.02820. A model and its adapters read contexts into chunks of their own in host memory;
the sender keeps hidden states beside them, and the receiver computes a range of layers again
(`larder.prefill.layer_reuse`). What it takes is private to the request. Tenants stay apart: a
context is taken from what the same tenant has sent to the other model.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from larder.core.errors import UsageError
from larder.engine.layer_transfer import check_sender, parse_layers
from larder.engine.snapshots import identity_of_model
from larder.models.layer_reuse import LayerRange, check_layers
from larder.prefill.contexts import ChunkSource
from larder.prefill.layer_reuse import ReusedChunks, SenderChunks
from larder.server import operations
from larder.server.engine_client import EngineClient
from larder.server.operation import Operation, Placement
from larder.server.request import ApiError, Listener, Request, Ticket
from larder.session.policy import Policy
from larder.store.components import MODEL_SEPARATOR
from larder.store.fs.deadline import parallel_map

if TYPE_CHECKING:
    from larder.server.engine_core import EngineCore

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


@dataclass(frozen=True)
class ContextTransfer:
    """Contexts that one served model takes from another.

    Args:
        receiver, sender: names of the models.
        layers: range of layers that the receiver computes.
    """

    receiver: str
    sender: str
    layers: LayerRange

    @staticmethod
    def parse(text: str) -> ContextTransfer:
        """Transfer in the spelling NAME=SENDER:START-STOP.

        Raises:
            UsageError: it is malformed.
        """
        receiver, _, rest = text.partition("=")
        sender, _, layers = rest.rpartition(":")
        if not (receiver and sender):
            raise UsageError(
                f"--reuse-contexts {text!r} is not NAME=SENDER:START-STOP, such as "
                "tuned=smollm2:10-30."
            )
        return ContextTransfer(receiver, sender, parse_layers(layers))

    def check(self, names: Sequence[str], policy: Policy) -> None:
        """Check names and policy before a model is loaded.

        Args:
            names: of the models that are served.

        Raises:
            UsageError: a model is not served, or the policy cannot take contexts of another model.
        """
        if self.receiver not in names or self.sender not in names or self.receiver == self.sender:
            raise UsageError(
                f"Reuse of contexts {self.receiver}={self.sender}:... needs two models that are "
                f"served here, which are {', '.join(names)}: serve an adapter beside them, or name "
                "two of these."
            )
        if not policy.schedule.takes_reused_chunks:
            raise UsageError(
                f"Contexts of another model do not go with {policy}, which reads contexts as one "
                "text, or keeps what it makes of them as exact: take cacheblend or ape."
            )

    def connect(self, cores: Mapping[str, EngineCore]) -> None:
        """Have the receiver take what the sender has read. Their threads must take turns.

        Args:
            cores: of all models by name; the first is the default.

        Raises:
            ModelError: their entries do not mean the same, or there are no such layers.
        """
        default, sender, receiver = next(iter(cores)), cores[self.sender], cores[self.receiver]
        theirs, own = sender.engine.loaded, receiver.engine.loaded
        check_sender(identity_of_model(theirs), identity_of_model(own))
        start, stop = self.layers
        check_layers(own.decoder, (start, stop - 1))
        if start:
            sender.contexts.share([start])

        def transfer(chunks: ChunkSource, scoped: str) -> ChunkSource:
            tenant = unscoped_tenant(scoped, self.receiver, default)
            source = sender.contexts.own_source(scoped_tenant(tenant, self.sender, default))
            other = SenderChunks(source, theirs.decoder.spec)
            return ReusedChunks(chunks, other, own.decoder, self.layers)

        receiver.contexts.take(transfer)
