"""Training of the embedded model, from scratch or from a checkpoint.

    python -m training.train CORPUS OUT [--size base] [--start FOLDER] [--seconds 1500] ...

Every phase of the recipe has a context length and a share of the time. Matrices inside the layers
are updated by Muon, all else by AdamW; the model computes in bfloat16 over float32 master weights.
OUT becomes a Hugging Face folder, saved every few minutes, so that an interruption loses little;
`--start OUT` resumes from there with the same weights and optimizer states, with new samples and
without a second warm-up. `log.jsonl` in it has a line per report.

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), no arXiv
number: the variant of torch, with the learning rate matched to AdamW's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer, Qwen3ForCausalLM

from larder.core.errors import LarderError
from larder_bench.datasets.sources import TaskSources
from larder_bench.results.rows import append_rows, existing_rows
from training.checkpoint import load_checkpoint, save_checkpoint
from training.model_config import SIZES, initialize_model
from training.samples import ANSWER, TEXT, Phase, Recipe, SampleMixture

SAVE_SECONDS = 300
LOG, REPORT_STEPS = "log.jsonl", 10
LOSS_ROWS = 8192  # tokens whose logits exist at a time
WARMUP_STEPS, DECAY, LEAST_RATE = 50, 0.45, 0.02
CLIP = 1.0


@dataclass(frozen=True)
class TrainingSchedule:
    """Settings of the training.

    Args:
        seconds: time of all phases together.
        tokens: tokens per update; `micro` of them are computed at a time.
        rate: peak learning rate; it falls to a fiftieth over the last part of the time.
        text_share: share of text tokens in the loss; answer tokens all count.
        text_weight: weight of the loss on texts relative to that on answers.
    """

    seconds: float
    tokens: int = 65536
    micro: int = 16384
    rate: float = 3e-3
    text_share: float = 0.12
    text_weight: float = 0.5

    def rate_at(self, step: int, done: float) -> float:
        """Learning rate of a step after a share `done` of the time."""
        rise = min(1.0, (step + 1) / WARMUP_STEPS)
        return self.rate * rise * min(1.0, max(LEAST_RATE, (1 - done) / DECAY))


@dataclass
class Trainer:
    """Model under training with its optimizers.

    Args:
        steps: number of updates so far, including those of former runs.
        seen: number of tokens in these updates.
    """

    model: Qwen3ForCausalLM
    schedule: TrainingSchedule
    masters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    steps: int = 0
    seen: int = 0

    def __post_init__(self) -> None:
        named = dict(self.model.named_parameters())
        self.masters = {
            name: torch.nn.Parameter(weight.detach().float().clone())
            for name, weight in named.items()
        }
        for weight in named.values():  # buffers stay: frequencies of RoPE must not be rounded
            weight.data = weight.data.to(torch.bfloat16)
        inner = [w for n, w in self.masters.items() if w.dim() == 2 and ".layers." in n]
        others = [w for n, w in self.masters.items() if w.dim() != 2 or ".layers." not in n]
        self.optimizers = [
            torch.optim.Muon(
                inner, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, betas=(0.9, 0.97), weight_decay=0.0),
        ]

    def step(self, batches: Iterator[tuple[Any, Any]], context: int, done: float) -> TrainingLosses:
        """One update from as many batches as it needs; losses in nats per token."""
        accumulated = max(1, self.schedule.tokens // max(self.schedule.micro, context))
        sums = TrainingLosses(0.0, 0.0)
        for _ in range(accumulated):
            ids, uses = (torch.from_numpy(part).to(self.model.device) for part in next(batches))
            total, losses = loss(self.model, ids.long(), uses, self.schedule)
            (total / accumulated).backward()
            sums = sums + losses.scaled(1 / accumulated)
            self.seen += ids.shape[0] * context
        self._update(self.schedule.rate_at(self.steps, done))
        self.steps += 1
        return sums

    def save(self, out: Path) -> None:
        """Save the master weights in bfloat16 for transformers, and a checkpoint."""
        state = {name: weight.detach().to(torch.bfloat16) for name, weight in self.masters.items()}
        self.model.save_pretrained(out, state_dict=state)
        save_checkpoint(self.masters, self.optimizers, out)

    def resume(self, start: Path) -> None:
        """Resume from a folder that `save` wrote; a folder without a checkpoint only has
        weights.
        """
        if load_checkpoint(self.masters, self.optimizers, start):
            self._copy_weights()

    def _update(self, rate: float) -> None:
        weights = dict(self.model.named_parameters())
        for name, master in self.masters.items():
            master.grad = weights[name].grad.to(master.device, torch.float32)
            weights[name].grad = None
        torch.nn.utils.clip_grad_norm_(list(self.masters.values()), CLIP)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._copy_weights()

    def _copy_weights(self) -> None:
        """Copy the master weights to the model."""
        weights = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, master in self.masters.items():
                weights[name].copy_(master)


@dataclass(frozen=True)
class TrainingLosses:
    """Cross-entropy on answers and on texts, in nats per token."""

    answer: float
    text: float

    def __add__(self, other: TrainingLosses) -> TrainingLosses:
        return TrainingLosses(self.answer + other.answer, self.text + other.text)

    def scaled(self, by: float) -> TrainingLosses:
        return TrainingLosses(self.answer * by, self.text * by)


def loss(
    model: Qwen3ForCausalLM,
    ids: Int[Tensor, "B T"],
    uses: UInt8[Tensor, "B T"],
    schedule: TrainingSchedule,
) -> tuple[Float[Tensor, ""], TrainingLosses]:
    """Minimized loss and its two parts. Only the tokens that count get logits."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    use = uses[:, 1:].flatten()
    drawn = torch.rand(use.shape, device=use.device) < schedule.text_share
    chosen = ((use == ANSWER) | ((use == TEXT) & drawn)).nonzero()[:, 0]
    states, expected = hidden.flatten(0, 1)[chosen], ids[:, 1:].flatten()[chosen]
    parts = [
        checkpoint(_cross_entropy, some, model.lm_head.weight, targets, use_reentrant=False)
        for some, targets in zip(states.split(LOSS_ROWS), expected.split(LOSS_ROWS), strict=True)
    ]
    each, is_answer = torch.cat(parts), use[chosen] == ANSWER
    answer = (each * is_answer).sum() / is_answer.sum().clamp(min=1)
    text = (each * ~is_answer).sum() / (~is_answer).sum().clamp(min=1)
    return answer + schedule.text_weight * text, TrainingLosses(
        float(answer.detach()), float(text.detach())
    )


