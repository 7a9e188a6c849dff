"""`larder train cartridge`: saved for a file, and begun with by `larder ask`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_results import CAT, Run, complaint
from larder.cache import ChunkEntries
from larder.core import Conversation, Progress
from larder.engine import Engine
from larder.models import Card, LearnedWeights
from larder.training import CartridgeSettings

POLICY = ("--policy", "cartridge(slots=16) > unlimited()")


def untrained(
    engine: Engine, conversation: Conversation, settings: CartridgeSettings, progress: Progress
) -> tuple[LearnedWeights, tuple[int, ...]]:
    """Cartridge of the first tokens' own entries."""
    memory = engine.read(conversation)
    first = ChunkEntries.of(memory.caches.activate(0), 0, settings.slots)
    pairs = zip(first.keys, first.values, strict=True)
    layers = tuple({"keys": keys, "values": values} for keys, values in pairs)
    progress(1, 1)
    card = Card("cartridge", (engine.loaded.decoder.spec.fingerprint,), seed=settings.seed)
    return LearnedWeights(card, layers), memory.transcript.ids


@pytest.mark.extended
def test_cartridge_is_trained_on_a_file_and_asked(run: Run, talk: Path, monkeypatch) -> None:
    monkeypatch.setattr("larder.training.cartridge.train_cartridge", untrained)
    done = run("train", "cartridge", str(talk), "--slots", "16", "--seed", "3", "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["card"]["method"] == "cartridge" and result["card"]["seed"] == 3
    assert Path(result["file"]).parent.name == "cartridges"
    asked = run("ask", str(talk), "-q", CAT, *POLICY, "--max-new-tokens", "4", "--keep", "--json")
    assert asked.exit_code == 0, asked.stderr
    Path(result["file"]).unlink()
    again = run("ask", str(talk), "-q", CAT, *POLICY, "--max-new-tokens", "4", "--keep", "--json")
    assert again.exit_code == 0, again.stderr  # the saved cache


def test_missing_cartridge_error_names_the_train_command(run: Run, talk: Path) -> None:
    done = run("ask", str(talk), "-q", CAT, *POLICY)
    assert done.exit_code != 0
    assert "`larder train cartridge FILE --slots 16 --model seed`" in done.stderr


def test_cartridge_needs_a_file_and_no_other_method_takes_one(run: Run, talk: Path) -> None:
    done = run("train", "cartridge")
    assert done.exit_code == 2 and "name its FILE" in done.stderr
    done = run("train", "kvzap", str(talk))
    assert done.exit_code == 2 and "--corpus FOLDER" in done.stderr
    assert "two slots or more" in complaint(run("train", "cartridge", talk, "--slots", "0"), 2)
