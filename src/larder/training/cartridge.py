"""Training of a cartridge: keys and values that replace those of one text (Cartridges).

Eyuboglu et al., "Cartridges: Lightweight and general-purpose long context representations via
self-study" (2025), arXiv:2506.06266, sections 3 and 4: the slots of all layers and kv heads begin
as the entries of the text's first tokens; Adam moves all but the first slot, so that the model with
the slots predicts the answers of self-study conversations as the model with the whole text does.
The loss is the cross-entropy against the highest log-probabilities of the latter (context
distillation). Checked against released code. What differs: questions stand behind the positions of
the whole text, not of the slots, and most conversations are made of the text (`self_study`).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import fmean

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.conversation import Conversation
from larder.core.errors import BadParameter, InputError, ModelError
from larder.core.spec import ModelSpec
from larder.core.types import Mode, Queries
from larder.engine.engine import Engine
from larder.models.attention_backend import AttentionInputs
from larder.models.batch_segment import BatchSegment
from larder.models.cartridges import METHOD
from larder.models.decoder import Decoder
from larder.models.learned_weights import Card, LayerTensors, LearnedWeights
from larder.models.lm_head import LMHead
from larder.prefill.base import Progress
from larder.prefill.contexts import check_chunkable
from larder.training.gated_attention import attention_under_mask
from larder.training.passage_method import differentiable_states, frozen
from larder.training.self_study import StudyConversation, StudyCounts, study_conversations

WARM_UP = 0.05  # share of the steps in which the rate rises


@dataclass(frozen=True)
class CartridgeSettings:
    """Settings of the training of a cartridge.

    Args:
        slots: of each layer and kv head.
        epochs: times that each conversation is studied.
        batch_tokens: tokens of conversations in a step, about.
        rate: of Adam; a cosine ends it.
        top: log-probabilities of the teacher that are kept per token.
        seed: of conversations and of their order.
        study: conversations.
    """

    slots: int = 256
    epochs: int = 3
    batch_tokens: int = 256
    rate: float = 0.02
    top: int = 20
    seed: int = 0
    study: StudyCounts = StudyCounts()

    def __post_init__(self) -> None:
        if min(self.slots - 1, self.epochs, self.batch_tokens, self.top) < 1 or not self.rate > 0:
            raise BadParameter(
                "A cartridge needs two slots or more, and epochs, batch_tokens, rate and top above "
                f"0, got {self.slots}, {self.epochs}, {self.batch_tokens}, {self.rate} and "
                f"{self.top}."
            )


@dataclass(frozen=True)
class StudyBatch:
    """Conversations of one step, laid end to end.

    Args:
        ids: questions and answers.
        lengths: tokens of each conversation.
        rows: tokens whose prediction is compared: those before each token of an answer.
        top_ids: of the teacher's highest log-probabilities at each row.
        log_probabilities: these.
    """

    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    top_ids: Int64[Tensor, "N T"]
    log_probabilities: Float[Tensor, "N T"]


class SlotAttention:
    """Attention to trained slots, and causally within each conversation.

    Args:
        keys, values: slots of each layer, keys rotated.
        lengths: tokens of each conversation.
    """

    def __init__(
        self,
        keys: Sequence[Float[Tensor, "K S D"]],
        values: Sequence[Float[Tensor, "K S D"]],
        lengths: Sequence[int],
    ) -> None:
        self._keys, self._values = keys, values
        self._is_seen = visible(keys[0].shape[1], lengths).to(keys[0].device)

    def attend(self, inputs: AttentionInputs) -> Queries:
        slots = self._keys[inputs.layer], self._values[inputs.layer]
        keys, values = (
            torch.cat([slot.to(new.dtype), new], 1)
            for slot, new in zip(slots, (inputs.keys, inputs.values), strict=True)
        )
        return attention_under_mask(inputs, inputs.queries, keys, values, self._is_seen)


def visible(slots: int, lengths: Sequence[int]) -> Bool[Tensor, "Q S"]:
    """Slots and earlier tokens of its conversation that each token sees."""
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    order = torch.arange(len(owners))
    own = (owners[:, None] == owners) & (order[:, None] >= order)
    return torch.cat([torch.ones(len(owners), slots, dtype=torch.bool), own], 1)


def train_cartridge(
    engine: Engine, conversation: Conversation, settings: CartridgeSettings, progress: Progress
) -> tuple[LearnedWeights, tuple[int, ...]]:
    """Slots of a text, and the token ids that they replace.

    Args:
        engine: under the policy `full`.
        progress: called with steps done and in total.

    Raises:
        InputError: the text is too short.
        ModelError: the model's layers do not hold entries of their own, or hold latents.
    """
    decoder, started = engine.runtime.decoder, time.perf_counter()
    check_slots(decoder.spec)
    memory = engine.read(conversation)
    ids, cache = memory.transcript.ids, memory.caches.activate(0)
    if len(ids) <= settings.slots:
        raise InputError(
            f"The text has {len(ids)} tokens, no more than {settings.slots} slots: take fewer "
            "slots, or keep the text as it is."
        )
    studied = [*study_conversations(engine, memory, settings.study, settings.seed)]
    batches = study_batches(engine, cache, conversation, studied, settings)
    first = ChunkEntries.of(cache, 0, settings.slots)
    layers, losses = fit_slots(decoder, first, len(ids), batches, settings, progress)
    tail = max(1, len(losses) // 10)
    teacher = fmean(float(entropy(batch.log_probabilities)) for batch in batches)
    metrics = {"first_loss": fmean(losses[:tail]), "last_loss": fmean(losses[-tail:])}
    metrics["teacher_entropy"] = teacher
    card = Card(
        METHOD,
        (decoder.spec.fingerprint,),
        hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16],
        sum(len(batch.ids) for batch in batches),
        settings.seed,
        round(time.perf_counter() - started, 1),
        {name: round(value, 4) for name, value in metrics.items()},
        asdict(settings) | {"text_tokens": len(ids), "conversations": len(studied)},
    )
    return LearnedWeights(card, layers), ids


def check_slots(spec: ModelSpec) -> None:
    """Check that the entries of a model can be trained.

    Raises:
        ModelError: a layer holds none of its own, or latents.
    """
    check_chunkable(spec, METHOD)
    if any(layer.latent_rank for layer in spec.layers):
        raise ModelError(
            "A cartridge cannot be trained for a model that caches latents (MLA): choose another "
            "model, or a policy such as kvzip."
        )


def study_batches(
    engine: Engine,
    cache: SequenceCache,
    conversation: Conversation,
    studied: Sequence[StudyConversation],
    settings: CartridgeSettings,
) -> list[StudyBatch]:
    """Conversations in batches, with the predictions of the model that has read the text."""
    tokenizer, pairs = engine.tokenizer, list[tuple[tuple[int, ...], tuple[int, ...]]]()
    for each in studied:
        question = conversation.question_prompt.format(question=each.question)
        answer = tokenizer.encode_answer(each.answer)
        pairs.append((tokenizer.encode_question(question), answer))
    Random(settings.seed).shuffle(pairs)
    found, waiting = list[StudyBatch](), list[tuple[tuple[int, ...], tuple[int, ...]]]()
    for number, pair in enumerate(pairs, start=1):
        waiting.append(pair)
        is_full = sum(len(q) + len(a) for q, a in waiting) >= settings.batch_tokens
        if is_full or number == len(pairs):
            found.append(_taught(engine.runtime.decoder, cache, waiting, settings.top))
            waiting = []
    return found


def _taught(
    decoder: Decoder,
    cache: SequenceCache,
    pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    top: int,
) -> StudyBatch:
    """Batch with the highest log-probabilities behind the full cache."""
    ids, rows, lengths = list[int](), list[int](), list[int]()
    for question, answer in pairs:
        rows += range(len(ids) + len(question) - 1, len(ids) + len(question) + len(answer) - 1)
        ids += [*question, *answer]
        lengths.append(len(question) + len(answer))
    segment = BatchSegment(cache, tuple(ids), tuple(lengths))
    logits = decoder.forward_logits([segment], Mode.SCRATCH, rows)
    best = logits.float().log_softmax(-1).topk(min(top, logits.shape[1]), -1)
    return StudyBatch(tuple(ids), tuple(lengths), tuple(rows), best.indices, best.values)


def fit_slots(
    decoder: Decoder,
    first: ChunkEntries,
    text_tokens: int,
    batches: Sequence[StudyBatch],
    settings: CartridgeSettings,
    progress: Progress,
) -> tuple[tuple[LayerTensors, ...], list[float]]:
    """Slots of each layer after training, and the loss of each step.

    Args:
        first: entries that the slots begin as.
        text_tokens: position of the first token of a question.
    """
    sides = [[side.float() for side in both] for both in (first.keys, first.values)]
    fixed = [[side[:, :1] for side in both] for both in sides]
    moved = [[side[:, 1:].clone().requires_grad_() for side in both] for both in sides]
    optimizer = torch.optim.Adam([side for both in moved for side in both], lr=settings.rate)
    total = settings.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_share(step, total))
    head, losses, source = LMHead(decoder.module), list[float](), Random(settings.seed)
    with frozen(decoder.module):
        for done in range(total):
            if done % len(batches) == 0:
                order = source.sample(range(len(batches)), len(batches))
            optimizer.zero_grad()
            with torch.enable_grad():
                keys, values = _joined(fixed, moved)
                batch = batches[order[done % len(batches)]]
                loss = study_loss(decoder, head, keys, values, text_tokens, batch)
                loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            progress(done + 1, total)
    keys, values = _joined(fixed, moved)
    pairs = zip(keys, values, strict=True)
    return tuple({"keys": k.detach(), "values": v.detach()} for k, v in pairs), losses


def study_loss(
    decoder: Decoder,
    head: LMHead,
    keys: Sequence[Float[Tensor, "K S D"]],
    values: Sequence[Float[Tensor, "K S D"]],
    text_tokens: int,
    batch: StudyBatch,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of the model with slots against the teacher's log-probabilities."""
    device = keys[0].device
    starts = [torch.arange(length, device=device) for length in batch.lengths]
    indices = torch.cat(starts) + text_tokens
    attention = SlotAttention(keys, values, batch.lengths)
    states = differentiable_states(decoder, batch.ids, attention, indices)
    logits = head.logits(states[list(batch.rows)]).log_softmax(-1)
    own = logits.gather(1, batch.top_ids)
    return -(batch.log_probabilities.exp() * own).sum(1).mean()


def entropy(log_probabilities: Float[Tensor, "N T"]) -> Float[Tensor, ""]:
    """Mean cross-entropy of the kept log-probabilities against themselves, the least loss."""
    return -(log_probabilities.exp() * log_probabilities).sum(1).mean()


def rate_share(step: int, total: int) -> float:
    """Share of the rate at a step: a short rise, then a cosine to 0."""
    rise = max(1, round(WARM_UP * total))
    return min((step + 1) / rise, 0.5 * (1 + math.cos(math.pi * step / total)))


def _joined(
    fixed: Sequence[Sequence[Tensor]], moved: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """Keys and values of each layer, the first slot and the others."""
    return [
        [torch.cat(pair, 1) for pair in zip(*both, strict=True)]
        for both in zip(fixed, moved, strict=True)
    ]
