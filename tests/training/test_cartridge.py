"""Cartridges: attention to slots, the loss by hand, training, and caches that begin with them."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F

from builders import a_layer, a_spec
from larder import Chat, Engine
from larder.cache import ChunkEntries, SequenceCache
from larder.core import (
    BadParameter,
    Conversation,
    InputError,
    Message,
    Mode,
    ModelError,
    UsageError,
)
from larder.engine import StorePersistence
from larder.models import AttentionInputs, BatchSegment, LearnedWeights, LMHead, cartridge_path
from larder.store import Store
from larder.training import (
    CartridgeSettings,
    SlotAttention,
    StudyBatch,
    StudyConversation,
    StudyCounts,
    check_slots,
    facts,
    fit_slots,
    parts,
    study_batches,
    study_conversations,
    study_loss,
    train_cartridge,
    visible,
)
from references import cartridge as reference

SLOTS = 12
TEXT = Conversation(
    "shopping",
    tuple(
        Message("user" if number % 2 == 0 else "assistant", content)
        for number, content in enumerate(
            (
                "I bought 14 red candles in Lisbon last week. They smell of figs.",
                "That sounds lovely, did Maria come along with you?",
                "No, Maria stayed at home with her old cat Oscar and read a book all day.",
                "I hope that Oscar is well again after the long winter in the cold barn.",
                "He is, and on Sunday we will all go to the lake near Porto by train.",
            )
        )
    ),
)
SETTINGS = CartridgeSettings(slots=SLOTS, epochs=2, batch_tokens=120, study=StudyCounts(6, 3, 2, 1))
POLICY = f"cartridge(slots={SLOTS}) > unlimited()"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("seed", policy="full")


def nothing(done: int, total: int) -> None:
    del done, total


def first_slots(engine: Engine) -> tuple[ChunkEntries, SequenceCache, tuple[int, ...]]:
    """Entries of the first tokens of the text, its full cache, and its tokens."""
    memory = engine.read(TEXT)
    cache = memory.caches.activate(0)
    return ChunkEntries.of(cache, 0, SLOTS), cache, memory.transcript.ids


def untrained(engine: Engine, slots: int = SLOTS) -> tuple[int, ...]:
    """Save a cartridge that holds the entries of the first tokens; the tokens of the text."""
    learned, ids = train_cartridge(engine, TEXT, replace(SETTINGS, epochs=1, rate=1e-12), nothing)
    learned.save(cartridge_path(engine.runtime.decoder.spec.fingerprint, ids, slots))
    return ids


def test_mask_covers_slots_and_the_own_conversation() -> None:
    seen = visible(2, (2, 1))
    assert seen.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]


@pytest.mark.parametrize("softcap", [None, 0.4])
def test_attention_equals_its_reference(softcap) -> None:
    source = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=source)  # noqa: E731
    slots = [draw(2, 3, 4) for _ in range(2)]
    queries, keys, values = draw(4, 5, 4), draw(2, 5, 4), draw(2, 5, 4)
    attention = SlotAttention([slots[0]], [slots[1]], (3, 2))
    out = attention.attend(AttentionInputs(0, queries, keys, values, 0.5, None, softcap))
    for query_head in range(4):
        head = query_head // 2
        held = [*zip(slots[0][head].tolist(), slots[1][head].tolist(), strict=True)]
        tokens = [*zip(keys[head].tolist(), values[head].tolist(), strict=True)]
        for index in range(5):
            own = tokens[(0 if index < 3 else 3) : index + 1]
            query = queries[query_head, index].tolist()
            expected = reference.attended(query, held, own, 0.5, softcap)
            torch.testing.assert_close(out[query_head, index], torch.tensor(expected))


def test_models_with_latents_are_refused() -> None:
    with pytest.raises(ModelError, match="latents"):
        check_slots(a_spec(replace(a_layer(2, 1), latent_rank=4)))


def test_loss_hand_values(engine) -> None:
    decoder, vocabulary = engine.runtime.decoder, engine.runtime.decoder.vocab_size

    class FlatHead(LMHead):
        """Head whose logits are all alike but for the first token's."""

        def __init__(self) -> None:
            pass

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(len(hidden), vocabulary)
            logits[:, 0] = 2.0
            return logits

    first, _, ids = first_slots(engine)
    known = torch.tensor([[0.5, 0.25]]).log()
    batch = StudyBatch((5, 6, 7), (3,), (1,), torch.tensor([[0, 9]]), known)
    sides = [*first.keys], [*first.values]
    found = study_loss(decoder, FlatHead(), *sides, len(ids), batch)
    norm = math.log(math.exp(2) + vocabulary - 1)
    assert float(found) == pytest.approx(0.5 * (norm - 2) + 0.25 * norm, rel=1e-5)
    logits = [[2.0, *([0.0] * (vocabulary - 1))]]
    assert float(found) == pytest.approx(reference.loss([{0: 0.5, 9: 0.25}], logits), rel=1e-5)


