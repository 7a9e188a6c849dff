"""Snapshot of modules, to see whether any of them changed since; cheap enough for a decode step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CHILDREN, PARAMETERS = itemgetter("_modules"), itemgetter("_parameters")
HOOKS, DTYPE = itemgetter("_forward_hooks"), attrgetter("dtype")


class ModuleSnapshot:
    """Modules with all of their parts: classes, children, parameters and addresses of these.

    A layer has a dozen parts, so that they are compared without a line of Python for each.

    Args:
        modules: the modules.
        dtype: of their parameters.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._parts = [part for module in modules for part in module.modules()]
        self._kinds = list(map(type, self._parts))
        self._dtype = dtype
        self._children = _Members.of(self._parts, CHILDREN)
        self._parameters = _Members.of(self._parts, PARAMETERS)
        self._weights = [each for each in self._parameters.members if isinstance(each, Tensor)]
        self._addresses = list(map(Tensor.data_ptr, self._weights))

    @property
    def is_current(self) -> bool:
        """False once a part was replaced, hooked or overridden, or a parameter was.

        New numbers in the memory of a parameter are no change. Hooks before a call do not count.
        """
        own = list(map(vars, self._parts))
        weights = self._weights
        return (
            all(map(is_, map(type, self._parts), self._kinds))
            and not any(map(HOOKS, own))
            and not any(map(contains, own, repeat("forward")))
            and self._children.are_same(_Members.of(self._parts, CHILDREN))
            and self._parameters.are_same(_Members.of(self._parts, PARAMETERS))
            and list(map(Tensor.data_ptr, weights)) == self._addresses
            and all(map(is_, map(DTYPE, weights), repeat(self._dtype)))
            and all(map(Tensor.is_contiguous, weights))
        )

    @property
    def pre_hooks(self) -> list[Any]:
        """Hooks before calls of the parts."""
        held = map(itemgetter("_forward_pre_hooks"), map(vars, self._parts))
        return [hook for hooks in held if hooks for hook in hooks.values()]


class _Members(NamedTuple):
    """Members of some parts in order, and how many each part has."""

    counts: list[int]
    members: list[Any]

    @staticmethod
    def of(parts: Sequence[nn.Module], kind: Callable[[Any], Any]) -> _Members:
        held = list(map(kind, map(vars, parts)))
        return _Members(list(map(len, held)), [*chain.from_iterable(map(dict.values, held))])

    def are_same(self, other: _Members) -> bool:
        """True for the same objects in the same parts."""
        return self.counts == other.counts and all(map(is_, self.members, other.members))
