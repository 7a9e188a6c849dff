"""Decoder: a Hugging Face causal model whose attention runs over Larder's caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from larder.core.errors import CacheError, InputError, ModelError
from larder.core.types import Mode
from larder.models import attention_backend
from larder.models.activation_hooks import attention_modules, capture_activations, column_inputs
from larder.models.attention_backend import (
    AttentionPerCall,
    LayerAttention,
    PrivateConfigs,
    RenumberedAttention,
)
from larder.models.attention_survey import latent_hooks, survey_model
from larder.models.batch_segment import BatchSegment, new_hidden, new_token_indices
from larder.models.call_interruption import CallInterruptions
from larder.models.forward_batch import ForwardBatch
from larder.models.introspection import call_uncached, check_unchanged, switch_attention
from larder.models.layer_runner import LayerRunner, layer_runner_of
from larder.models.lm_head import LMHead, text_body_of
from larder.models.observers import Observer
from larder.models.placement import loaded_tensor
from larder.models.rope_frequencies import rope_limit
from larder.ops.packing import device_tensor
from larder.policy.providers.base import ActivationProvider, TokenProvider, column_providers

if TYPE_CHECKING:
    from larder.cache.page_arena import PageArena
    from larder.models.captured_steps import CapturedSteps
    from larder.models.decode_graph import GraphCapture
    from larder.models.kv_cost import ModelShape
    from larder.models.learned_weights import LearnedGates
    from larder.models.recompute import KVRecompute
    from larder.models.soft_prompt import LearnedSoftPrompts

# Providers of activations, by name.
Inputs = Mapping[str, ActivationProvider]
NO_INPUTS: Inputs = MappingProxyType({})
# Numbers of the tokens of a segment, by provider.
TokenNumbers = dict[str, Float[Tensor, " _"]]


def check_not_in_use(module: Any) -> None:
    """Raise ModelError if a decoder holds the module, also one that `Engine.load` made."""
    if module.config.get_text_config()._attn_implementation == attention_backend.NAME:
        raise ModelError(
            f"This {type(module).__name__} is held by another decoder: use that one, or call "
            "its release() first."
        )


class Decoder:
    """Model on Larder's attention backend, with the specification of its caches.

    While a decoder holds the module, the attention implementation is Larder's, set in a private
    copy of the configuration: other modules that share the original are not affected. `release`,
    or leaving the `with` block, restores it. After `share` the module has its own attention
    whenever no call of the decoder runs. Nothing else of the model changes, and calls are refused
    once others have changed its mode, dtype or device. Not thread-safe.

    Args:
        module: a `PreTrainedModel` with a language-model head, in eval mode.

    Raises:
        ModelError: the architecture does not dispatch attention through transformers' interface or
            uses an unsupported feature; or another decoder holds the module.
    """

    def __init__(self, module: Any) -> None:
        attention_backend.register_backend()
        self.module = module
        check_not_in_use(module)
        self._configs = PrivateConfigs(module)
        self._latent_hooks: list[Any] = []
        self._rope_limit = rope_limit(module.config)
        # Context of a call of the model on Larder's attention.
        self.attention: AbstractContextManager[None] = nullcontext()
        self.captured: CapturedSteps | None = None  # decode steps as graphs
        try:
            switch_attention(module, attention_backend.NAME)
            self._latent_hooks = latent_hooks(self.body)
            self.spec, self._recurrent = survey_model(module, self.body)
        except BaseException:
            self.release()
            raise
        self.interruptions = CallInterruptions(module)

    @property
    def vocab_size(self) -> int:
        """V, segments of the input embedding table."""
        return int(self.module.get_input_embeddings().weight.shape[0])

    @cached_property
    def body(self) -> Any:
        """Layers of the language model, without the head and without a vision tower."""
        return text_body_of(self.module)

    def use_pages(self, arena: PageArena | None, capture: GraphCapture | None = None) -> None:
        """Hold the entries of caches that are made from now on in pages of an arena.

        Decode steps of several sequences are then one attention call per layer, on any device.
        Caches with codecs, and layers with a window, stay as they are.

        Args:
            arena: None for storage of each cache's own.
            capture: capture of whole steps as graphs; None to run them layer by layer.

        Raises: ModelError: layers are computed on several devices.
        """
        if arena is not None and self.spec.layer_devices:
            raise ModelError(
                f"The layers of {type(self.module).__name__} are on several devices, but pages lie "
                "on one: load it on one device (device_map={'': DEVICE}), or leave pages out."
            )
        self.spec, self.captured = replace(self.spec, arena=arena), None
        if arena is not None and capture is not None:
            from larder.models.captured_steps import CapturedSteps

            self.captured = CapturedSteps(self, capture)

    def embedding_table(self) -> Float[Tensor, "V hidden"]:
        """Input embeddings, by reference unless they are offloaded."""
        table = self.module.get_input_embeddings()
        return loaded_tensor(table, "weight", table.weight).to(self.spec.device)

    def no_states(self) -> Float[Tensor, "0 hidden"]:
        """Hidden states of no token."""
        return torch.empty(0, self.spec.width, dtype=self.spec.dtype, device=self.spec.device)

    @torch.no_grad()
    def read(
        self,
        segments: Sequence[BatchSegment],
        mode: Mode,
        observer: Observer | None = None,
        inputs: Inputs = NO_INPUTS,
    ) -> list[Float[Tensor, "_ hidden"]]:
        """Last hidden states by segment, without computing logits.

        In probe mode attention answers with zeros, so only the first layer records what it would
        in append mode.

        Args:
            inputs: providers of what the observer reads beside queries, keys and values.
        """
        return self._hidden(segments, mode, observer, inputs)

    @torch.no_grad()
    def forward_token_numbers(
        self,
        segments: Sequence[BatchSegment],
        mode: Mode,
        providers: Mapping[str, TokenProvider],
        observer: Observer | None = None,
        inputs: Inputs = NO_INPUTS,
    ) -> list[TokenNumbers]:
        """Forward, and the number of each token of each segment, by provider.

        The first token of a text, and one behind a token whose `tail` the cache no longer has, get
        the largest number of their segment.
        """
        tails = [segment.cache.latest.tail for segment in segments]
        passed = [part[:-1] for part in self._hidden(segments, mode, observer, inputs)]
        triples = zip(segments, tails, passed, strict=True)
        return [self._token_numbers(*triple, providers) for triple in triples]

    @torch.no_grad()
    def predict_token_numbers(
        self, segments: Sequence[BatchSegment], providers: Mapping[str, TokenProvider]
    ) -> list[TokenNumbers]:
        """Number of each token without appending; a single token needs no forward."""
        longer = [
            BatchSegment(segment.cache, segment.ids[:-1])
            for segment in segments
            if len(segment.ids) > 1
        ]
        parts = iter(self._hidden(longer, Mode.SCRATCH, None) if longer else ())
        nothing = self.no_states()
        passed = [next(parts) if len(segment.ids) > 1 else nothing for segment in segments]
        return [
            self._token_numbers(segment, segment.cache.latest.tail, part, providers)
            for segment, part in zip(segments, passed, strict=True)
        ]

    @torch.no_grad()
    def forward_logits(
        self,
        segments: Sequence[BatchSegment],
        mode: Mode,
        logit_indices: Sequence[int],
        observer: Observer | None = None,
    ) -> Float[Tensor, "N V"]:
        """Forward, and float32 logits at the given indices of the packed segments."""
        if self.captured is not None and mode is Mode.APPEND:
            if (step := self.captured.logits(segments, logit_indices, observer)) is not None:
                return step
        indices = device_tensor(logit_indices, self.spec.device)
        if mode is Mode.APPEND and any(_keeps_tail(segment) for segment in segments):
            return self._head.logits(torch.cat(self._hidden(segments, mode, observer))[indices])
        segments = _with_earlier_tokens(segments, mode)
        behind = device_tensor(new_token_indices(segments), self.spec.device)
        wanted_rows = behind[indices]
        if self.spec.layer_devices:
            wanted_rows = wanted_rows.cpu()  # the head may be on another device
        out = self._run(self.module, segments, mode, observer, logits_to_keep=wanted_rows)
        return out.logits[0].to(self.spec.device).float()

    @torch.no_grad()
    def forward_uncached(self, ids: Sequence[int], attention: LayerAttention) -> None:
        """Pass a text through all layers with another attention, and without a cache."""
        check_unchanged(self.module, self.spec)
        with self.attention:
            call_uncached(self.body, ids, RenumberedAttention(attention, self.spec))

    @contextmanager
    def append_call(
        self,
        segments: Sequence[BatchSegment],
        observer: Observer | None = None,
        inputs: Inputs = NO_INPUTS,
    ) -> Iterator[AppendCall]:
        """Context of a call of `body` from outside, which appends segments.

        The call takes `arguments` and its output goes to `parts_of`, inside the context. If the
        block fails, the caches are rolled back.
        """
        segments = _with_earlier_tokens(segments, Mode.APPEND)
        with self._forward_batch(segments, Mode.APPEND, observer, inputs) as batch:
            yield AppendCall(batch, self._arguments(batch))

    def release(self) -> None:
        """Restore the model's own attention implementation."""
        self._configs.restore()
        for hook in self._latent_hooks:
            hook.remove()

    def share(self) -> None:
        """Restore the model's own attention, except during calls of this decoder."""
        self.attention = AttentionPerCall(self._configs)
        self._configs.restore()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @cached_property
    def recompute(self) -> KVRecompute:
        """Recomputation of keys and values with this model."""
        with self.attention:
            from larder.models.recompute import KVRecompute

            return KVRecompute(self.body, self.spec, self.read, self.attention)

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of the model, for costs of recomputation."""
        from larder.models.kv_cost import ModelShape

        return ModelShape.of(self.module.config, self.spec)

    @cached_property
    def gates(self) -> LearnedGates:
        """Learned gates of this model."""
        from larder.models.learned_weights import LearnedGates

        return LearnedGates(self.spec, self.attentions)

    @cached_property
    def soft_prompts(self) -> LearnedSoftPrompts:
        """Learned tokens of scratch passes of this model."""
        from larder.models.soft_prompt import LearnedSoftPrompts

        return LearnedSoftPrompts(self.module, self.body, self.spec, self.attentions)

    @cached_property
    def _head(self) -> LMHead:
        return LMHead(self.module)

    @cached_property
    def layer_runner(self) -> LayerRunner:
        """Choice of what runs the layers of a call."""
        return layer_runner_of(self.module, self.body, self.spec)

    @cached_property
    def attentions(self) -> dict[int, nn.Module]:
        """Attention module of each layer of `spec`, by its index."""
        found = attention_modules(self.body, list(self._recurrent.modules.values()))
        numbers = [self.spec.number_of(layer.index) for layer in self.spec.layers]
        return {index: found[number] for index, number in enumerate(numbers) if number in found}

    def _hidden(
        self,
        segments: Sequence[BatchSegment],
        mode: Mode,
        observer: Observer | None,
        inputs: Inputs = NO_INPUTS,
    ) -> list[Float[Tensor, "_ hidden"]]:
        """Last hidden states by segment; caches with columns of logits save the last of theirs."""
        segments = _with_earlier_tokens(segments, mode)
        out = self._run(self.body, segments, mode, observer, inputs=inputs)
        parts = new_hidden(segments, out.last_hidden_state[0].to(self.spec.device))
        if mode is Mode.APPEND:
            _save_tails(segments, parts)
        return parts

    def _token_numbers(
        self,
        segment: BatchSegment,
        tail: Float[Tensor, " _"],
        passed: Float[Tensor, "_ hidden"],
        providers: Mapping[str, TokenProvider],
    ) -> TokenNumbers:
        """Numbers of the tokens of one segment, by provider.

        Args:
            tail: hidden state before its first token, or an empty tensor.
            passed: hidden states of all its tokens but the last.
        """
        before = torch.cat([tail[None], passed]) if len(tail) else passed
        ids = torch.tensor(segment.ids, device=self.spec.device)
        if not len(before):
            return {name: torch.zeros(1, device=ids.device) for name in providers}
        known = self._head.token_numbers(before, ids[len(ids) - len(before) :], providers)
        if len(before) == len(ids):
            return known
        return {name: torch.cat([norms.max()[None], norms]) for name, norms in known.items()}

    def _run(
        self,
        module: Any,
        segments: Sequence[BatchSegment],
        mode: Mode,
        observer: Observer | None,
        inputs: Inputs = NO_INPUTS,
        **options: Any,
    ) -> Any:
        num_tokens = sum(segment.num_tokens for segment in segments)
        head = self.layer_runner.head(num_tokens)
        before_layer = self.interruptions.before_layer(num_tokens, head)
        with self._forward_batch(segments, mode, observer, inputs) as batch:
            batch.before_layer = before_layer
            batch.output_rows = options.get("logits_to_keep")
            with head:
                return module(**self._arguments(batch), **options)

    def _arguments(self, batch: ForwardBatch) -> dict[str, Any]:
        """Keyword arguments of the model for a forward batch."""
        return {
            "input_ids": device_tensor(batch.ids(), self.spec.device)[None],
            "position_ids": batch.positions(),
            "use_cache": False,
            attention_backend.CONTEXT_KEYWORD: batch,
            **({"attention_mask": attention_backend.NO_MASK} if batch.is_paged else {}),
            **batch.options,
        }

    @contextmanager
    def _forward_batch(
        self,
        segments: Sequence[BatchSegment],
        mode: Mode,
        observer: Observer | None,
        inputs: Inputs = NO_INPUTS,
    ) -> Iterator[ForwardBatch]:
        """Context of one call of the model; it rolls the caches back if the call fails."""
        batch = ForwardBatch(segments, mode, self.spec.device, observer)
        self.check(batch.segments)
        try:
            batch.prepare()
            appended = segments if mode is Mode.APPEND else ()
            modules = self.attentions
            own = {**inputs, **column_inputs(appended, lambda: self.gates)}
            capture = capture_activations(modules, batch, own)
            recurrent = self._recurrent.hooks(batch)
            with (
                self.attention,
                self.layer_runner.matrices(batch.num_tokens),
                self._recall_hooks(batch, mode),
                capture,
                recurrent.installed(),
                self.layer_runner.layers(batch.num_tokens),
            ):
                yield batch
            batch.finish(recurrent.states())
            if any(segment.cache.cache_spec.corrects for segment in appended):
                from larder.models.recompute_hooks import advance_corrected

                advance_corrected(segments)
        except BaseException:
            batch.roll_back()
            raise

    @contextmanager
    def _recall_hooks(self, batch: ForwardBatch, mode: Mode) -> Iterator[None]:
        """Context that recomputes rejected entries and fetches pages ahead, where caches do."""
        segments = batch.segments
        with ExitStack() as stack:
            if any(segment.cache.cache_spec.reads_again for segment in segments):
                from larder.models.recompute_hooks import RecomputeHooks

                made = (lambda: self.recompute), (lambda: self.shape)
                hooks = RecomputeHooks(*made, segments, mode, batch)
                stack.enter_context(hooks.installed())
            if mode is Mode.APPEND and all(segment.cache.tiers for segment in segments):
                from larder.models.prefetch import LayerPrefetch

                prefetch = LayerPrefetch(self.attentions, segments, batch)
                stack.enter_context(prefetch.installed())
            yield

    def check(self, segments: Sequence[BatchSegment]) -> None:
        """Check a batch before it changes anything.

        Raises:
            ModelError: others have changed the model.
            CacheError: a cache was made for another model.
            InputError: there are no tokens, or some that the model does not read.
        """
        check_unchanged(self.module, self.spec)
        if any(segment.cache.spec.fingerprint != self.spec.fingerprint for segment in segments):
            raise CacheError(
                f"The cache was made for another model than the {type(self.module).__name__} that "
                "is to continue it: read the text again with this one."
            )
        ids = [token for each in segments for token in (*each.reread_ids, *each.ids)]
        if not ids:
            raise InputError("The text has no tokens: give at least one.")
        wrong = [token for token in (min(ids), max(ids)) if not 0 <= token < self.vocab_size]
        if wrong:
            raise InputError(
                f"Token id {wrong[0]} is outside the model's vocabulary of {self.vocab_size}: "
                "use the tokenizer that came with the model."
            )
        length = max(
            (1 + position for each in segments for position in each.positions()), default=0
        )
        if self._rope_limit is not None and length > self._rope_limit:
            raise InputError(
                f"The text reaches {length} tokens, but the RoPE frequencies of the model change "
                f"behind {self._rope_limit} (longrope), which would invalidate cached keys: keep "
                "texts and answers below it, or choose a model with one set of frequencies."
            )


@dataclass(frozen=True)
class AppendCall:
    """Call of a model's body that appends a forward batch.

    Args:
        arguments: keyword arguments of the call.
    """

    batch: ForwardBatch
    arguments: dict[str, Any]

    def parts_of(self, hidden: Float[Tensor, "1 N hidden"]) -> list[Float[Tensor, "_ hidden"]]:
        """Last hidden states of the new tokens, by segment."""
        device = self.batch.segments[0].cache.spec.device
        parts = new_hidden(self.batch.segments, hidden[0].to(device))
        _save_tails(self.batch.segments, parts)
        return parts


def _with_earlier_tokens(segments: Sequence[BatchSegment], mode: Mode) -> list[BatchSegment]:
    """Segments extended by the tokens of their caches that are read again."""
    if not any(segment.cache.cache_spec.reads_again for segment in segments):
        return list(segments)
    from larder.models.recompute_hooks import with_corrected_tokens, with_reread_tokens

    return [with_reread_tokens(with_corrected_tokens(each, mode), mode) for each in segments]


def _save_tails(
    segments: Sequence[BatchSegment], parts: Sequence[Float[Tensor, "_ hidden"]]
) -> None:
    """Save the last hidden state in caches with columns of logits."""
    for segment, part in zip(segments, parts, strict=True):
        if _keeps_tail(segment):
            segment.cache.latest.tail = part[-1].clone()


def _keeps_tail(segment: BatchSegment) -> bool:
    """True if the cache has a column of numbers that are made of logits."""
    return bool(column_providers(segment.cache.cache_spec.ledger.columns, TokenProvider))
