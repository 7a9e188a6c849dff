"""Training lowers the loss, counts steps and tokens, and saves a folder that loads."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from training.model_config import initialize_model
from training.samples import ANSWER, TEXT, Phase
from training.train import Trainer, TrainingSchedule, loss, train, training_progress

PACE = TrainingSchedule(seconds=1, tokens=64, micro=64, rate=1e-2, text_share=1.0)


class OneBatch:
    """Mixture that always draws the same rows."""

    def __init__(self):
        self.seeds: list[int] = []

    def rows(self, seed: int, context: int, count: int):
        self.seeds.append(seed)
        random = Random(0)
        ids = torch.tensor([[random.randrange(6, 99) for _ in range(17)] for _ in range(4)])
        uses = torch.full((4, 17), TEXT, dtype=torch.uint8)
        uses[:, 9:] = ANSWER
        while True:
            yield ids.int().numpy(), uses.numpy()


def test_loss_is_the_mean_over_each_kind_of_token():
    model = initialize_model("tiny")
    ids, uses = (torch.from_numpy(part) for part in next(OneBatch().rows(0, 16, 4)))
    total, parts = loss(model, ids.long(), uses, PACE)
    logits = model(ids.long()[:, :-1]).logits.detach()
    each = cross_entropy(logits.flatten(0, 1), ids.long()[:, 1:].flatten(), reduction="none")
    is_answer = uses[:, 1:].flatten() == ANSWER
    assert parts.answer == pytest.approx(float(each[is_answer].mean()), rel=1e-4)
    assert parts.text == pytest.approx(float(each[~is_answer].mean()), rel=1e-4)
    assert float(total.detach()) == pytest.approx(parts.answer + 0.5 * parts.text, rel=1e-5)


def test_text_share_of_zero_gives_no_text_loss():
    ids, uses = (torch.from_numpy(part) for part in next(OneBatch().rows(0, 16, 4)))
    none = TrainingSchedule(seconds=1, text_share=0.0)
    assert loss(initialize_model("tiny"), ids.long(), uses, none)[1].text == 0


@pytest.mark.extended
def test_loss_decreases_on_repeated_rows():
    torch.manual_seed(0)
    trainer, batches = Trainer(initialize_model("tiny"), PACE), OneBatch().rows(0, 16, 4)
    losses = [trainer.step(batches, 16, 0.1).answer for _ in range(40)]
    assert losses[-1] < losses[0] - 0.5
    assert trainer.seen == 40 * 4 * 16


def test_learning_rate_warms_up_and_decays():
    schedule = TrainingSchedule(seconds=1, rate=1.0)
    assert schedule.rate_at(0, 0.0) < schedule.rate_at(49, 0.1) == 1.0
    assert schedule.rate_at(100, 0.775) == pytest.approx(0.5)
    assert schedule.rate_at(100, 1.0) == pytest.approx(0.02)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_are_bfloat16_and_positions_float32(device):
    """Rounded frequencies would put far tokens elsewhere than the model that is loaded later."""
    trainer, exact = (
        Trainer(initialize_model("tiny").to(device), PACE),
        initialize_model("tiny").model.rotary_emb,
    )
    assert {w.dtype for w in trainer.model.parameters()} == {torch.bfloat16}
    assert {w.dtype for w in trainer.masters.values()} == {torch.float32}
    frequencies = trainer.model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert device == "meta" or torch.equal(frequencies, exact.inv_freq)


def test_saved_model_loads_with_the_trained_weights(tmp_path):
    trainer = Trainer(initialize_model("tiny"), TrainingSchedule(seconds=0.2, tokens=64, micro=64))
    train(trainer, OneBatch(), (Phase(16, 1.0),), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, trainer.masters[name].detach().bfloat16().float())


def test_resumed_training_draws_new_samples_without_warmup(tmp_path):
    schedule, phases, mixer = (
        TrainingSchedule(seconds=0.05, tokens=64, micro=64),
        (Phase(16, 1.0),),
        OneBatch(),
    )
    assert training_progress(tmp_path) == (0, 0)
    trainer = Trainer(initialize_model("tiny"), schedule)
    train(trainer, mixer, phases, tmp_path, seed=3)
    with (tmp_path / "log.jsonl").open("a") as lines:
        lines.write('{"step": 99')  # stopped while it wrote
    assert training_progress(tmp_path) == (trainer.steps, trainer.seen)
    steps, seen = trainer.steps, trainer.seen
    again = Trainer(trainer.model, schedule, steps=steps, seen=seen)
    train(again, mixer, phases, tmp_path, seed=3)
    assert list(mixer.seeds) == [3000, (3 + seen) * 1000]
    assert training_progress(tmp_path) == (again.steps, again.seen) and again.seen > seen


def test_training_resumes_from_a_folder(tmp_path):
    torch.manual_seed(0)
    trainer, batches = Trainer(initialize_model("tiny"), PACE), OneBatch().rows(0, 16, 4)
    for _ in range(3):
        trainer.step(batches, 16, 0.1)
    trainer.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    again = Trainer(model, PACE, steps=trainer.steps, seen=trainer.seen)
    again.resume(tmp_path)
    for each in (trainer, again):
        each.step(batches, 16, 0.1)
    for name, weight in trainer.masters.items():
        assert torch.equal(weight, again.masters[name]), name


def test_resume_without_a_saved_state_keeps_the_weights(tmp_path):
    trainer = Trainer(initialize_model("tiny"), PACE)
    before = {name: weight.detach().clone() for name, weight in trainer.masters.items()}
    trainer.resume(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.masters.items())
