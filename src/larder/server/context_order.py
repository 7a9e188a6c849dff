"""Order of contexts that shares the longest prefix with earlier requests of a tenant.

Retrieved documents overlap between requests, but in another order in each, so that prompts
differ from the first document on. RAGBoost puts documents that were read before first, in the order
in which they were read, leaves out repeated ones, and adds a line that tells the model which matter
most: Jiang et al., "RAGBoost: Efficient Retrieval-Augmented Generation with Accuracy-Preserving
Context Reuse" (2025), arXiv:2511.03475. A context of a later message that the conversation has
already becomes a line that refers to it. Differences: the paper arranges the lists of a batch in a
tree by average-link clustering, as `larder batch` does (`larder.session.context_tree`), and looks
new requests up in it; here requests come one by one, and the order is chosen among those that
earlier requests were read in, so that it never shares less than the given one. The wording of the
lines is ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from enum import Enum

from larder.core.errors import BudgetError
from larder.store.ledger import ByteLedger, Reservation, Tier

MOST_ORDERS = 512  # of one tenant that are compared with a request
MOST_CONTEXTS = 64  # of an order that are compared
CONTEXT_BYTES, ORDER_BYTES = 160, 512  # of host memory that an order takes, at most
ORDER_SHARE = 1 / 64  # of host memory that orders of all tenants take, at most
OPENING_LEN = 60  # characters by which a line names a text that stands above

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
        self._nbytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all orders."""
        return self._nbytes

    def shared(self, tenant: str, sizes: dict[str, int]) -> Ids:
        """Ids in the order in which most of them are a prefix of what was read.

        Args:
            sizes: characters of each context by its id, in the order that is given.
        """
        known = self._orders.get(tenant, OrderedDict())
        prefixes = [known_prefix(order, sizes) for order in reversed(known)]
        best = max(prefixes, key=lambda ids: sum(sizes[each] for each in ids), default=())
        return tuple(dict.fromkeys((*best, *sizes)))

    def add(self, tenant: str, order: Ids) -> None:
        """Add an order as the most recently used one, unless it exceeds the memory for orders."""
        order = order[:MOST_CONTEXTS]
        known = self._orders.get(tenant, OrderedDict())
        if order in known:
            known.move_to_end(order)
            return
        count = ORDER_BYTES + CONTEXT_BYTES * len(order)
        most = ORDER_SHARE * self._ledger.limit(Tier.HOST)
        while self._orders and self._nbytes + count > most:
            self._drop_oldest(max(self._orders, key=lambda each: len(self._orders[each])))
        if count > most:
            return
        if len(self._orders.get(tenant, ())) >= MOST_ORDERS:
            self._drop_oldest(tenant)
        while (reservation := self._reserved(tenant, count)) is None:
            if tenant not in self._orders:
                return
            self._drop_oldest(tenant)
        self._orders.setdefault(tenant, OrderedDict())[order] = reservation
        self._nbytes += count

    def _reserved(self, tenant: str, count: int) -> Reservation | None:
        """Host memory of an order; None if there is no room."""
        try:
            return self._ledger.reserve(Tier.HOST, tenant, count)
        except BudgetError:
            return None

    def _drop_oldest(self, tenant: str) -> None:
        """Drop the least recently used order of a tenant, and the tenant with its last one."""
        orders = self._orders[tenant]
        _, reservation = orders.popitem(last=False)
        self._nbytes -= reservation.bytes
        reservation.release()
        if not orders:
            del self._orders[tenant]


def known_prefix(order: Ids, wanted: Container[str]) -> Ids:
    """First contexts of an order up to one that is not wanted."""
    stop = next((n for n, each in enumerate(order) if each not in wanted), len(order))
    return order[:stop]


def ordered_texts(texts: Mapping[str, str], order: Ids) -> tuple[str, ...]:
    """Texts in an order, and the line that states the given one.

    Args:
        texts: text of each id, the most important first.
    """
    line = importance_line(list(texts), order)
    return (*(texts[name] for name in order), *((line,) if line else ()))


class ContextReferences:
    """Contexts of the messages of a conversation; those that stand above once more become lines
    that refer to them.

    A text that begins like another one above, or that is no longer than the line, is repeated.

    Args:
        texts: those that stand in front of all messages.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts: dict[str, set[str]] = {}  # by their beginnings
        for text in texts:
            self._add(text)

    def next_message(self, contexts: Iterable[str]) -> list[str]:
        """Texts and lines of the contexts of the next message, which stand above from then on."""
        return [self._line(text) or self._add(text) for text in dict.fromkeys(contexts)]

    def _line(self, text: str) -> str:
        """Line that refers to a text; empty where it is repeated."""
        line = f'See the text above that begins with "{_opening(text)}".'
        is_known = self._texts.get(_opening(text)) == {text}
        return line if is_known and len(line) < len(text) else ""

    def _add(self, text: str) -> str:
        self._texts.setdefault(_opening(text), set()).add(text)
        return text


def _opening(text: str) -> str:
    """Beginning of the first line of a text."""
    return text.strip().partition("\n")[0][:OPENING_LEN].strip()


def importance_line(ranking: Sequence[str], order: Sequence[str]) -> str:
    """Line with the order of importance; empty if the texts are in that order.

    Args:
        ranking, order: the same ids, most important first and as they are read.
    """
    if list(ranking) == list(order):
        return ""
    positions = {each: number for number, each in enumerate(order, 1)}
    numbers = ", ".join(str(positions[each]) for each in ranking)
    return f"The {len(order)} texts above, the most relevant first: {numbers}."
