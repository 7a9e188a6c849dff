"""Fine-tuning of a chat model with LoRA on dialogues with questions about what was said.

    python -m training.lora CORPUS OUT [--model smollm2] [--seconds 2700] [--rank 8] ...

A sample is a conversation of the recipe, then its questions with their answers as turns of the
model's own chat template; only answers count in the loss. OUT becomes an adapter as peft saves it,
in float16, saved every few minutes; `log.jsonl` in it has a line per report.

Edward Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), arXiv:2106.09685.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from larder.core.errors import BadParameter, TooLittle
from larder.models.model_packages import PACKAGED_MODELS
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import parse_task
from training.samples import MixtureComponent

RECIPE = Path(__file__).with_name("lora_recipe.toml")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
TRIES = 200
FIRST_SEED = 10**6  # seeds below it are of tests and benchmarks
WARMUP_STEPS, LEAST_RATE, CLIP = 10, 0.05, 1.0
REPORT_STEPS = 10
HELD_OUT_SAMPLES = 6
MOST_GAPS = 6


class PhaseOrder(Enum):
    """Order of a recipe's phases.

    SEQUENCE: one after the other, each for its share of the time.
    RANDOM: drawn for each sample, with its share of the samples.
    """

    SEQUENCE = "sequence"
    RANDOM = "random"


@dataclass(frozen=True)
class DialoguePhase:
    """Length of samples in tokens and its share, relative to the others.

    Args:
        span: number of positions over which the tokens are spread, see `spread_positions`; a
            smaller one than the length leaves them dense.
    """

    context: int
    share: float
    span: int = 0


@dataclass(frozen=True)
class DialogueRecipe:
    """Kinds of conversations, and the lengths of samples."""

    components: tuple[MixtureComponent, ...]
    phases: tuple[DialoguePhase, ...]
    order: PhaseOrder = PhaseOrder.SEQUENCE

    @staticmethod
    def read(path: Path) -> DialogueRecipe:
        """Recipe of a TOML file."""
        fields: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return DialogueRecipe(
            tuple(MixtureComponent(**each) for each in fields["tasks"]),
            tuple(DialoguePhase(**each) for each in fields["phases"]),
            PhaseOrder(fields.get("order", PhaseOrder.SEQUENCE.value)),
        )

    def phase(self, elapsed: float, random: Random) -> DialoguePhase:
        """Phase of the next sample after a share of the time."""
        shares = [each.share for each in self.phases]
        if self.order is PhaseOrder.RANDOM:
            return random.choices(self.phases, shares)[0]
        for phase, ended in zip(self.phases, accumulate(shares), strict=True):
            if elapsed < ended / sum(shares):
                return phase
        return self.phases[-1]


@dataclass(frozen=True)
class DialogueSample:
    """Token ids of a conversation with its questions, and whether each is part of an answer.

    Args:
        starts: indices in increasing order at which messages and questions start, the first left
            out: where `spread_positions` may leave positions out.
    """

    ids: tuple[int, ...]
    is_answer: tuple[bool, ...]
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class DialogueMixture:
    """Generator of samples in a model's chat template.

    Args:
        components: kinds of conversations, with their shares.
        sources: data of the training split.
    """

    components: Sequence[MixtureComponent]
    sources: TaskSources
    tokenizer: TokenizerAdapter

    def draw(self, random: Random, tokens: int) -> DialogueSample:
        """Sample of at most `tokens` tokens.

        Raises:
            BadParameter: no kind of the recipe fits.
        """
        for _ in range(TRIES):
            [kind] = random.choices(self.components, [one.share for one in self.components])
            count = min(kind.most, max(1, int(tokens * kind.asked) // kind.each))
            task = parse_task(kind.spelling.replace("{questions}", str(count)))
            room = int(tokens * (1 - kind.asked))
            try:
                conversation = task.make(random.randrange(FIRST_SEED, 2**31), room, self.sources)
            except (BadParameter, TooLittle):
                continue
            transcript = self.tokenizer.encode_conversation(conversation)
            ids = list(transcript.ids)
            starts = [start for start, _ in transcript.spans[1:]]
            is_answer = [False] * len(ids)
            for question in random.sample(conversation.questions, len(conversation.questions)):
                asked = self.tokenizer.encode_question_about(conversation, question)
                answer = self.tokenizer.encode_answer_about(conversation, question)
                if len(ids) + len(asked) + len(answer) > tokens:
                    break
                starts.append(len(ids))
                ids += asked + answer
                is_answer += [False] * len(asked) + [True] * len(answer)
            if any(is_answer):
                return DialogueSample(tuple(ids), tuple(is_answer), tuple(starts))
        raise BadParameter(f"training.lora needs samples that fit {tokens} tokens: take more.")


@dataclass(frozen=True)
class LoraTraining:
    """Training of an adapter.

    Args:
        model: peft model.
        seconds: time of all phases together.
        rate: peak learning rate; it falls to a twentieth along a cosine.
        accumulate: samples per update.
    """

    model: Any
    mixture: DialogueMixture
    recipe: DialogueRecipe
    seconds: float
    rate: float
    accumulate: int
    out: Path
    save_seconds: float = 150

    def run(self, seed: int) -> None:
        """Train until the time is over; saves on the way and at the end."""
        random, held_out = Random(seed), self._held_out()
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self.rate, betas=(0.9, 0.98), weight_decay=0.0)
        started = saved = time.monotonic()
        step, losses, tokens, answers = 0, list[float](), 0, 0
        for step in self._steps(started):
            share = (time.monotonic() - started) / self.seconds
            for group in optimizer.param_groups:
                group["lr"] = self.rate * _rate_share(step, share)
            for _ in range(self.accumulate):
                phase = self.recipe.phase(share, random)
                sample = self.mixture.draw(random, phase.context)
                loss = answer_loss(self.model, sample, spread_positions(sample, phase.span, random))
                (loss / self.accumulate).backward()
                losses.append(float(loss.detach()))
                tokens += len(sample.ids)
                answers += sum(sample.is_answer)
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % REPORT_STEPS == 0:
                self._report(step, share, tokens, answers, losses)
                losses.clear()
            if time.monotonic() - saved > self.save_seconds:
                self._save(step, tokens, held_out)
                saved = time.monotonic()
        self._save(step, tokens, held_out)

    def _steps(self, started: float) -> Iterator[int]:
        step = 0
        while time.monotonic() - started < self.seconds:
            yield step
            step += 1

    def _held_out(self) -> list[DialogueSample]:
        random = Random(-1)
        return [self.mixture.draw(random, 1200) for _ in range(HELD_OUT_SAMPLES)]

    def _report(
        self, step: int, share: float, tokens: int, answers: int, losses: Sequence[float]
    ) -> None:
        mean = sum(losses) / len(losses)
        row = {"step": step, "share": round(share, 4), "tokens": tokens, "answer_tokens": answers}
        self._log(row | {"loss": round(mean, 4)})

    def _save(self, step: int, tokens: int, held_out: Sequence[DialogueSample]) -> None:
        save_adapter(self.model, self.out)
        with torch.no_grad():
            losses = [float(answer_loss(self.model, sample)) for sample in held_out]
        loss = round(sum(losses) / len(losses), 4)
        self._log({"step": step, "tokens": tokens, "held_out_loss": loss})

    def _log(self, row: dict[str, Any]) -> None:
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def save_adapter(model: Any, folder: Path) -> None:
    """Save the adapter of a peft model in float16, half the bytes that peft writes."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    weights = get_peft_model_state_dict(model, save_embedding_layers=False).items()
    halves = {name: weight.to(torch.float16).contiguous() for name, weight in weights}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(halves, folder / "adapter_model.safetensors", {"format": "pt"})
    config = model.peft_config["default"]
    config.inference_mode = True
    config.save_pretrained(str(folder))


