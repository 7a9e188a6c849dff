"""Training of the tokenizer: byte-level byte-pair encoding with every digit a token of its own.

    python -m training.tokenizer CORPUS OUT [--size small]

CORPUS holds `prose.jsonl.xz` and `sgd_train.jsonl.xz`. OUT becomes a Hugging Face tokenizer folder
with the chat template.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import parse_task
from training.model_config import LONGEST, SPECIAL, VOCABULARY

LOGS, LOG_TOKENS = 1500, 1200
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="small", choices=VOCABULARY)
    options = parser.parse_args()
    sources = TaskSources(_words, corpus=options.corpus, split="train")
    folder(trained(texts(sources), VOCABULARY[options.size])).save_pretrained(options.out)


def texts(sources: TaskSources, logs: int = LOGS) -> Iterator[str]:
    """Texts that the vocabulary is trained on: dialogues, prose, and the words of the tasks."""
    for dialogue in sources.dialogues:
        yield from (message.content for message in dialogue.messages)
    yield from sources.prose
    for seed in range(logs):
        for name in ("lifelog(questions=8)", "recite()", "ledger()"):
            conversation = parse_task(name).make(seed, LOG_TOKENS, sources)
            yield from (message.content for message in conversation.messages)
            for question in conversation.questions:
                yield from (question.question, question.answer)


def trained(lines: Iterator[str], vocabulary: int) -> Tokenizer:
    """Tokenizer with `vocabulary` tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def folder(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Tokenizer of transformers with its chat template."""
    pad, bos, end, *roles = SPECIAL
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=end,
        additional_special_tokens=roles,
        model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def _words(text: str) -> int:
    """Approximate number of tokens, before there is a tokenizer."""
    return len(text) // 3 + 1


if __name__ == "__main__":
    main()
