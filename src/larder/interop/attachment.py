"""Attachment of Larder's caches to a model of transformers by public forward hooks.

Two hooks sit on the model's body (the layers without the head), one on the model, and two on what
merges images into the embeddings between them, if anything does. While a call of the body carries
an `AttachedCache`, Larder's attention implementation is set and the call is replaced by one over
packed tokens; every other call runs the model's own attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache

from larder.core.errors import ModelError, UsageError
from larder.core.types import Mode
from larder.models.attention_backend import CONTEXT_KEYWORD
from larder.models.body_call import NO_OUTER_CALL, BodyCall, OuterCall
from larder.models.decoder import Decoder
from larder.models.forward_batch import ForwardBatch
from larder.models.in_memory import check_decoder, shared_decoder, without_adapter_wrapper
from larder.models.introspection import check_mode, check_not_compiled
from larder.models.lm_head import base_model_of
from larder.models.placement import input_placement

NO_THREAD = 0


class RunningCall(Protocol):
    """Call of a body over packed tokens that takes the place of the one that was asked for.

    Args:
        arguments: keyword arguments of the body, with the keyword `larder`.
    """

    @property
    def arguments(self) -> dict[str, Any]: ...

    def hidden(self, packed: Float[Tensor, "1 N hidden"]) -> Float[Tensor, "B Q hidden"]:
        """Last hidden states of the call that was asked for, zeros at padding."""
        ...


class AttachedCache(Cache):
    """Cache whose tokens the attachment of its model reads."""

    attachment: Attachment

    def run(self, call: BodyCall) -> AbstractContextManager[RunningCall]:
        """Context of a call of the body; a block that fails leaves the cache as it was."""
        raise NotImplementedError


# Called with the cache of a call that carries no `AttachedCache`, or None; returns the cache to
# use instead, or None to leave the call alone.
CacheSubstitute = Callable[[object], AttachedCache | None]


def no_substitute(cache: object) -> None:
    """`CacheSubstitute` that leaves every call alone."""
    del cache


class _CallFailed(Exception):
    """Thrown into the context of a call that failed or was interrupted."""


@dataclass
class HiddenCapture:
    """Last hidden states of the tokens that nested calls append to one sequence.

    Args:
        last_tokens: number of last tokens whose states are held; None for all.
        embeddings: input embeddings of the tokens, read in place of their ids; empty for ids.
        start: true position of the first token.
    """

    cache: object
    last_tokens: int | None
    embeddings: Float[Tensor, "_ _"]
    start: int
    parts: list[Float[Tensor, "_ hidden"]] = field(default_factory=list[Tensor])

    def takes(self, batch: object) -> bool:
        """True for a batch that appends to the sequence."""
        if not isinstance(batch, ForwardBatch):
            return False
        return batch.mode is Mode.APPEND and batch.segments[0].cache is self.cache

    def record(self, batch: ForwardBatch, hidden: Float[Tensor, "1 N hidden"]) -> None:
        """Hold the states of the new tokens of a call.

        Raises:
            UsageError: states of tokens are wanted that not all layers computed.
        """
        if batch.is_narrowed and self.last_tokens != 1:
            raise UsageError(
                "The policy leaves tokens out of deeper layers, so that only the last one has "
                "logits: ask for these alone, with logits_to_keep=1 as generate() does, or take a "
                "policy that reads whole() or blockwise()."
            )
        self.parts.append(hidden[0, len(batch.segments[0].reread_ids) :])
        if self.last_tokens is not None:
            self.parts = [torch.cat(self.parts)[-self.last_tokens :]]

    def states(self) -> Float[Tensor, "_ hidden"]:
        """States held, in order."""
        return torch.cat(self.parts)


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Context in which no inference tensors are made, which later calls could not write to."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def no_hook(*args: Any, **named: Any) -> None:
    """Forward hook that does nothing."""
    del args, named


@dataclass(frozen=True)
class AttachmentHook:
    """Forward hook of an attachment.

    Copies of the model have `no_hook` in its place, saved ones too: they are not attached.
    """

    attachment: Attachment
    call: Callable[..., Any]

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.call(*args, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (no_hook,)


class Attachment:
    """Hooks on a model, its decoder, and the call in progress. Not thread-safe.

    Args:
        module: a `PreTrainedModel` with a language-model head.

    Raises:
        ModelError: the model is compiled, in training mode, held by another decoder, or uses a
            feature that Larder does not support.
    """

    def __init__(self, module: Any) -> None:
        check_decoder(module)
        self.module = module
        self.decoder: Decoder = shared_decoder(module)
        # Those of open blocks of `applied`, in which the last one acts.
        self.substitutes: list[CacheSubstitute] = [no_substitute]
        self._logits_to_keep: object = 0
        self._outer, self._outer_stack = NO_OUTER_CALL, ExitStack()
        self._head_stack = ExitStack()
        self._stack = ExitStack()
        self._thread = NO_THREAD
        self._call: RunningCall | None = None
        self._cache: AttachedCache | None = None
        self._capture: HiddenCapture | None = None
        body = self.decoder.body
        self._hooks = [
            self._before(module, self._before_model),
            self._before(body, self._before_body),
            self._after(body, self._after_body),
        ]
        base = base_model_of(module)[1]
        if base is not body:
            self._hooks += [
                self._before(base, self._before_base),
                self._after(base, self._after_base),
            ]

    @property
    def is_current(self) -> bool:
        """False once the model was moved or converted to another dtype."""
        spec = self.decoder.spec
        return input_placement(self.decoder.module) == (spec.dtype, spec.device)

    def detach(self) -> None:
        """Remove the hooks."""
        self._abandon()
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, call: Callable[..., Any]) -> Any:
        hook = AttachmentHook(self, call)
        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def _after(self, module: nn.Module, call: Callable[..., Any]) -> Any:
        hook = AttachmentHook(self, call)
        return module.register_forward_hook(hook, with_kwargs=True, always_call=True)

    @contextmanager
    def capture(self, capture: HiddenCapture) -> Iterator[HiddenCapture]:
        """Context in which the states of appended tokens are captured."""
        self._capture = capture
        try:
            yield capture
        finally:
            self._capture = None

    def _before_model(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        # The head alone runs on a shallow copy of the model, which has the same hooks.
        if module is self.module and CONTEXT_KEYWORD not in named:
            self._logits_to_keep = named.get("logits_to_keep", 0)

    def _before_body(
        self, body: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if CONTEXT_KEYWORD in named:
            return args, self._with_embeddings(named)
        if self._outer is NO_OUTER_CALL:
            self._check_thread()
            self._abandon()
        named = named_arguments(body, args, named)
        cache = self._cache_of(named)
        if cache is None:
            return None
        self._check_call(body)
        table = self.module.get_input_embeddings()
        call = BodyCall.of(named, self._logits_to_keep, self._outer, table)
        self._logits_to_keep = 0
        with ExitStack() as stack:
            stack.enter_context(self._taken_by_thread())
            stack.enter_context(self.decoder.attention)
            stack.enter_context(normal_tensors())
            running = stack.enter_context(cache.run(call))
            self._cache, self._call, self._stack = cache, running, stack.pop_all()
        return (), {**call.options, **running.arguments}

    def _before_base(
        self, base: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook before images are merged into the embeddings, and masks are made for the body."""
        if CONTEXT_KEYWORD in named:
            return None
        self._check_thread()
        self._abandon()
        named = named_arguments(base, args, named)
        cache = self._cache_of(named)
        if cache is None:
            return None
        self._check_call(base)
        self._outer_stack.enter_context(self._taken_by_thread())
        self._outer_stack.enter_context(self.decoder.attention)
        self._outer = OuterCall(named.get("input_ids"), named.get("attention_mask"))
        return (), {**named, "past_key_values": cache}

    def _after_base(
        self, base: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Any
    ) -> None:
        if CONTEXT_KEYWORD not in named and not self._is_taken():
            self._outer = NO_OUTER_CALL
            self._outer_stack.close()

    def _after_body(
        self, body: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Any
    ) -> Any:
        context = named.get(CONTEXT_KEYWORD)
        if self._call is None or context is not self._call.arguments[CONTEXT_KEYWORD]:
            capture = self._capture
            is_batch = isinstance(context, ForwardBatch)
            if is_batch and out is not None and capture is not None and capture.takes(context):
                capture.record(context, out.last_hidden_state)
            return None
        if out is None:
            self._abandon()
            return None
        with self._stack.pop_all():
            running, self._call = self._call, None
            out.last_hidden_state = running.hidden(out.last_hidden_state)
            out.past_key_values, self._cache = self._cache, None
        if isinstance(context, ForwardBatch):
            self._head_stack.enter_context(self.decoder.layer_runner.head(context.num_tokens))
        return out

    def _cache_of(self, named: dict[str, Any]) -> AttachedCache | None:
        """Cache of Larder that a call is to run over; None to leave the call alone."""
        given = named.get("past_key_values")
        if not isinstance(given, AttachedCache):
            return self.substitutes[-1](given)
        if given.attachment is not self:
            raise ModelError(
                f"The LarderCache was made for another {type(given.attachment.module).__name__} "
                f"than the {type(self.module).__name__} that is called: make one for this model."
            )
        return given

    @contextmanager
    def _taken_by_thread(self) -> Iterator[None]:
        """Context of a call over a cache: the model has Larder's attention."""
        former, self._thread = self._thread, get_ident()
        try:
            yield
        finally:
            self._thread = former

    def _is_taken(self) -> bool:
        """True while another thread is in a call over a cache."""
        return self._thread not in (NO_THREAD, get_ident())

    def _check_thread(self) -> None:
        """Check that no other thread is in a call over a cache."""
        if self._is_taken():
            raise ModelError(
                f"The {type(self.module).__name__} was called while another thread calls it over a "
                "LarderCache: call it from one thread at a time, with a lock around generate(), or "
                "serve several users with larder.Engine or `larder serve`."
            )

    def _check_call(self, body: nn.Module) -> None:
        check_mode(self.module)
        check_not_compiled(body)
        if torch.is_grad_enabled():
            raise ModelError(
                "A LarderCache was given to a call that records gradients, but entries that are "
                "evicted have none: call the model under torch.no_grad(), as generate() does."
            )

    def _with_embeddings(self, named: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a nested call, with embeddings in place of ids where they were given."""
        capture = self._capture
        if (
            capture is None
            or not len(capture.embeddings)
            or not capture.takes(named[CONTEXT_KEYWORD])
        ):
            return named
        segment = named[CONTEXT_KEYWORD].segments[0]
        indices = [position - capture.start for position in segment.positions()]
        return {**named, "input_ids": None, "inputs_embeds": capture.embeddings[indices][None]}

    def _abandon(self) -> None:
        """Roll back a call that failed, or that an interrupt left open."""
        self._outer = NO_OUTER_CALL
        self._outer_stack.close()
        self._head_stack.close()
        stack, self._stack, self._call = self._stack, ExitStack(), None
        with suppress(_CallFailed):
            stack.__exit__(_CallFailed, _CallFailed(), None)


def named_arguments(
    body: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of a call of the body, those given by position under their names."""
    names = inspect.signature(body.forward).parameters if args else ()
    return dict(zip(names, args, strict=False)) | named


def attached(model: Any) -> Attachment:
    """Attachment of a model, made on first use; PEFT models are unwrapped.

    Raises:
        ModelError: as `Attachment`.
    """
    module = without_adapter_wrapper(model)
    check_decoder(module)
    for hook in list(vars(module)["_forward_pre_hooks"].values()):
        if isinstance(hook, AttachmentHook) and hook.attachment.module is module:
            if hook.attachment.is_current:
                return hook.attachment
            hook.attachment.detach()
    return Attachment(module)
