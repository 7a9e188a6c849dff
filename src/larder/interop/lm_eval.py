"""Model `larder` of lm-eval: tasks over contexts that are cached under a policy.

lm-eval finds it by the entry point group `lm_eval.models`. Releases that read no entry points, up
to 0.4.13, find it where this module was imported; `python -m larder.interop.lm_eval` is the command
`lm_eval` with the model in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from larder.core.arguments import check_count
from larder.core.errors import BudgetError, InputError, UsageError
from larder.engine.completion import EncodedPrompt, PromptCompleter
from larder.engine.engine import Engine
from larder.engine.log_likelihood import ContinuationRequest, Ids, LikelihoodScorer, TokenScore
from larder.interop.lm_eval_arguments import (
    GenerationOptions,
    batch_size_of,
    check_arguments,
    engine_of,
)
from larder.prefill.memory import PeakMemoryMeter
from larder.session.capacity import resolve_budget
from larder.session.policy import Policy
from larder.session.prefill import prefill_reader

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore
    from lm_eval.api.registry import register_model  # pyright: ignore
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"The model larder of lm-eval needs the package {error.name}, which is not installed: run "
        '`pip install "larder[lm-eval]"`.',
        name=error.name,
    ) from error

logger = logging.getLogger(__name__)

# Strings of a request (None for a part of a text), and tokens of its context and continuation.
EncodedRequest = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("larder")
class LarderLM(TemplateLM):
    """Language model of lm-eval whose contexts are cached under a policy.

    The context of a request is read under policy and budget, all tokens but the last. The last one
    and the continuation are read behind what the policy kept, and scored; or text is generated
    there, under the timing of the policy. Requests with the same context share one reading. In
    `loglikelihood_rolling` each block of a text is scored behind the cache of the text before it.
    Under the policy `full` log-likelihoods are those of lm-eval's model `hf`.

    Args:
        pretrained: name of a model as for `Engine.load`, or a model of transformers in eval mode.
        policy: name of a preset such as `"kvzip"`, or a spelling of parts; `"full"` keeps all.
        budget: budget of each context: 512 (tokens per kv head, averaged over layers), 0.25 or
            `"25%"` of the context, `"64MiB"`; None takes that of the policy, else 20%, at least 128
            tokens.
        min_budget: tokens that a context gets at least where `budget` is a share: no shorter one
            is evicted from.
        block: tokens read between two plans; None takes that of the policy.
        tokenizer: tokenizer of `pretrained`, or its name; None for the model's own.
        device: torch device; None for the first GPU. Without a GPU, None and `"cuda"` (lm-eval's
            default) are the CPU.
        dtype: as for `Engine.load`.
        revision: commit, branch or tag of a name on the Hugging Face hub.
        adapter: folder with an adapter of weights that peft saved.
        max_length: most tokens of context and continuation, which are cut on the left; None for
            the positions of the model.
        max_gen_toks: tokens to generate where a task does not say.
        add_bos_token: whether special tokens are added to texts; None adds what the tokenizer adds.
        prefix_token_id: token before a text without context; None for the tokenizer's first token,
            else its end token.
        batch_size: contexts whose continuations are scored in one pass, or prompts that are
            continued together; `"auto"` for 8. It changes no score.

    Raises:
        UsageError: an argument is unknown or missing, or has a value that it cannot have.
        ModelError: the model cannot be loaded, or is not supported.

    Examples:
        >>> lm = LarderLM("smollm2", policy="kvzip", budget=0.25, min_budget=64)
        >>> lm_eval.simple_evaluate(lm, tasks=["piqa"])
    """

    def __init__(
        self,
        pretrained: Any = None,
        policy: str | Policy | None = None,
        budget: str | int | float | None = None,
        *,
        min_budget: int = 1,
        block: int | None = None,
        tokenizer: Any = None,
        device: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        adapter: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **unknown: object,
    ) -> None:
        del max_batch_size  # what fits is not searched for
        super().__init__()
        check_arguments(pretrained, policy, unknown)
        for name, value in (("min_budget", min_budget), ("max_gen_toks", max_gen_toks)):
            check_count(name, value)
        self.batch_size = batch_size_of(batch_size)
        loading = {"dtype": dtype, "revision": revision, "adapter": adapter, "tokenizer": tokenizer}
        sizes = {"policy": policy, "budget": budget, "block": block}
        self._engine = engine_of(pretrained, device, loading, sizes)
        self._smallest = self._engine.under(self._engine.policy, min_budget, block)
        self._min_budget = min_budget
        self._device = self._engine.loaded.decoder.spec.device
        self.tokenizer = self._engine.loaded.tokenizer
        config = self._engine.loaded.decoder.module.config.get_text_config()
        self.max_length = max_length or int(config.max_position_embeddings)
        check_count("max_length", self.max_length)
        self.max_gen_toks = max_gen_toks
        self._add_bos_token, self._prefix_token_id = add_bos_token, prefix_token_id
        self._num_contexts, self._kv_bytes, self._full_kv_bytes = 0, 0, 0
        self._budget_of(self.max_length)  # a budget that contradicts the policy is refused here

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context.

        Raises:
            UsageError: the tokenizer has none.
        """
        known = (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        for token in known:
            if token is not None:
                return token
        raise UsageError(
            "The tokenizer has neither a first nor an end token to put before a text: give "
            "prefix_token_id."
        )

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for lm-eval's cache of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Token ids of a text, with special tokens unless it begins with one."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode(self.prefix_token_id)
            is_marked = bool(prefix) and string.startswith(prefix)
            add_special_tokens = not is_marked and self._add_bos_token is not False
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens, verbose=False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages in the chat template of the tokenizer."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def get_model_info(self) -> dict[str, object]:
        """Model, policy, and bytes of the caches so far, for the results of lm-eval."""
        decoder, sizes = self._engine.loaded.decoder, self._engine.sizes
        return {
            "model_num_parameters": decoder.module.num_parameters(),
            "model_dtype": str(decoder.spec.dtype),
            "larder_policy": str(self._engine.policy),
            "larder_budget": sizes.budget,
            "larder_min_budget": self._min_budget,
            "larder_block": sizes.block,
            "larder_contexts": self._num_contexts,
            "larder_kv_bytes": self._kv_bytes,
            "larder_full_kv_bytes": self._full_kv_bytes,
        }

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of each text, in windows of `max_length` tokens as lm-eval's own."""
        texts = [request.args[0] for request in requests]
        windows = [list(self._windows(text)) for text in texts]
        self._check_shortest([len(ids) for window in windows for ids, _ in window])
        totals = list[float]()
        shown = tqdm(texts, desc="larder: texts", disable=disable_tqdm)
        for text, window in zip(shown, windows, strict=True):
            total = sum((self._score_window(ids, num_scored) for ids, num_scored in window), 0.0)
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations of prompts by `Engine`, up to a stop string.

        Raises:
            UsageError: an argument of generation is unknown.
        """
        texts = dict[int, str]()
        by_options = dict[GenerationOptions, list[int]]()
        for number, request in enumerate(requests):
            options = GenerationOptions.of(request.args[1], self.max_gen_toks)
            by_options.setdefault(options, []).append(number)
        with tqdm(total=len(requests), desc="larder: prompts", disable=disable_tqdm) as bar:
            for options, numbers in by_options.items():
                prompts = {n: self._prompt(requests[n].args[0], options) for n in numbers}
                self._check_shortest([len(prompt.ids) for prompt in prompts.values()])
                size = 1 if options.temperature else self.batch_size
                for engine, batch in self._batches(prompts, lambda one: len(one.ids), size):
                    for number, text in self._generate(engine, prompts, batch, options):
                        texts[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(len(batch))
        return [texts[number] for number in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: Sequence[EncodedRequest], disable_tqdm: bool = False, **kwargs: object
    ) -> list[tuple[float, bool]]:
        by_context = dict[Ids, list[tuple[int, Ids]]]()
        for number, (_, context, continuation) in enumerate(requests):
            kept = self._truncated(context, continuation)
            by_context.setdefault(kept, []).append((number, tuple(continuation)))
        self._check_shortest([len(context) for context in by_context])
        scores = dict[int, TokenScore]()
        with tqdm(total=len(requests), desc="larder: requests", disable=disable_tqdm) as bar:
            for engine, batch in self._batches({c: c for c in by_context}, len, self.batch_size):
                asked = [
                    ContinuationRequest(context, tuple(tokens for _, tokens in by_context[context]))
                    for context in batch
                ]
                scorer = LikelihoodScorer(engine.runtime, engine.policy, engine.sizes)
                for context, scored in zip(batch, scorer.score_continuations(asked), strict=True):
                    self._count(scored.kv_bytes, scored.full_kv_bytes)
                    for (number, _), score in zip(by_context[context], scored.scores, strict=True):
                        scores[number] = score
                        self._report(requests[number][0], score)
                    bar.update(len(by_context[context]))
        return [
            (scores[number].log_likelihood, scores[number].is_greedy)
            for number in range(len(requests))
        ]

    def _report(self, strings: tuple[str, str] | None, score: TokenScore) -> None:
        """Hand a score to lm-eval's cache of responses."""
        if strings is not None:
            answer = (score.log_likelihood, score.is_greedy)
            self.cache_hook.add_partial("loglikelihood", strings, answer)

    def _truncated(self, context: Sequence[int], continuation: Sequence[int]) -> Ids:
        """Context, without the first tokens that do not fit beside the continuation."""
        if len(continuation) > self.max_length:
            raise InputError(
                f"A continuation has {len(continuation)} tokens, more than max_length "
                f"{self.max_length}: raise max_length, or score the text by loglikelihood_rolling."
            )
        room = self.max_length + 1 - len(continuation)
        if len(context) > room:
            logger.warning(
                "A context of %d tokens is cut to its last %d, because max_length is %d.",
                len(context),
                room,
                self.max_length,
            )
        return tuple(context[-room:])

    def _windows(self, text: str) -> Iterator[tuple[Ids, int]]:
        """Windows of a text: tokens, and how many of the last ones are scored."""
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        for context, continuation in map(make_disjoint_window, windows):
            yield (*context, *continuation), len(continuation)

    def _score_window(self, ids: Ids, num_scored: int) -> float:
        engine = self._engine_of(len(ids))
        scorer = LikelihoodScorer(engine.runtime, engine.policy, engine.sizes)
        scored = scorer.score_text(ids, num_scored)
        self._count(scored.kv_bytes, scored.full_kv_bytes)
        return scored.scores[0].log_likelihood

    def _prompt(self, text: str, options: GenerationOptions) -> EncodedPrompt:
        """Prompt, without the first tokens that do not fit beside the generated ones."""
        room = self.max_length - options.max_gen_toks
        if room < 1:
            raise UsageError(
                f"A task generates {options.max_gen_toks} tokens, which leaves no room for a "
                f"prompt in max_length {self.max_length}: raise max_length, or lower max_gen_toks."
            )
        ids = self.tok_encode(text)
        if len(ids) > room:
            logger.warning("A prompt of %d tokens is cut to its last %d.", len(ids), room)
        if not ids:
            raise InputError("A prompt has no tokens: give it at least one character.")
        return EncodedPrompt(text, tuple(ids[-room:]))

    def _generate(
        self,
        engine: Engine,
        prompts: Mapping[int, EncodedPrompt],
        batch: Sequence[int],
        options: GenerationOptions,
    ) -> Iterator[tuple[int, str]]:
        """Texts of a batch of prompts, with their numbers; a sampled one has its number as seed."""
        completer = PromptCompleter(engine.runtime, engine.policy, engine.sizes, engine.stop_ids)
        completions = completer.complete_encoded(
            [prompts[number] for number in batch], options.for_engine(seed=batch[0])
        )
        for number, completion in zip(batch, completions, strict=True):
            self._count(completion.kv_bytes, completion.full_kv_bytes)
            text = self.tokenizer.decode(list(completion.ids), skip_special_tokens=True)
            for stop in options.until:
                text = text.split(stop)[0]
            yield number, text

    def _batches(
        self, items: Mapping[Any, Any], length: Callable[[Any], int], size: int
    ) -> Iterator[tuple[Engine, list[Any]]]:
        """Keys of items of similar length, longest first, with the engine that reads them."""
        ordered = sorted(items, key=lambda key: -length(items[key]))
        for engine in (self._engine, self._smallest):
            keys = [key for key in ordered if self._engine_of(length(items[key])) is engine]
            for start in range(0, len(keys), size):
                yield engine, keys[start : start + size]

    def _budget_of(self, tokens: int) -> int:
        """Tokens that the budget is for a context of `tokens` tokens."""
        engine = self._engine
        spec = engine.loaded.decoder.spec
        return resolve_budget(engine.policy, engine.sizes.budget, tokens, spec)

    def _engine_of(self, tokens: int) -> Engine:
        """Engine with the budget of a context of `tokens` tokens."""
        return self._smallest if self._budget_of(tokens) < self._min_budget else self._engine

    def _check_shortest(self, lengths: Sequence[int]) -> None:
        """Check that the budget of the shortest context holds what the policy protects.

        Raises:
            BudgetError: it does not.
        """
        shortest = min(lengths, default=1)
        engine = self._engine_of(shortest)
        tokens = max(self._budget_of(shortest), self._min_budget)
        policy = engine.policy.with_sizes(tokens, engine.sizes.block)
        try:
            prefill_reader(engine.runtime, policy, shortest, PeakMemoryMeter())
        except BudgetError as error:
            raise BudgetError(
                f"The shortest context has {shortest} tokens, so that its budget is {tokens}. "
                f"{error} Or give min_budget, which short contexts then get instead of their share."
            ) from error

    def _count(self, kv_bytes: int, full_kv_bytes: int) -> None:
        self._num_contexts += 1
        self._kv_bytes += kv_bytes
        self._full_kv_bytes += full_kv_bytes


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore

    cli_evaluate()