def _cross_entropy(
    states: Float[Tensor, "N E"], weight: Float[Tensor, "V E"], expected: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    return cross_entropy(linear(states, weight).float(), expected, reduction="none")


def train(
    trainer: Trainer, mixer: SampleMixture, phases: tuple[Phase, ...], out: Path, seed: int = 0
) -> None:
    """Train all phases one after the other within the time, and save the result in `out`.

    Samples depend on the seed and on the tokens that were seen before.
    """
    started = saved = time.perf_counter()
    first = (seed + trainer.seen) * 1000
    whole, over = sum(phase.share for phase in phases), 0.0
    for number, phase in enumerate(phases):
        over += phase.share / whole
        rows = max(1, trainer.schedule.micro // phase.context)
        batches = mixer.rows(first + number, phase.context, rows)
        while (done := (time.perf_counter() - started) / trainer.schedule.seconds) < over:
            losses = trainer.step(batches, phase.context, done)
            seconds = time.perf_counter() - started
            is_due = time.perf_counter() - saved > SAVE_SECONDS
            if is_due or seconds >= trainer.schedule.seconds or trainer.steps % REPORT_STEPS == 0:
                _report(out, trainer, phase, losses, seconds)
            if not math.isfinite(losses.answer + losses.text):
                raise LarderError(
                    f"The loss is not finite at step {trainer.steps}: take a lower --rate, and "
                    "resume with --start from the last save."
                )
            if is_due:
                trainer.save(out)
                saved = time.perf_counter()
    trainer.save(out)


def training_progress(start: Path) -> tuple[int, int]:
    """Steps and tokens of a saved model; zeros if its folder has no log."""
    lines = existing_rows(start / LOG)
    return (lines[-1]["step"], lines[-1]["tokens"]) if lines else (0, 0)


def _report(
    out: Path, trainer: Trainer, phase: Phase, losses: TrainingLosses, seconds: float
) -> None:
    line = {
        "step": trainer.steps,
        "context": phase.context,
        "seconds": round(seconds),
        "tokens": trainer.seen,
        "answer": round(losses.answer, 4),
        "text": round(losses.text, 4),
    }
    print(json.dumps(line), flush=True)
    append_rows(out / LOG, [line])


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.start)
    tokenizer.save_pretrained(options.out)
    steps, seen = training_progress(Path(options.start)) if options.start else (0, 0)
    torch.manual_seed(options.seed + seen)
    if options.start:
        model = Qwen3ForCausalLM.from_pretrained(options.start, dtype=torch.float32)
    else:
        model = initialize_model(options.size, options.seed)
    recipe = Recipe.read()
    backend = tokenizer.backend_tokenizer
    sources = TaskSources(
        lambda text: len(backend.encode(text).ids), corpus=options.corpus, split="train"
    )
    schedule = TrainingSchedule(
        options.seconds, options.tokens, options.micro, options.rate, options.text_share
    )
    trainer = Trainer(model.to(options.device).train(), schedule, steps=steps, seen=seen)
    if options.start:
        trainer.resume(Path(options.start))
    mixer, phases = (
        SampleMixture(recipe.ingredients, sources, backend),
        options.phases or recipe.phases,
    )
    try:
        train(trainer, mixer, phases, options.out, options.seed)
    except LarderError as error:
        sys.exit(str(error))


def _phases(text: str) -> tuple[Phase, ...]:
    pairs = (part.split(":") for part in text.split(","))
    return tuple(Phase(int(context), float(share)) for context, share in pairs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="folder with prose and training dialogues")
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--start", help="folder of a model to resume from, instead of --size")
    parser.add_argument("--tokenizer", help="folder of a tokenizer; that of --start by default")
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of one update")
    parser.add_argument("--micro", type=int, default=16384, help="tokens computed at a time")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--text-share", type=float, default=0.12)
    phases = "CONTEXT:SHARE,... instead of the recipe's"
    parser.add_argument("--phases", type=_phases, metavar="PHASES", help=phases)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not (options.start or options.tokenizer):
        parser.error("a fresh model needs --tokenizer FOLDER (see tokenizer.py)")
    return options


if __name__ == "__main__":
    main()
