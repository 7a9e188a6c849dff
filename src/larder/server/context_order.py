"""Order of contexts that shares the longest prefix with earlier requests of a tenant.

Retrieved documents overlap between requests, but stand in another order in each, so that prompts
differ from the first document on. RAGBoost puts documents that were read before first, in the order
in which they were read, leaves out repeated ones, and adds a line that tells the model which matter
most: Jiang et al., "RAGBoost: Efficient Retrieval-Augmented Generation with Accuracy-Preserving
Context Reuse" (2025), arXiv:2511.03475. Differences: the paper arranges the lists of a batch in a
tree by average-link clustering; here requests come one by one, and the order is chosen among those
that earlier requests were read in, so that it never shares less than the given one. The wording of
the line is ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum

from larder.core.errors import BudgetError
from larder.store.ledger import ByteLedger, Reservation, Tier

MOST_ORDERS = 512  # of one tenant that are compared with a request
MOST_CONTEXTS = 64  # of an order that are compared
CONTEXT_BYTES, ORDER_BYTES = 160, 512  # of host memory that an order takes, at most
ORDER_SHARE = 1 / 64  # of host memory that orders of all tenants take, at most

Ids = tuple[str, ...]


class ContextOrder(Enum):
    """Order in which the contexts of a request are read: as they are given, or so that a prefix of
    them was read before."""

    GIVEN = "given"
    SHARED = "shared"


class ContextOrders:
    """Orders that contexts were read in, by tenant, in host memory; the least recently used leave.

    For the model's thread.
    """

    def __init__(self, ledger: ByteLedger) -> None:
        self._ledger = ledger
        self._orders: dict[str, OrderedDict[Ids, Reservation]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all orders."""
        return sum(own.bytes for orders in self._orders.values() for own in orders.values())

    def shared(self, tenant: str, sizes: dict[str, int]) -> Ids:
        """Ids in the order in which most of them are a prefix of what was read.

        Args:
            sizes: characters of each context by its id, in the order that is given.
        """
        known = self._orders.get(tenant, OrderedDict())
        prefixes = [known_prefix(order, sizes) for order in reversed(known)]
        best = max(prefixes, key=lambda ids: sum(sizes[each] for each in ids), default=())
        return (*best, *(each for each in sizes if each not in best))

    def add(self, tenant: str, order: Ids) -> None:
        """Note an order as the most recently used one, unless there is no room for it."""
        order = order[:MOST_CONTEXTS]
        known = self._orders.setdefault(tenant, OrderedDict())
        if order in known:
            known.move_to_end(order)
            return
        count, limit = ORDER_BYTES + CONTEXT_BYTES * len(order), self._ledger.limit(Tier.HOST)
        while len(self) and self.nbytes + count > ORDER_SHARE * limit:
            longest = max(self._orders.values(), key=len)  # whoever has most gives one
            longest.popitem(last=False)[1].release()
        if count > ORDER_SHARE * limit:
            return
        while known and len(known) >= MOST_ORDERS:
            known.popitem(last=False)[1].release()
        while True:
            try:
                known[order] = self._ledger.reserve(Tier.HOST, tenant, count)
                return
            except BudgetError:
                if not known:
                    del self._orders[tenant]
                    return
                known.popitem(last=False)[1].release()


def known_prefix(order: Ids, wanted: Iterable[str]) -> Ids:
    """First contexts of an order up to one that is not wanted."""
    wanted = set(wanted)
    stop = next((n for n, each in enumerate(order) if each not in wanted), len(order))
    return order[:stop]


def importance_line(given: Sequence[str], order: Sequence[str]) -> str:
    """Line that tells the order of importance; empty where texts stand in it.

    Args:
        given, order: the same ids, most important first and as they are read.
    """
    if list(given) == list(order):
        return ""
    places = {each: number for number, each in enumerate(order, 1)}
    numbers = ", ".join(str(places[each]) for each in given)
    return f"The {len(order)} texts above, the most relevant first: {numbers}."
