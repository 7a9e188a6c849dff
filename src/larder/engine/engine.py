"""Engine: a loaded model under a policy, the entry point of the Python API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torch import nn

from larder.core.arguments import check_count, check_type, checked_call
from larder.core.progress import Progress
from larder.engine.answer import (
    Answer,
    AnswerGenerator,
    AnswerOptions,
    QuestionAnswerer,
    answer_matchers,
    checked_questions,
    stop_ids,
)
from larder.engine.detokenizer import discard_text, stop_strings
from larder.engine.progress_bar import generation_progress, progress_or_bar
from larder.engine.runtime import engine_runtime
from larder.engine.sampler import SamplingKeywords, SamplingParams, params_of
from larder.models.loader import SEED, LoadedModel, load
from larder.models.placement import DeviceMap
from larder.session.conversation_prefill import prefill_conversation
from larder.session.default_policy import (
    TextKind,
    beyond_budget_by_kind,
    policy_for_kind,
    text_kind,
)
from larder.session.files import ConversationLike, conversation_of
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy, parsed_policy
from larder.session.prefill import SizeOptions, encoded_prompts
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

if TYPE_CHECKING:
    from larder.engine.completion import Completion, PromptCompleter
    from larder.engine.constraint import ConstraintCompiler, SchemaLike
    from larder.prefill.contexts import ChunkSource


class Engine:
    """Model under a policy: reads conversations and answers questions about them.

    Not thread-safe. Memories of one engine may be asked in any order. Several engines may share a
    model.

    Args:
        model: a causal language model of transformers in eval mode, also quantized, or a peft model
            around one. Its weights are not copied, and its own `generate` and `forward` stay what
            they were. Or a `LoadedModel` from `larder.models.loader.load`.
        tokenizer: the fast tokenizer of `model`; None for a `LoadedModel`, which has its own.
        processor: processor of a model with a vision tower, whose tokenizer is the default of
            `tokenizer`; None for that of a `LoadedModel`, or without images.
        policy: name of a preset, spelling of parts, or a `Policy`; None takes
            `larder.default_policy` of what is read: for a text `larder` if the model has
            calibrated transforms, else `kvzip`; `epicache_pooled` for messages, `cacheblend` for
            contexts without a budget, `snapkv` for prompts of `generate` and `stream`;
            `engine.policy` is then that of messages, `memory.policy` what acted.
        budget: budget of each cache (episodes have one cache each): 512 (tokens per kv head,
            averaged over layers), `"20%"`, `"1/5"` or 0.2 of the context, `"64MiB"`; None takes
            that of the policy, else 20%.
        block: tokens read between two plans; None takes that of the policy, else the smaller
            of 512 and the budget.
        progress: receives the steps of verification that are done, and all.

    Raises:
        BadParameter: the tokenizer is missing or has the vocabulary of another model.
        ModelError: the model is not a decoder, or uses a feature that Larder does not support.
        LarderError: the policy does not parse, or an argument has a wrong type or is not a size.

    Examples:
        >>> engine = Engine(model, tokenizer, policy="kvzip", budget="25%")
        >>> memory = engine.read(text)
        >>> answer = engine.ask(memory, "What does it say?", max_new_tokens=8)
    """

    @checked_call
    def __init__(
        self,
        model: nn.Module | LoadedModel,
        tokenizer: Any = None,
        *,
        policy: str | Policy | None = None,
        budget: str | int | float | None = None,
        block: int | None = None,
        processor: Any = None,
        progress: Progress | None = None,
    ) -> None:
        parsed = None if policy is None else parsed_policy(policy)
        self.sizes = SizeOptions(budget, block)
        if isinstance(model, LoadedModel) and tokenizer is None:
            self.loaded = model
        else:
            from larder.models.in_memory import verified_model

            stage = partial(progress_or_bar, progress)
            self.loaded = verified_model(model, tokenizer, processor, stage)
        self.processor = self.loaded.processor if processor is None else processor
        self.policy_for = partial(policy_for_kind, parsed, self.loaded.decoder.spec)
        self.policy = self.policy_for(TextKind.CONVERSATION)
        self._has_default = policy is None
        self.tokenizer = TokenizerAdapter(self.loaded.tokenizer)
        self.runtime = engine_runtime(self.loaded.decoder, self.tokenizer)

    def __repr__(self) -> str:
        policy = "by what is read" if self._has_default else self.policy.short
        return f"Engine({self.loaded}, policy={policy!r}, budget={self.sizes.budget!r})"

    @classmethod
    @checked_call
    def load(
        cls,
        model: str = SEED,
        *,
        policy: str | Policy | None = None,
        budget: str | int | float | None = None,
        block: int | None = None,
        device: str = "cpu",
        dtype: str | torch.dtype | None = None,
        adapter: str | None = None,
        adapter_mode: str = "merged",
        revision: str | None = None,
        device_map: DeviceMap | None = None,
        tokenizer: Any = None,
        processor: Any = None,
        pages: str = "auto",
        progress: Progress | None = None,
    ) -> Engine:
        """Load a model under a policy; the bundled model is the default.

        Args:
            model: `"seed"` for the bundled model, a name that `larder model list` prints, a
                Hugging Face name such as `"Qwen/Qwen3-0.6B"`, a folder that transformers saved, or
                a `.gguf` file. A model in memory goes to `Engine(model, tokenizer)`.
            policy: name of a preset such as `"kvzip"`, a spelling of parts, or a `Policy`;
                `larder policy list` prints them. `"full"` keeps everything. None chooses by what is
                read, as for `Engine`.
            budget: budget of each cache: 512 (tokens per kv head, averaged over layers), `"20%"`,
                `"1/5"` or 0.2 of the context, `"64MiB"`; None takes that of the policy, else 20%.
            block: tokens read between two plans; None takes that of the policy, else the smaller
                of 512 and the budget.
            device: torch device of weights and caches, such as `"cpu"` or `"cuda:0"`.
            dtype: `"float32"`, `"bfloat16"` or `"float16"`, or the torch dtype; `"auto"` for that
                of the saved weights. None is that of the saved weights with `device_map`, and
                `"bfloat16"` on accelerators and on CPUs that multiply weights saved so in hardware;
                else `"float32"`.
            adapter: folder with an adapter of weights that peft saved, such as LoRA.
            adapter_mode: `"merged"` into the weights, or `"live"` beside them.
            revision: commit, branch or tag of a Hugging Face name; None for its main branch.
            device_map: placement of the weights by accelerate in place of `device`: `"auto"`, a
                device, or devices by parts of the model. Each layer's cache is on the device that
                computes the layer; parts that do not fit may lie on `"cpu"` or `"disk"`.
            tokenizer: a tokenizer of transformers, its name or folder; None for the model's own.
            processor: a processor of transformers, its name or folder, for a model with a vision
                tower (extra `larder[vision]`); None for the model's own, which is loaded with the
                first images.
            pages: `"on"` to hold caches in pages of one arena, `"off"` not to, `"auto"` for pages
                on CUDA; `larder.models.describe_steps` tells how steps then run.
            progress: receives done and total of each stage (bytes downloaded, tensors converted
                and loaded, layers merged, steps of verification); None shows a bar for each on a
                terminal once two seconds have passed.

        Returns:
            Engine with the verified model: its logits through Larder's attention equal its own.

        Raises:
            LarderError: the model cannot be loaded or is not supported, the policy does not parse,
                or an argument has a wrong type or is not a size.

        Examples:
            >>> engine = Engine.load("smollm2", policy="kvzip", budget="25%")
        """
        chosen = None if policy is None else parsed_policy(policy)
        SizeOptions(budget, block)  # validated before a model is loaded
        loaded = load(
            model,
            device=device,
            dtype=dtype,
            adapter=adapter,
            adapter_mode=adapter_mode,
            revision=revision,
            device_map=device_map,
            tokenizer=tokenizer,
            processor=processor,
            pages=pages,
            stage=partial(progress_or_bar, progress),
        )
        return cls(loaded, policy=chosen, budget=budget, block=block)

    @checked_call
    def under(
        self,
        policy: str | Policy | None,
        budget: str | int | float | None = None,
        block: int | None = None,
    ) -> Engine:
        """Engine with the same model and loaded embedders under another policy.

        Args:
            policy: as for `Engine`.
            budget: as for `Engine`; None takes that of the policy, not that of this engine.
            block: as for `Engine`.

        Returns:
            New engine; this one is unchanged.

        Raises:
            LarderError: the policy does not parse, or an argument has a wrong type.

        Examples:
            >>> other = engine.under("streaming_llm", 64)
        """
        engine = Engine(self.loaded, policy=policy, budget=budget, block=block)
        engine.runtime, engine.processor = self.runtime, self.processor
        return engine

    @checked_call
    def read(
        self,
        conversation: ConversationLike | None = None,
        prompts: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        *,
        contexts: Sequence[str] | None = None,
        chunks: ChunkSource | None = None,
    ) -> ConversationMemory:
        """Prefill a conversation, a document or several contexts within the budget.

        Args:
            conversation: result of `read_conversation`; a text, taken as a document; or messages in
                the format of chat APIs, `[{"role": "user", "content": "..."}, ...]`.
            prompts: prompt texts by name, for policies that score with them: `question`, or any
                name in `patched(prompt="...")`.
            progress: receives the number of tokens read and the number of tokens to read; None
                shows a bar on a terminal once two seconds have passed.
            contexts: texts to read in place of a conversation, one behind the other. Policies such
                as `cacheblend` and `ape` read each apart and reuse those that `chunks` has.
            chunks: contexts that were read before, such as a `ChunkMemory`; None for none.

        Returns:
            Memory for `ask`: the caches, their sizes as `figures`, and the sized `policy`.

        Raises:
            InputError: the conversation is empty, or a message is malformed.
            LarderError: sizes contradict each other, or an argument has a wrong type.

        Examples:
            >>> memory = engine.read([{"role": "user", "content": "My cat is called Minka."}])
            >>> memory.conversation.messages[0].role
            'user'
        """
        encoded = encoded_prompts(self.tokenizer, prompts)
        source = conversation_of(conversation, contexts)
        policy = self.policy_for(text_kind(source, self.sizes.budget is not None))
        with progress_or_bar(progress, "Reading", "tokens") as report:
            return prefill_conversation(
                self.runtime, source, policy, self.sizes, encoded, report, chunks
            )

    @overload
    def ask(
        self,
        memory: ConversationMemory,
        question: str,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        on_text: Callable[[str], None] = discard_text,
        schema: SchemaLike | None = None,
        progress: Progress | None = None,
    ) -> Answer: ...

    @overload
    def ask(
        self,
        memory: ConversationMemory,
        question: Sequence[str],
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        on_text: Callable[[str], None] = discard_text,
        schema: SchemaLike | None = None,
        progress: Progress | None = None,
    ) -> list[Answer]: ...

    @checked_call
    def ask(
        self,
        memory: ConversationMemory,
        question: str | Sequence[str],
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        on_text: Callable[[str], None] = discard_text,
        schema: SchemaLike | None = None,
        progress: Progress | None = None,
    ) -> Answer | list[Answer]:
        """Answer one or several questions about a prefilled conversation; the memory is unchanged.

        Capacity reserved for an answer is released, so a memory does not grow when asked. The
        answering cache holds at most budget + block meanwhile; where question and answer are longer
        than a block, a copy preserves it.

        Args:
            memory: what `read` returned, of an engine with the same model.
            question: one question, or a list of questions that are answered independently.
            sampling: sampling parameters; None takes the most likely token at every step.
            max_new_tokens: most tokens of an answer.
            stop: string that ends an answer, or several; it is not part of the answer.
            on_text: receives the text of an answer as it is generated.
            schema: JSON schema, or class of a pydantic model, that each answer matches (extra
                `larder[structured]`); None for any text. A cut answer is not repaired.
            progress: receives the number of tokens generated and the most to generate; None shows a
                bar on a terminal once two seconds have passed, unless `on_text` shows the text.

        Returns:
            One answer to one question; a list of answers, in order, to a list.

        Raises:
            InputError: a question is blank, or takes more tokens than the budget holds.
            LarderError: an argument has a wrong type or is out of range; the schema cannot be
                enforced, or llguidance is not installed.

        Examples:
            >>> first, second = engine.ask(memory, ["Who?", "Where?"], max_new_tokens=8)
        """
        check_type("memory", memory, ConversationMemory, "what engine.read(text) returned")
        check_count("max_new_tokens", max_new_tokens)
        questions = checked_questions(question)
        chosen = sampling or SamplingParams()
        check_type("sampling", chosen, SamplingParams, "a SamplingParams")
        answerer = QuestionAnswerer(self.runtime, self.answer_generator, memory)
        ends, matcher = stop_strings(stop), answer_matchers(schema, lambda: self.constraints)
        with generation_progress(progress, on_text) as report:
            options = AnswerOptions(chosen, max_new_tokens, ends, on_text, matcher, report)
            answers = answerer.answer_each(questions, options)
        return answers[0] if isinstance(question, str) else answers

    @overload
    def generate(
        self,
        prompts: str,
        *,
        images: Sequence[Any] | None = None,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        progress: Progress | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str],
        *,
        images: Sequence[Sequence[Any]] | None = None,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        progress: Progress | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        images: Sequence[Any] | None = None,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        progress: Progress | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Completion | list[Completion]:
        """Continue one or several prompts, each under the policy with a budget of its own.

        Prompts are read one after the other; the steps of generation run for all together, and
        each prompt gives what it would give alone. Under the policy `full` the greedy tokens are
        those of transformers' `generate`. Generated text counts into the budget. Under a policy
        with episodes the end of a prompt chooses the episode.

        Args:
            prompts: one text, or a list of texts, as the model shall read them; special tokens are
                added as by the tokenizer. For a chat template give
                `tokenizer.apply_chat_template(messages, tokenize=False,
                add_generation_prompt=True)`, or use `Chat`.
            images: PIL images of the prompt, in the order of its image tokens; for several
                prompts, a list for each. The engine needs a `processor`.
            max_new_tokens: most tokens to generate for a prompt.
            stop: string that ends the text, or several; it is not part of the text.
            progress: receives prompt tokens read and to read, then tokens generated and the most
                to generate; None shows a bar for each on a terminal once two seconds have passed.
            sampling: keywords of `SamplingParams` (`temperature`, `top_k`, `top_p`, `min_p`,
                `seed`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`,
                `logit_bias`), the same for every prompt; any other is refused with the nearest
                name.

        Returns:
            One `Completion` for one prompt; a list, in order, for a list.

        Raises:
            UnknownName: an unknown keyword; the message names the nearest.
            BadParameter: a keyword has a wrong type or is out of range.
            InputError: a prompt has no tokens.

        Examples:
            >>> one, two = engine.generate(["One,", "Two,"], temperature=0.7, max_new_tokens=8)
        """
        from larder.engine.completion import CompletionOptions

        options = CompletionOptions(params_of(sampling), max_new_tokens, stop)
        return self._completer.complete_given(prompts, options, progress, images)

    def stream(
        self,
        prompt: str,
        *,
        images: Sequence[Any] | None = None,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        progress: Progress | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Iterator[str]:
        """Continue a prompt as `generate` does, and yield the text in parts as it is generated.

        The model may be used in other ways between two parts.

        Args:
            prompt: one text; lists go to `generate`.
            images: as for `generate`.
            max_new_tokens: as for `generate`.
            stop: as for `generate`.
            progress: receives prompt tokens read and to read; None shows a bar as for `generate`.
            sampling: as for `generate`.

        Returns:
            Iterator over parts of the text, which joined are that of `generate`.

        Raises:
            LarderError: as for `generate`; what reading the prompt raises comes with the first
                part.

        Examples:
            >>> for text in engine.stream("Once upon a time", max_new_tokens=8):
            ...     print(text, end="", flush=True)
        """
        from larder.engine.completion import CompletionOptions

        options = CompletionOptions(params_of(sampling), max_new_tokens, stop)
        check_type("prompt", prompt, str, "one prompt as a string (generate takes lists)")
        given = None if images is None else [images]
        return self._completer.stream(prompt, options, progress, given)

    @property
    def beyond_budget(self) -> tuple[str, ...]:
        """Exceptions from the budget bound, a clause each; under default policies a clause names
        the kinds of texts that it holds for."""
        return beyond_budget_by_kind(self.policy_for, self.loaded.decoder.spec)

    @cached_property
    def answer_generator(self) -> AnswerGenerator:
        """Text generation over one cache."""
        return AnswerGenerator(self.loaded.decoder, self.tokenizer, self.stop_ids)

    @cached_property
    def constraints(self) -> ConstraintCompiler:
        """Compiled schemas, patterns and grammars of this model's tokenizer."""
        from larder.engine.constraint import ConstraintCompiler

        decoder, tokenizer = self.loaded.decoder, self.loaded.tokenizer
        return ConstraintCompiler(tokenizer, decoder.vocab_size, self.stop_ids)

    @property
    def _completer(self) -> PromptCompleter:
        from larder.engine.completion import PromptCompleter

        policy = self.policy_for(TextKind.PROMPT)
        return PromptCompleter(self.runtime, policy, self.sizes, self.stop_ids, self.processor)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a turn."""
        return stop_ids(self.loaded)
