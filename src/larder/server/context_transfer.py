"""Contexts that one served model takes from another of its shape, in one process.

Liu et al., "DroidSpeak: KV Cache Sharing for Cross-LLM Communication and Multi-LLM Serving" (2024),
arXiv:2411.02820. A model and its adapters read contexts into chunks of their own in host memory;
the sender keeps hidden states beside them, and the receiver computes a range of layers again
(`larder.prefill.layer_reuse`). What it takes is private to the request. Tenants stay apart: a
context is taken from what the same tenant has sent to the other model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from larder.core.errors import UsageError
from larder.engine.layer_transfer import check_sender, parse_layers
from larder.engine.snapshots import identity_of_model
from larder.models.layer_reuse import LayerRange, check_layers
from larder.prefill.contexts import ChunkSource
from larder.prefill.layer_reuse import ReusedChunks, SenderChunks
from larder.server.model_router import scoped_tenant, unscoped_tenant
from larder.session.policy import Policy

if TYPE_CHECKING:
    from larder.server.engine_core import EngineCore


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