def test_slots_of_all_tokens_equal_the_cache(engine) -> None:
    _, cache, ids = first_slots(engine)
    whole, decoder = ChunkEntries.of(cache, 0, len(ids)), engine.runtime.decoder
    result = [StudyConversation("Who is Oscar?", "a cat"), StudyConversation("Where?", "Lisbon")]
    settings = replace(SETTINGS, top=decoder.vocab_size)
    (batch,) = study_batches(engine, cache, TEXT, result, settings)
    head = LMHead(decoder.module)
    found = study_loss(decoder, head, whole.keys, whole.values, len(ids), batch)
    least = -(batch.log_probabilities.exp() * batch.log_probabilities).sum(1).mean()
    assert float(found.detach()) == pytest.approx(float(least), abs=1e-3)
    still = replace(settings, epochs=1, rate=1e-12)
    _, losses = fit_slots(decoder, whole, len(ids), [batch], still, nothing)
    assert losses == [pytest.approx(float(least), abs=1e-3)]
    answers = sum(len(engine.tokenizer.encode_answer(each.answer)) for each in result)
    assert len(batch.rows) == answers and len(batch.lengths) == 2


@pytest.mark.extended
def test_training_lowers_the_loss_with_a_frozen_first_slot(engine) -> None:
    first, cache, ids = first_slots(engine)
    studied = [*study_conversations(engine, engine.read(TEXT), StudyCounts(6, 3, 2, 0), 0)]
    batches = study_batches(engine, cache, TEXT, studied, SETTINGS)
    settings = replace(SETTINGS, epochs=15, rate=0.02)
    layers, losses = fit_slots(engine.runtime.decoder, first, len(ids), batches, settings, nothing)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    for own, keys, values in zip(layers, first.keys, first.values, strict=True):
        assert torch.equal(own["keys"][:, 0], keys[:, 0].float())
        assert torch.equal(own["values"][:, 0], values[:, 0].float())
        assert not torch.equal(own["keys"][:, 1], keys[:, 1].float())
    assert all(weight.requires_grad for weight in engine.runtime.decoder.module.parameters())


@pytest.mark.extended
def test_caches_start_with_slots_at_the_positions_of_the_text(engine) -> None:
    ids = untrained(engine)
    first, *_ = first_slots(engine)
    memory = engine.under(POLICY).read(TEXT)
    cache = memory.caches.activate(0)
    assert cache.next_position == len(ids) and cache.lengths()[0][0] == SLOTS
    assert memory.figures.kv_bytes < 0.5 * memory.figures.full_kv_bytes
    for index, (keys, values) in enumerate(zip(first.keys, first.values, strict=True)):
        entries = cache.entries(index)
        torch.testing.assert_close(entries.pack(entries.keys), keys.flatten(0, 1))
        torch.testing.assert_close(entries.pack(entries.values), values.flatten(0, 1))
    question = engine.tokenizer.encode_question("Who is Oscar?")
    segment = BatchSegment(cache, question, (len(question),))
    rows = [len(question) - 1]
    logits = engine.runtime.decoder.forward_logits([segment], Mode.SCRATCH, rows)
    none = torch.zeros(1, 1, dtype=torch.int64)
    batch = StudyBatch(question, (len(question),), (*rows,), none, torch.zeros(1, 1))
    decoder = engine.runtime.decoder
    head = LMHead(decoder.module)
    loss = study_loss(decoder, head, first.keys, first.values, len(ids), batch)
    expected = F.cross_entropy(logits.float(), torch.tensor([0]))
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-3)


