"""Any Hugging Face decoder, seen as a thing that reads token rows over caches of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from larder.cache.forms.corrected import CorrectedLayer
from larder.core.errors import InputError, ModelError
from larder.core.ledger import SURPRISE
from larder.core.observation import Need
from larder.core.spec import ModelSpec
from larder.core.types import AppendKind, Mode
from larder.models import attention_backend
from larder.models.attention_backend import PrivateConfigs
from larder.models.forward_batch import BatchSegment, ForwardBatch, Observer
from larder.models.introspection import (
    AttentionSurvey,
    check_attention_kinds,
    fingerprint,
    measure_rotation,
)
from larder.models.kv_cost import ModelShape
from larder.models.lm_head import LMHead, base_model_of
from larder.models.prefetch import CONTEXT_KEYWORD, LayerPrefetch, attention_modules
from larder.models.recompute_hooks import KVProjector, RecomputeHooks, with_reread_tokens

SURVEY_TOKENS = 8


class Decoder:
    """A model on Larder's attention, and what its caches look like.

    While a decoder holds the module, its attention implementation is ours, in a configuration of
    its own: other modules that share the former one are not touched. `release`, or leaving the
    `with` block, puts that back. Nothing else of the model is touched. One thread at a time.

    Args:
        module: a `PreTrainedModel` with a language-model head, in eval mode.

    Raises:
        ModelError: the architecture has no seam, or asks for what cannot be honored; or another
            decoder holds the module.
    """

    def __init__(self, module: Any) -> None:
        attention_backend.register_backend()
        self.module = module
        if module.config._attn_implementation == attention_backend.NAME:
            raise ModelError(
                f"This {type(module).__name__} is held by another decoder: use that one, or give "
                "the model back first with its release()."
            )
        self._configs = PrivateConfigs(module)
        try:
            _switch_attention(module, attention_backend.NAME)
            self.spec = self._survey()
        except BaseException:
            self.release()
            raise

    @property
    def vocab_size(self) -> int:
        """V, the number of token ids that the model's input table knows."""
        return int(self.module.get_input_embeddings().weight.shape[0])

    @cached_property
    def body(self) -> Any:
        """The layers of the model, without its head."""
        return base_model_of(self.module)[1]

    def embedding_table(self) -> Float[Tensor, "V hidden"]:
        """The input embedding table, by reference."""
        return self.module.get_input_embeddings().weight.detach()

    @torch.no_grad()
    def read(
        self,
        rows: Sequence[BatchSegment],
        mode: Mode,
        observer: Observer | None = None,
        needs: frozenset[Need] = frozenset(),
    ) -> None:
        """Pass rows through all layers, without computing logits.

        In probe mode only the first layer is as it would be in earnest: attention answers with
        zeros, so what later layers record follows from no text.

        Args:
            needs: what the observer asks to be told beside queries, keys and values.
        """
        self._hidden(rows, mode, observer, needs)

    @torch.no_grad()
    def weigh(
        self, rows: Sequence[BatchSegment], mode: Mode, observer: Observer | None = None
    ) -> list[Float[Tensor, " _"]]:
        """Read, and tell how surprising each token of each row was: -log p, in nats.

        The first token of a text, and one behind a token whose `tail` the cache no longer has, is
        as surprising as the most surprising one of its row.
        """
        tails = [row.cache.latest.tail for row in rows]
        passed = [part[:-1] for part in self._hidden(rows, mode, observer)]
        return [self._surprises(*each) for each in zip(rows, tails, passed, strict=True)]

    @torch.no_grad()
    def foresee(self, rows: Sequence[BatchSegment]) -> list[Float[Tensor, " _"]]:
        """What `weigh` would tell, before the rows are read; a single token needs no pass."""
        longer = [BatchSegment(row.cache, row.ids[:-1]) for row in rows if len(row.ids) > 1]
        parts = iter(self._hidden(longer, Mode.SCRATCH, None) if longer else ())
        nothing = self.embedding_table().new_empty(0, self.embedding_table().shape[1])
        passed = [next(parts) if len(row.ids) > 1 else nothing for row in rows]
        pairs = zip(rows, passed, strict=True)
        return [self._surprises(row, row.cache.latest.tail, part) for row, part in pairs]

    @torch.no_grad()
    def forward_logits(
        self,
        rows: Sequence[BatchSegment],
        mode: Mode,
        wanted: Sequence[int],
        observer: Observer | None = None,
    ) -> Float[Tensor, "N V"]:
        """Pass rows through and return float32 logits at the wanted places of the packed rows."""
        places = torch.tensor(wanted, device=self.spec.device)
        if mode is Mode.APPEND and any(_tracks_surprise(row) for row in rows):
            return self._head.logits(torch.cat(self._hidden(rows, mode, observer))[places])
        rows = [with_reread_tokens(with_corrected_tokens(row, mode), mode) for row in rows]
        behind = torch.tensor(_new_token_indices(rows), device=self.spec.device)
        out = self._run(self.module, rows, mode, observer, logits_to_keep=behind[places])
        return out.logits[0].float()

    def release(self) -> None:
        """Give the model its own attention back."""
        self._configs.restore()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @cached_property
    def recompute(self) -> KVProjector:
        """What rebuilds keys and values with this model."""
        from larder.models.recompute import KVRecompute  # which looks at decoders

        return KVRecompute(self)

    @cached_property
    def shape(self) -> ModelShape:
        """Its sizes."""
        return ModelShape.of(self.module.config, self.spec)

    @cached_property
    def _head(self) -> LMHead:
        return LMHead(self.module)

    @cached_property
    def _attentions(self) -> dict[int, nn.Module]:
        return attention_modules(self.body)

    def _hidden(
        self,
        rows: Sequence[BatchSegment],
        mode: Mode,
        observer: Observer | None,
        needs: frozenset[Need] = frozenset(),
    ) -> list[Float[Tensor, "_ hidden"]]:
        """What the last layer makes of each row; caches that follow remember the last of theirs."""
        rows = [with_reread_tokens(with_corrected_tokens(row, mode), mode) for row in rows]
        out = self._run(self.body, rows, mode, observer, needs=needs)
        given = out.last_hidden_state[0].split([row.width for row in rows])
        parts = [part[len(row.again) :] for part, row in zip(given, rows, strict=True)]
        if mode is Mode.APPEND:
            for row, part in zip(rows, parts, strict=True):
                if _tracks_surprise(row):
                    row.cache.latest.tail = part[-1].clone()
        return parts

    def _surprises(
        self, row: BatchSegment, tail: Float[Tensor, " _"], passed: Float[Tensor, "_ hidden"]
    ) -> Float[Tensor, " _"]:
        """How surprising the tokens of a row are.

        Args:
            tail: the hidden state before its first token, or nothing.
            passed: those of all its tokens but the last.
        """
        before = torch.cat([tail[None], passed]) if len(tail) else passed
        ids = torch.tensor(row.ids, device=self.spec.device)
        if not len(before):
            return torch.zeros(1, device=ids.device)
        known = self._head.surprises(before, ids[len(ids) - len(before) :])
        return known if len(known) == len(ids) else torch.cat([known.max()[None], known])

    def _run(
        self,
        module: Any,
        rows: Sequence[BatchSegment],
        mode: Mode,
        observer: Observer | None,
        needs: frozenset[Need] = frozenset(),
        **options: Any,
    ) -> Any:
        ids = [token for row in rows for token in (*row.again, *row.ids)]
        self._check(ids)
        journey = ForwardBatch(rows, mode, self.spec.device, observer)
        try:
            given = torch.tensor([ids], device=self.spec.device)
            told = {"position_ids": journey.positions(), "use_cache": False, "larder": journey}
            rebuilds = RecomputeHooks(
                lambda: self.recompute, lambda: self.shape, rows, mode, journey
            )
            stepping = rows if mode is Mode.APPEND else ()
            modules = self._attentions
            watching = HiddenStateHooks(modules, journey, needs)
            with rebuilds.going_on(), LayerPrefetch(modules, stepping, journey), watching:
                out = module(input_ids=given, **told, **options)
            journey.finish()
            if mode is Mode.APPEND:
                advance_corrected(rows)
        except BaseException:
            journey.roll_back()
            raise
        return out

    def _check(self, ids: list[int]) -> None:
        if not ids:
            raise InputError("Nothing to read: the text has no tokens.")
        wrong = [token for token in (min(ids), max(ids)) if not 0 <= token < self.vocab_size]
        if wrong:
            raise InputError(
                f"Token id {wrong[0]} is outside the model's vocabulary of {self.vocab_size}: "
                "use the tokenizer that came with the model."
            )

    @torch.no_grad()
    def _survey(self) -> ModelSpec:
        table = self.embedding_table()
        survey, count = AttentionSurvey(), min(SURVEY_TOKENS, table.shape[0])
        places = torch.arange(count, device=table.device)[None]
        self.body(input_ids=places, position_ids=places, use_cache=False, larder=survey)
        config = self.module.config.get_text_config()
        expected = config.num_hidden_layers
        if set(survey.layers) != set(range(expected)):
            raise ModelError(
                f"{type(self.module).__name__} has {expected} layers, but only "
                f"{sorted(survey.layers)} call attention through the public interface: Larder "
                "cannot manage a model without that seam in every layer."
            )
        layers = tuple(survey.layers[index] for index in range(expected))
        check_attention_kinds(self.module.config, layers)
        layers = measure_rotation(self.body, layers)
        told = fingerprint(self.module), config.hidden_size
        return ModelSpec(layers, table.dtype, table.device, *told)


