"""Interruption of long calls of a model: other calls of it between two of its layers.

A call of many tokens takes seconds on a CPU. What it has computed after a layer is its hidden
states and the entries in its own caches, so that a call over other caches may run before the next
layer, with no part in its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from torch import nn

LONG_CALL_TOKENS = 128  # calls of more can be interrupted

# Called before each layer of a long call; it may make other calls of the same decoder.
BeforeLayer = Callable[[], None]


def no_calls() -> None:
    """Null callback before layers: nothing runs between them."""


class CallInterruptions:
    """Callbacks that run between the layers of long calls of a decoder. For one thread.

    A callback that makes calls of its own does not run in calls around which others have put hooks,
    such as those of learned prompts: the hooks would take part in its own calls as well.

    Args:
        module: the decoder's model, with the hooks that all of its calls have.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._num_hooks = module, _count_hooks(module)
        self._before_layer = self._with_hooks = no_calls

    @contextmanager
    def by(self, before_layer: BeforeLayer, with_hooks: BeforeLayer = no_calls) -> Iterator[None]:
        """Context in which a callback runs before each layer of long calls. Its error ends the
        call, whose caches are then as they were before it.

        Args:
            before_layer: may call the decoder with other caches than those of the call.
            with_hooks: runs in its place in calls with hooks of others, and makes no calls.
        """
        former = self._before_layer, self._with_hooks
        self._before_layer, self._with_hooks = before_layer, with_hooks
        try:
            yield
        finally:
            self._before_layer, self._with_hooks = former

    def before_layer(self, num_tokens: int, head: AbstractContextManager[None]) -> BeforeLayer:
        """Callback of a call of so many tokens, whose own hooks are not set yet.

        Args:
            head: context of the model's head in that call, left meanwhile.
        """
        if self._before_layer is no_calls or num_tokens <= LONG_CALL_TOKENS:
            return no_calls
        has_hooks = _count_hooks(self._module) != self._num_hooks
        return self._with_hooks if has_hooks else partial(_call_outside, head, self._before_layer)


def _call_outside(context: AbstractContextManager[None], call: BeforeLayer) -> None:
    """Call with a context left meanwhile, which is entered again."""
    context.__exit__(None, None, None)
    try:
        call()
    finally:
        context.__enter__()


def _count_hooks(module: nn.Module) -> int:
    """Number of forward hooks and forward pre-hooks of a module and of all its parts."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(vars(part)[name]) for part in module.modules() for name in names)
