"""Samples of the fine-tuning are the prompts that questions are asked in; answers alone count."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from peft import LoraConfig, get_peft_model  # pyright: ignore
from safetensors.torch import load_file

from larder.models.loader import seed_tokenizer
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import parse_task
from tiny_models import tiny
from training.lora import FIRST_SEED, DialogueMixture, DialogueSample, answer_loss, save_adapter
from training.samples import MixtureComponent

SPELLING = "lifelog(questions=4, kinds='single')"


class FixedSeed(Random):
    """Source of samples whose conversation has a known seed."""

    def randrange(self, *_: int) -> int:  # type: ignore[override]
        return FIRST_SEED


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerAdapter:
    return TokenizerAdapter(seed_tokenizer())


def test_a_sample_is_the_prompt_of_a_question_with_its_answer(tokenizer: TokenizerAdapter) -> None:
    sources = TaskSources(tokenizer.count_tokens, split="train")
    mixture = DialogueMixture([MixtureComponent(SPELLING, 1.0, 0.4)], sources, tokenizer)
    sample = mixture.draw(FixedSeed(3), 700)
    conversation = parse_task(SPELLING).make(FIRST_SEED, 420, sources)
    start = sample.is_answer.index(True)
    context = tokenizer.encode_conversation(conversation).ids
    prompts = [
        context + tokenizer.encode_question_about(conversation, question)
        for question in conversation.questions
    ]
    [question] = [
        question
        for question, prompt in zip(conversation.questions, prompts, strict=True)
        if sample.ids[:start] == prompt
    ]
    answer = tokenizer.encode_answer_about(conversation, question)
    assert sample.ids[start : start + len(answer)] == answer
    answers = [i for i, used in zip(sample.ids, sample.is_answer, strict=True) if used]
    text = tokenizer.decode(answers)
    assert all(question.answer in text for question in conversation.questions)
    assert sum(sample.is_answer) == sum(
        len(tokenizer.encode_answer_about(conversation, one)) for one in conversation.questions
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_only_answers_count_and_the_adapter_is_saved_in_half_precision(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny("llama"), config)
    ids = torch.arange(12)
    sample = DialogueSample(tuple(ids.tolist()), (False,) * 8 + (True, True) + (False,) * 2)
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[7:9], ids[8:10])
    assert torch.allclose(answer_loss(model, sample), expected, atol=1e-5)
    save_adapter(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved and all(weight.dtype == torch.float16 for weight in saved.values())