@pytest.mark.extended
def test_saved_chat_of_a_cartridge_resumes_without_its_file(engine, tmp_path) -> None:
    ids, own = untrained(engine), engine.under(POLICY)
    with closing(Store(str(tmp_path / "store"), tmp_path)) as store:
        chat = Chat(own, "candles", TEXT, keeper=StorePersistence(store, own.loaded))
        chat.say("Who is Oscar?", max_new_tokens=4)
        assert chat.keep() == ""
        cartridge_path(own.loaded.decoder.spec.fingerprint, ids, SLOTS).unlink()
        again = Chat(own, "candles", keeper=StorePersistence(store, own.loaded))
        assert again.resumed.state is not None  # the cache, since there is nothing to begin with
        assert again.memory.caches.activate(0).lengths()[0][0] < 3 * SLOTS


@pytest.mark.extended
def test_other_texts_and_budgets_are_refused(engine) -> None:
    untrained(engine)
    own = engine.under(POLICY)
    other = Conversation("other", (Message("user", "What is the weather like today in Rome?"),))
    with pytest.raises(ModelError, match="larder train cartridge FILE --slots 12"):
        own.read(other)
    stray = cartridge_path(engine.runtime.decoder.spec.fingerprint, (), SLOTS)
    stray.with_name(f"copy-{SLOTS}-of{stray.suffix}").touch()
    with pytest.raises(ModelError, match="larder train cartridge FILE --slots 12"):
        own.read(other)
    with pytest.raises(ModelError, match="No cartridge of 13 slots"):
        engine.under("cartridge(slots=13) > unlimited()").read(TEXT)
    with pytest.raises(UsageError, match="take unlimited"):
        engine.under(f"cartridge(slots={SLOTS}) > uniform(tokens=60)").read(TEXT)
    with pytest.raises(InputError, match="take fewer slots, or keep"):
        train_cartridge(engine, TEXT, replace(SETTINGS, slots=500), nothing)


@pytest.mark.extended
def test_file_of_other_shapes_is_refused(engine) -> None:
    learned, ids = train_cartridge(engine, TEXT, replace(SETTINGS, epochs=1), nothing)
    path = cartridge_path(engine.runtime.decoder.spec.fingerprint, ids, SLOTS)
    LearnedWeights(learned.card, learned.layers[:-1]).save(path)
    with pytest.raises(ModelError, match="no slots of this model: remove it"):
        engine.under(POLICY).read(TEXT)
    LearnedWeights(replace(learned.card, fingerprints=("other",)), learned.layers).save(path)
    with pytest.raises(ModelError, match="was trained for the model other, not for this one"):
        engine.under(POLICY).read(TEXT)


def test_facts_mask_names_before_other_words() -> None:
    result = [*facts(["Then I met Maria Lopez at the gate.", "It was cold and wet."], 3, Random(0))]
    assert [each.answer for each in result[:2]] == ["Maria Lopez", "Maria Lopez"]
    assert "Then I met ___ at the gate." in result[0].question
    assert result[2].answer == "and wet" and "It was cold ___." in result[2].question


def test_passage_samples_follow_the_text() -> None:
    words = [f"w{number}" for number in range(30)]
    for each in parts(words, '"{}"', (4, 6), 20, Random(1)):
        cue = each.question.strip('"').split()
        start = words.index(cue[0])
        assert cue == words[start : start + 4]
        assert each.answer.split() == words[start + 4 : start + 10]


@pytest.mark.extended
def test_self_study_uses_the_text_only(engine) -> None:
    memory = engine.read(TEXT)
    result = [*study_conversations(engine, memory, StudyCounts(4, 3, 2, 1), 3)]
    assert len(result) == 10
    assert result == [*study_conversations(engine, memory, StudyCounts(4, 3, 2, 1), 3)]
    text = " ".join(message.content for message in TEXT.messages)
    assert all(each.answer in text for each in result[:9])
    with pytest.raises(InputError, match="too short for self-study"):
        short = Conversation("short", (Message("user", "Hello, how are you?"),))
        next(study_conversations(engine, engine.read(short), StudyCounts(), 0))


@pytest.mark.parametrize(
    "change", [{"slots": 1}, {"epochs": 0}, {"rate": 0.0}, {"top": 0}, {"batch_tokens": 0}]
)
def test_invalid_settings_are_refused(change) -> None:
    with pytest.raises(BadParameter, match="A cartridge needs"):
        replace(SETTINGS, **change)
    with pytest.raises(BadParameter, match="Self-study needs"):
        StudyCounts(0, 0, 0, 0)


def test_path_names_tokens_and_slots() -> None:
    path = cartridge_path("abc", (1, 2, 3), 4)
    assert path.parent.name == "cartridges" and path.name.startswith("3-4-")
    assert path != cartridge_path("abc", (1, 23), 4) and isinstance(path, Path)