def _new_token_indices(rows: Sequence[BatchSegment]) -> list[int]:
    """Where among all that the model is given the tokens stand that are not read again."""
    places, start = list[int](), 0
    for row in rows:
        places += range(start + len(row.again), start + row.width)
        start += row.width
    return places


def _tracks_surprise(row: BatchSegment) -> bool:
    """Whether a cache is asked to remember how surprising its tokens were."""
    return SURPRISE in row.cache.cache_spec.ledger.columns


def _switch_attention(module: Any, name: str) -> None:
    """Set the attention implementation, and make sure that it took."""
    if not _supports_backend(type(module)):
        raise ModelError(
            f"{type(module).__name__} does not use transformers' AttentionInterface, so Larder has "
            "no seam to manage its cache: take an architecture that does (Llama, Qwen, Mistral, "
            "Phi3, Gemma3, ...)."
        )
    module.set_attn_implementation(name)
    if module.config._attn_implementation != name:
        raise ModelError(f"{type(module).__name__} refused the attention implementation {name!r}.")


def _supports_backend(kind: type) -> bool:
    """Whether the class declares that it dispatches attention through the public interface."""
    return bool(kind._supports_attention_backend)  # pyright: ignore


def with_corrected_tokens(row: BatchSegment, mode: Mode) -> BatchSegment:
    """The row, with the tokens before it that it corrects; as it is where there are none."""
    stores = _corrected_stores(row)
    if (
        not stores
        or mode is not Mode.APPEND
        or len(row.ids) > 1
        or row.coming is not AppendKind.STEP
    ):
        return row
    ids = stores[0].ids
    return replace(row, again=ids, reread_start=row.cache.next_position - len(ids))


def advance_corrected(rows: Sequence[BatchSegment]) -> None:
    """Have caches know what was read last, once a pass that appends is over."""
    for row in rows:
        for store in _corrected_stores(row):
            store.record_ids(row.ids)


def _corrected_stores(row: BatchSegment) -> list[CorrectedLayer]:
    return [store for store in row.cache.stores if isinstance(store, CorrectedLayer)]


class HiddenStateHooks:
    """Tells one pass the hidden states that each layer starts from, while the `with` block lasts.

    The hooks are removed with it; where nobody asks there are none.

    Args:
        modules: attention modules by layer.
        journey: the pass, as it comes down the model's call.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], journey: ForwardBatch, needs: frozenset[Need]
    ) -> None:
        self._modules = modules.values() if Need.STATES in needs else ()
        self._journey = journey
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._tell, with_kwargs=True))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _tell(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        del module
        if named.get(CONTEXT_KEYWORD) is self._journey:
            self._journey.states = (args[0] if args else named["hidden_states"])[0]