def spread_positions(sample: DialogueSample, span: int, random: Random) -> Tensor:
    """Positions of a sample's tokens, with gaps at starts of messages, up to `span` in all.

    A short sample then shows the distances of a long one at the cost of a short one. The number of
    gaps, their places and their sizes are random, and so is the number of positions left out: from
    none to all that `span` allows.

    Dawei Zhu et al., "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise
    Training" (2023), arXiv:2309.10400, section 3.2; chunks end with messages here, of which the
    number differs.
    """
    positions = torch.arange(len(sample.ids))
    room = random.randint(0, max(0, span - len(sample.ids)))
    starts = random.sample(sample.starts, min(len(sample.starts), random.randint(1, MOST_GAPS)))
    ends = [0, *sorted(random.randint(0, room) for _ in starts[1:]), room]
    for start, before, after in zip(starts, ends, ends[1:], strict=False):
        positions[start:] += after - before
    return positions


def answer_loss(model: Any, sample: DialogueSample, positions: Tensor | None = None) -> Tensor:
    """Mean cross entropy of the answers' tokens; logits exist for these alone."""
    ids = torch.tensor([sample.ids])
    if positions is None:
        positions = torch.arange(len(sample.ids))
    predicting = torch.tensor([n - 1 for n, used in enumerate(sample.is_answer) if used])
    base = model.get_base_model()
    hidden = base.model(
        input_ids=ids[:, :-1],
        # Without a mask transformers takes gaps between positions for borders of packed sequences.
        attention_mask=torch.ones_like(ids[:, :-1]),
        position_ids=positions[None, :-1],
        use_cache=False,
    ).last_hidden_state[0]
    logits = base.lm_head(hidden[predicting]).float()
    return cross_entropy(logits, ids[0, predicting + 1])


def _rate_share(step: int, share: float) -> float:
    cosine = LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * min(1.0, share))) / 2
    return cosine * min(1.0, (step + 1) / WARMUP_STEPS)


def main() -> None:
    """Command line of the training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("corpus", type=Path, help="folder of prose and dialogues")
    parser.add_argument("out", type=Path, help="folder of the adapter")
    parser.add_argument("--model", default="smollm2", help="name of a packaged model")
    parser.add_argument("--seconds", type=float, default=2700)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="folder of an adapter to go on from")
    parser.add_argument("--attention", default="sdpa", help="eager is faster below 800 tokens")
    parser.add_argument("--save-seconds", type=float, default=150)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    options = parser.parse_args()
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from peft.utils import load_peft_weights
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    folder = PACKAGED_MODELS[options.model].folder(options.model)
    module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=options.attention
    )
    tokenizer = TokenizerAdapter(AutoTokenizer.from_pretrained(folder))
    config = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules=list(TARGETS), bias="none"
    )
    model = get_peft_model(module, config)
    model.peft_config["default"].base_model_name_or_path = options.model
    if options.start:
        set_peft_model_state_dict(model, load_peft_weights(str(options.start), "cpu"))
    sources = TaskSources(tokenizer.count_tokens, options.corpus, split="train")
    recipe = DialogueRecipe.read(options.recipe)
    options.out.mkdir(parents=True, exist_ok=True)
    training = LoraTraining(
        model,
        DialogueMixture(recipe.components, sources, tokenizer),
        recipe,
        options.seconds,
        options.rate,
        options.accumulate,
        options.out,
        options.save_seconds,
    )
    training.run(options.seed)


if __name__ == "__main__":
    main()
