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
from training.lora import (
    FIRST_SEED,
    DialogueMixture,
    DialoguePhase,
    DialogueRecipe,
    DialogueSample,
    PhaseOrder,
    answer_loss,
    save_adapter,
    spread_positions,
)
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
    spans = tokenizer.encode_conversation(conversation).spans
    assert sample.starts[: len(spans) - 1] == tuple(begin for begin, _ in spans[1:])
    assert len(context) == sample.starts[len(spans) - 1]
    assert len(sample.starts) == len(spans) - 1 + len(conversation.questions)
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


def test_positions_leave_gaps_only_where_messages_start() -> None:
    sample = DialogueSample(tuple(range(40)), (False,) * 40, (7, 13, 20, 31))
    ends = list[int]()
    for seed in range(50):
        positions = spread_positions(sample, 100, Random(seed))
        steps = positions.diff()
        assert positions[0] == 0 and bool((steps >= 1).all())
        assert {int(n) + 1 for n in (steps > 1).nonzero()} <= set(sample.starts)
        ends.append(int(positions[-1]))
    assert min(ends) < 50 and 90 < max(ends) < 100
    assert torch.equal(spread_positions(sample, 0, Random(0)), torch.arange(40))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_tokens_attend_over_gaps() -> None:
    """As token by token with a cache, where no gap can be taken for the start of a sequence."""
    torch.manual_seed(0)
    model = get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    ids = torch.arange(12)
    positions = torch.tensor([0, 1, 2, 9, 10, 11, 12, 40, 41, 42, 43, 44])
    sample = DialogueSample(tuple(ids.tolist()), (False,) * 8 + (True, True) + (False,) * 2)
    cache, rows = None, list[torch.Tensor]()
    with torch.no_grad():
        for n, position in enumerate(positions):
            step = model(
                ids[None, n : n + 1], position_ids=position[None, None], past_key_values=cache
            )
            cache = step.past_key_values
            rows.append(step.logits[0, 0])
        expected = torch.nn.functional.cross_entropy(torch.stack(rows)[7:9], ids[8:10])
        dense = answer_loss(model, sample)
    assert torch.allclose(answer_loss(model, sample, positions), expected, atol=1e-5)
    assert not torch.allclose(dense, expected, atol=1e-4)


@pytest.mark.parametrize("order", list(PhaseOrder))
def test_phases_come_in_the_order_of_the_recipe(order: PhaseOrder) -> None:
    phases = (DialoguePhase(100, 1.0), DialoguePhase(200, 3.0))
    recipe, random = DialogueRecipe((), phases, order), Random(0)
    early = [recipe.phase(0.2, random) for _ in range(1000)]
    late = [recipe.phase(0.3, random) for _ in range(1000)]
    match order:
        case PhaseOrder.SEQUENCE:
            assert set(early) == {phases[0]} and set(late) == {phases[1]}
            assert recipe.phase(1.0, random) is phases[1]
        case PhaseOrder.RANDOM:
            assert 200 < early.count(phases[0]) < 300 and 200 < late.count(phases[0]) < 300


def test_the_recipes_are_read() -> None:
    folder = Path(__file__).parent
    read = {path.stem: DialogueRecipe.read(path) for path in folder.glob("lora_recipe*.toml")}
    assert read["lora_recipe"].order is PhaseOrder.SEQUENCE
    assert read["lora_recipe"].phases[0] == DialoguePhase(700, 0.15)
    assert read["lora_recipe_spread"].order is PhaseOrder.RANDOM
    assert read["lora_recipe_spread"].phases[0] == DialoguePhase(1200, 0.2, 5200)
