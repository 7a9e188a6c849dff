"""Choice of the session backend by policy."""

from __future__ import annotations

from collections.abc import Callable

from larder.server.serving_policy import ServingPolicy
from larder.server.session_backend.base import FindPrefix, SessionBackend
from larder.server.session_backend.chat import ChatBackend
from larder.server.session_backend.prefix import PrefixBackend
from larder.server.tiers.device import DeviceReservations
from larder.server.tiers.manager import TierManager
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter


def session_backends(
    tiers: TierManager,
    reservations: DeviceReservations,
    tokenizer: TokenizerAdapter,
    find: FindPrefix,
) -> Callable[[ServingPolicy], SessionBackend]:
    """Backend of the sessions under a policy; the arguments are those of `PrefixBackend`."""
    chat = ChatBackend(tiers, reservations, tokenizer)
    prefix = PrefixBackend(tiers, reservations, tokenizer, find)
    return lambda rule: chat if rule.is_chat else prefix
