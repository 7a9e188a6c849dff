"""Contexts of the requests of `larder batch`, in the order that shares most of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from larder.core.errors import InputError
from larder.server.context_order import ContextOrder, ordered_texts
from larder.server.context_prompts import CHUNK_ID, chunk_id
from larder.session.context_tree import Ids, shared_orders
from larder.session.files.json_fields import valid_unicode
from larder.session.files.loader import SEPARATOR

ORDERS = tuple(each.value for each in ContextOrder)


@dataclass(frozen=True)
class BatchContexts:
    """Contexts of one request.

    Args:
        texts: as they are read.
        problem: what is wrong with the fields of the request; empty for nothing.
    """

    texts: tuple[str, ...] = ()
    problem: str = ""

    def text(self) -> str:
        """All contexts.

        Raises:
            InputError: the fields of the request are wrong.
        """
        if self.problem:
            raise InputError(self.problem)
        return "".join(text.rstrip() + SEPARATOR for text in self.texts)


def batch_contexts(lines: Sequence[Mapping[str, Any]]) -> list[BatchContexts]:
    """Contexts of each request; those of requests with `context_order: shared` by one tree."""
    given = [_given(line["body"]) for line in lines]
    texts = [
        {chunk_id(text): text for text in contexts.texts}
        if line["body"].get("context_order") == ContextOrder.SHARED.value
        else {}
        for line, contexts in zip(lines, given, strict=True)
    ]
    sizes = {name: len(text) for own in texts for name, text in own.items()}
    orders = iter(shared_orders([tuple(own) for own in texts if own], sizes))
    return [
        _in_order(own, next(orders)) if own else contexts
        for own, contexts in zip(texts, given, strict=True)
    ]


def _in_order(texts: Mapping[str, str], order: Ids) -> BatchContexts:
    return BatchContexts(ordered_texts(texts, order))


def _given(body: Mapping[str, Any]) -> BatchContexts:
    """Contexts of a request as they are given, or what is wrong with them."""
    try:
        return BatchContexts(_checked(body.get("contexts"), body.get("context_order")))
    except InputError as error:
        return BatchContexts(problem=str(error))


def _checked(contexts: Any, order: Any) -> tuple[str, ...]:
    """The contexts. Raise InputError if they are no texts, or the order is unknown."""
    if order is not None and order not in ORDERS:
        raise InputError(f"context_order must be one of {ORDERS}, got {order!r}.")
    if contexts is None:
        return ()
    if not isinstance(contexts, list):
        raise InputError(f"contexts must be a list of texts, got {contexts!r:.80}.")
    for text in contexts:
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"A context must be a text, got {text!r:.80}.")
        if CHUNK_ID.fullmatch(valid_unicode(text, "A context")):
            raise InputError(
                f"The context {text} is an id, which only a server knows: send its text."
            )
    return tuple(contexts)
